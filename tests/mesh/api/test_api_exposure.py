"""Who gets in: nobody without a key, no page of another origin, no name of another machine."""

import asyncio
import contextlib
import re
import socket
from collections.abc import AsyncIterator, Iterator, Sequence
from importlib.resources import files

import httpx
import pytest
from fastapi import FastAPI
from fastapi.routing import APIRoute
from starlette.routing import BaseRoute, Route
from structlog.testing import capture_logs

from mesh.api.api_keys import ApiKeys
from mesh.api.auth import check_origins
from mesh.api.middleware import is_own_origin, names_this_machine
from mesh.api.web_ui import page_files
from mesh.text.tokenizer import Tokenizer
from spanmesh_proto.errors import MeshError
from tests.support import api_harness
from tests.support.api_harness import KEY, Api, ScriptedEngine, app_of, running_api
from tests.support.raw_client import RawClient, request_bytes

pytestmark = pytest.mark.model

tokenizer = api_harness.tokenizer

CHAT = "/v1/chat/completions"
ASKED = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 2}
ORIGIN = "https://chat.example.org"
PROGRAMS = (
    *("app://notes.example", "chrome-extension://abcdefghijklmnopabcdefghijklmnop", "tauri://localhost"),
    *("vscode-webview://0a1b", "moz-extension://0a1b-2c", "safari-web-extension://0A1B-2C", "app://x:8080"),
    *("capacitor://localhost", "ionic://localhost", "ftp://x"),
)
METHODS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE", "PROPFIND")


@pytest.fixture
def keys() -> ApiKeys:
    return ApiKeys.from_plain({"alice": KEY})


@pytest.fixture
def app(tokenizer: Tokenizer, keys: ApiKeys) -> FastAPI:
    return app_of(ScriptedEngine([(300,)]), tokenizer, keys=keys, cors_origins=[ORIGIN])


def paths_of(routes: Sequence[BaseRoute]) -> Iterator[str]:
    """Of every route, those of included routers too."""
    for route in routes:
        router = getattr(route, "original_router", None)
        if router is not None:
            yield from paths_of(router.routes)
        else:
            assert isinstance(route, APIRoute | Route), f"{route!r} is of a kind that this test does not know"
            yield route.path


async def test_without_a_key_every_route_there_is_answers_401_but_health(app: FastAPI) -> None:
    paths = {path.replace("{model_id:path}", "smollm2") for path in paths_of(app.routes)}
    assert {CHAT, "/v1/models/smollm2", "/mesh/links", "/health"} <= paths
    asked = {*paths, "/", "/docs", "/v1/nothing", "/health/", "//health", "/Health", "/health;x", "/v1"} - {
        "/health"
    }
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as http:
        for path in sorted(asked):
            for method in METHODS:
                for headers in ({}, {"authorization": "Bearer guess"}, {"origin": "https://evil.example"}):
                    response = await http.request(method, "http://127.0.0.1" + path, headers=headers)
                    assert response.status_code == 401, (method, path)
                    assert response.headers["www-authenticate"] == "Bearer"
        assert (await http.get("/health")).status_code == 200


async def test_without_a_key_a_browser_gets_the_question_for_it_and_nothing_of_the_mesh(
    tokenizer: Tokenizer, keys: ApiKeys
) -> None:
    async with running_api(ScriptedEngine([(300,)]), tokenizer, keys=keys) as api:
        asked = await api.http.get("/", headers={"accept": "text/html,*/*;q=0.8"})
        assert (asked.status_code, asked.headers["www-authenticate"]) == (401, "Bearer")
        assert asked.text == (files("mesh.web") / "index.html").read_text()
        linked = re.findall(r'(?:src|href)="(/[^"]+)"', asked.text)
        assert len(linked) > 5
        for path in {*linked, *page_files()} - {"/"}:
            response = await api.http.get(path)
            assert response.status_code == 200
            assert response.content == (files("mesh.web") / path.removeprefix("/page/")).read_bytes()
            # Nothing but reading.
            assert (await api.http.post(path)).status_code == 401
        for path in (
            "/page/",
            "/page/__init__.py",
            "/page/..%2fapi/app.py",
            "/page/app.js/",
            "//page/app.js",
        ):
            response = await api.http.get(httpx.URL(api.url).copy_with(raw_path=path.encode()))
            assert response.status_code == 401, path
        with_key = {"authorization": f"Bearer {KEY}"}
        assert (await api.http.get("/", headers=with_key)).status_code == 200


async def test_the_page_may_use_nothing_from_elsewhere(tokenizer: Tokenizer) -> None:
    async with running_api(ScriptedEngine([(300,)]), tokenizer) as api:
        for path, file in page_files().items():
            response = await api.http.get(path)
            policy = response.headers["content-security-policy"]
            assert "default-src 'none'" in policy
            assert "unsafe" not in policy
            assert response.headers["x-content-type-options"] == "nosniff"
            assert not re.findall(rb"https?://(?!www\.w3\.org/2000/svg)", file.body), path
            again = await api.http.get(path, headers={"if-none-match": response.headers["etag"]})
            assert (again.status_code, again.content) == (304, b"")
        html = page_files()["/"].body.decode()
        assert not re.findall(r'<style|\sstyle=|<script(?! src=| type="module" src=)|\son[a-z]+=', html)


# Web pages


@pytest.mark.parametrize(
    ("origin", "host", "is_own"),
    [
        ("http://127.0.0.1:8000", "127.0.0.1:8000", True),
        ("http://[::1]:8000", "[::1]:8000", True),
        ("http://localhost:8000", "LOCALHOST:8000", True),
        ("https://192.168.1.10", "192.168.1.10", True),
        (f"http://{socket.gethostname().lower()}:8000", f"{socket.gethostname().lower()}:8000", True),
        # Another port is another page; a name may have been led here by its owner.
        ("http://127.0.0.1:8001", "127.0.0.1:8000", False),
        ("http://evil.example:8000", "evil.example:8000", False),
        ("http://localhost.evil.example", "localhost.evil.example", False),
        ("null", "null", False),
        ("", "", False),
        ("http://", "", False),
        ("file://localhost", "localhost", False),
    ],
)
def test_the_own_page_is_known_by_a_name_that_nobody_else_can_lead_here(
    origin: str, host: str, *, is_own: bool
) -> None:
    assert is_own_origin(origin, host) is is_own


async def test_the_own_page_may_ask_where_no_key_is_needed(tokenizer: Tokenizer) -> None:
    async with running_api(ScriptedEngine([(300,)]), tokenizer) as api:
        assert (await api.http.post(CHAT, json=ASKED, headers={"origin": api.url})).status_code == 200
        for other in ("http://127.0.0.1:1", "http://evil.example", "null"):
            refused = await api.http.post(CHAT, json=ASKED, headers={"origin": other})
            assert refused.status_code == 401
        two = [("origin", api.url), ("origin", "http://evil.example")]
        assert (await api.http.post(CHAT, json=ASKED, headers=two)).status_code == 401


async def preflight(api: Api, origin: str) -> httpx.Response:
    headers = {
        "origin": origin,
        "access-control-request-method": "POST",
        "access-control-request-headers": "authorization,content-type,x-stainless-os",
    }
    return await api.http.options(CHAT, headers=headers)


async def test_pages_of_named_origins_may_ask_and_read(tokenizer: Tokenizer, keys: ApiKeys) -> None:
    async with running_api(ScriptedEngine([(300,)]), tokenizer, keys=keys, cors_origins=[ORIGIN]) as api:
        asked = await preflight(api, ORIGIN)
        assert asked.status_code == 200
        assert asked.headers["access-control-allow-origin"] == ORIGIN
        assert "x-stainless-os" in asked.headers["access-control-allow-headers"]
        headers = {"origin": ORIGIN, "authorization": f"Bearer {KEY}"}
        answer = await api.http.post(CHAT, json=ASKED, headers=headers)
        assert answer.status_code == 200
        assert answer.headers["access-control-allow-origin"] == ORIGIN
        # The page may read why it was refused, and gets no further without a key.
        refused = await api.http.post(CHAT, json=ASKED, headers={"origin": ORIGIN})
        assert (refused.status_code, refused.headers["access-control-allow-origin"]) == (401, ORIGIN)
        for other in ("https://evil.example", "null", "http://chat.example.org", ORIGIN + ".evil.example"):
            asked = await preflight(api, other)
            assert asked.status_code == 401
            assert not any(name.startswith("access-control") for name in asked.headers)


@pytest.mark.parametrize("origin", [*PROGRAMS[:4], "null"])
async def test_programs_that_are_named_may_ask_and_read(tokenizer: Tokenizer, origin: str) -> None:
    async with running_api(ScriptedEngine([(300,)]), tokenizer, cors_origins=[origin]) as api:
        asked = await preflight(api, origin)
        answer = await api.http.post(CHAT, json=ASKED, headers={"origin": origin})
        for response in (asked, answer):
            assert response.status_code == 200
            assert response.headers["access-control-allow-origin"] == origin
        for other in (f"{origin}.evil.example", origin.upper(), "https://evil.example"):
            assert (await preflight(api, other)).status_code == 405
            assert (await api.http.post(CHAT, json=ASKED, headers={"origin": other})).status_code == 401


async def test_where_no_origin_is_named_a_preflight_is_no_different(tokenizer: Tokenizer) -> None:
    async with running_api(ScriptedEngine([(300,)]), tokenizer) as api:
        asked = await preflight(api, ORIGIN)
        assert asked.status_code == 405
        assert not any(name.startswith("access-control") for name in asked.headers)


async def test_where_no_key_is_needed_no_page_can_make_a_browser_change_anything(
    tokenizer: Tokenizer,
) -> None:
    # What a browser sends for a form of another origin, without asking first.
    path, headers = "/mesh/evict?host=attic", {"origin": "https://evil.example"}
    async with running_api(ScriptedEngine([]), tokenizer) as api:
        refused = await api.http.post(path, headers=headers)
        assert refused.status_code == 401
        assert "--cors-origin" in refused.json()["error"]["message"]
    async with running_api(ScriptedEngine([]), tokenizer, cors_origins=["https://evil.example"]) as api:
        assert (await api.http.post(path, headers=headers)).status_code != 401


@pytest.mark.parametrize(
    "origin",
    [
        *(
            "chat.example.org",
            f"{ORIGIN}/",
            "https://*.example.org",
            "",
            f"{ORIGIN} ",
            "HTTPS://x",
            "http://X",
        ),
        *("app://", "app:notes", "app://notes/page", "APP://notes", "1app://notes", "app://a b", "app://u@h"),
        *("http://x:0", "http://x:65536", "app://x:65536", "http://x:80", "https://x:443", "Null", "**"),
    ],
)
def test_what_is_no_origin_is_named(origin: str) -> None:
    with pytest.raises(MeshError, match=re.escape(f"--cors-origin {origin!r} is not an origin")) as caught:
        check_origins([ORIGIN, origin], has_keys=True)
    assert caught.value.param == "--cors-origin"


def test_programs_and_extensions_have_origins_too() -> None:
    check_origins(PROGRAMS, has_keys=False)


@pytest.mark.parametrize("origin", ["*", "null", "file://"])
def test_all_pages_need_keys(origin: str) -> None:
    check_origins([origin], has_keys=True)
    check_origins([ORIGIN, "http://localhost:3000", "http://[::1]:3000", "https://x:80"], has_keys=False)
    with pytest.raises(MeshError, match=re.escape(f"--cors-origin {origin!r}") + ".*--api-key-file"):
        check_origins([origin], has_keys=False)


# Names


@pytest.mark.parametrize(
    ("host", "is_ours"),
    [
        ("127.0.0.1", True),
        ("127.0.0.1:8000", True),
        ("127.8.8.8", True),
        ("LocalHost:80", True),
        ("[::1]:8000", True),
        ("[::1]", True),
        ("evil.example", False),
        ("evil.example:8000", False),
        ("localhost.:8000", True),
        ("chat.LocalHost:8000", True),
        ("[::ffff:127.0.0.1]:8000", True),
        ("localhost.evil.example", False),
        ("notlocalhost", False),
        ("127.0.0.1.evil.example", False),
        ("127.0.0.1@evil.example", False),
        ("192.168.1.4", False),
        ("0.0.0.0", False),
        ("", False),
        ("[::1", True),
        ("::1", False),
    ],
)
def test_which_names_are_this_machine(host: str, *, is_ours: bool) -> None:
    assert names_this_machine(host) is is_ours


async def test_an_open_server_does_not_answer_to_other_names(tokenizer: Tokenizer) -> None:
    engine = ScriptedEngine([(300,)])
    async with running_api(engine, tokenizer) as api:
        with capture_logs() as events:
            rebound = await api.http.post(CHAT, json=ASKED, headers={"host": "evil.example"})
        assert rebound.status_code == 421
        assert rebound.json()["error"]["code"] == "misdirected_request"
        assert engine.requests == []
        assert [event["host"] for event in events] == ["evil.example"]
        assert (await api.http.post(CHAT, json=ASKED, headers={"host": "localhost"})).status_code == 200


async def test_a_server_with_keys_answers_to_any_name(tokenizer: Tokenizer, keys: ApiKeys) -> None:
    async with running_api(ScriptedEngine([(300,)]), tokenizer, keys=keys) as api:
        headers = {"host": "mesh.example.org", "authorization": f"Bearer {KEY}"}
        assert (await api.http.get("/v1/models", headers=headers)).status_code == 200


# Clients that do not finish what they began to say


@pytest.fixture
async def impatient(tokenizer: Tokenizer) -> AsyncIterator[Api]:
    async with running_api(ScriptedEngine([(300,)]), tokenizer, patience_s=0.2) as api:
        yield api


WHOLE = request_bytes(ASKED)


@pytest.mark.parametrize("size", [1, 40, WHOLE.index(b"\r\n\r\n") + 4, len(WHOLE) - 1])
@pytest.mark.parametrize("is_second", [False, True])
async def test_half_a_request_is_not_waited_for(impatient: Api, size: int, *, is_second: bool) -> None:
    client = await RawClient.connect(impatient)
    with capture_logs() as events:
        async with asyncio.timeout(20):
            if is_second:
                await client.send(WHOLE)
                await client.read_until(b"}}")
            await client.send(WHOLE[:size])
            with contextlib.suppress(ConnectionResetError):
                assert await client.read() == b""
    client.hang_up()
    cut = [event for event in events if event["event"] == "sender_cut_off"]
    assert [event["patience_s"] for event in cut] == [0.2]
    assert not [event for event in events if event["log_level"] == "error"]


async def test_a_slow_sender_in_time_and_one_that_thinks_between_requests_stay(tokenizer: Tokenizer) -> None:
    # Long enough for a machine on which other tests start processes meanwhile.
    async with running_api(ScriptedEngine([(300,)]), tokenizer, patience_s=1.0) as api:
        client = await RawClient.connect(api)
        for _ in range(2):
            for start in range(0, len(WHOLE), 64):
                await client.send(WHOLE[start : start + 64])
                await asyncio.sleep(0.005)
            assert b"200 OK" in await client.read_until(b"}}")
            await asyncio.sleep(1.2)
        client.hang_up()


@pytest.mark.parametrize(
    "data",
    [
        b"\x16\x03\x01 this is no HTTP\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: localhost\r\nBad Name: x\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: localhost\r\nHost: localhost\r\n\r\n",
        b"POST / HTTP/1.1\r\nHost: localhost\r\nContent-Length: -1\r\n\r\n",
    ],
)
async def test_what_is_not_http_gets_an_error_of_the_same_shape(impatient: Api, data: bytes) -> None:
    client = await RawClient.connect(impatient)
    await client.send(data)
    head, _, body = (await client.read_until(b"never")).partition(b"\r\n\r\n")
    client.hang_up()
    assert b"400 Bad Request" in head
    assert b"connection: close" in head.lower()
    error = httpx.Response(200, content=body).json()["error"]
    assert error["code"] == "invalid_request_error"


@pytest.mark.parametrize(
    ("path", "key", "status"),
    [("/health", "", b"405"), ("/v1/models", KEY, b"405"), ("/v1/models", "x", b"401"), (CHAT, KEY, b"413")],
)
async def test_a_body_that_is_said_to_be_huge_changes_nothing_but_for_who_reads_it(
    tokenizer: Tokenizer, keys: ApiKeys, path: str, key: str, status: bytes
) -> None:
    async with running_api(ScriptedEngine([(300,)]), tokenizer, keys=keys) as api:
        client = await RawClient.connect(api)
        with capture_logs() as events:
            head = request_bytes(ASKED, path, key).partition(b"Content-Length: ")[0]
            await client.send(head + b"Content-Length: 99999999999999999999\r\n\r\n{")
            answer = await client.read_until(b"}}")
        client.hang_up()
    assert answer.split()[1] == status
    assert set(httpx.Response(200, content=answer.partition(b"\r\n\r\n")[2]).json()) == {"error"}
    assert [event["event"] for event in events] == ["request"]


@pytest.mark.parametrize("method", [b"POST", b"HEAD"])
async def test_a_body_that_turns_into_nonsense_gets_one_answer(impatient: Api, method: bytes) -> None:
    client = await RawClient.connect(impatient)
    head = request_bytes(ASKED).partition(b"Content-Length: ")[0].replace(b"POST", method, 1)
    failures: list[object] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: failures.append(context))
    with capture_logs() as events:
        await client.send(head + b"Transfer-Encoding: chunked\r\n\r\n2\r\n{}\r\nno number\r\n")
        answer = await client.read_until(b"never")
        await asyncio.sleep(0.05)
    client.hang_up()
    assert failures == []
    assert answer.count(b"HTTP/1.1") == 1
    assert answer.startswith(b"HTTP/1.1 400")
    assert not [event for event in events if event["log_level"] == "error"]


async def test_nonsense_in_the_middle_of_an_answer_ends_the_connection_and_nothing_else(
    tokenizer: Tokenizer,
) -> None:
    engine = ScriptedEngine([(300,), 30.0, (301,)])
    async with running_api(engine, tokenizer) as api:
        client = await RawClient.connect(api)
        head = request_bytes({**ASKED, "stream": True}).replace(b"Content-Length: ", b"X-Length: ")
        head, _, body = head.partition(b"\r\n\r\n")
        chunked = head + b"\r\nTransfer-Encoding: chunked\r\n\r\n%x\r\n%s\r\n0\r\n\r\n" % (len(body), body)
        with capture_logs() as events:
            async with asyncio.timeout(20):
                await client.send(chunked + b"\x00 no request\r\n\r\n")
                await client.read_until(b"data: ")
                client.hang_up()
                await engine.closed.wait()
        assert (await api.http.get("/health")).status_code == 200
    assert not [event for event in events if event["log_level"] == "error"]
