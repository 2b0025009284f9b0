"""Keys, health and the socket."""

import asyncio
import signal
import socket
from pathlib import Path

import httpx
import openai
import pytest
from structlog.testing import capture_logs

from mesh.api.api_keys import ApiKeys
from mesh.api.auth import require_key_beyond_loopback
from mesh.api.http_server import listen
from mesh.status import MeshStatus
from mesh.text.tokenizer import Tokenizer
from spanmesh_proto.errors import MeshError, PortInUse
from tests.support.api_harness import KEY, MODEL, ScriptedEngine, running_api

pytestmark = pytest.mark.model


@pytest.fixture(scope="module")
def tokenizer(smollm2_path: Path) -> Tokenizer:
    return Tokenizer(smollm2_path)


@pytest.fixture
def engine() -> ScriptedEngine:
    return ScriptedEngine([(300,)])


@pytest.fixture
def keys(tmp_path: Path) -> ApiKeys:
    path = tmp_path / "keys"
    path.write_text(f"# who may come in\n\nalice {KEY}\nsk-without-name\n")
    return ApiKeys.from_file(path)


@pytest.mark.parametrize("authorization", [None, "Bearer wrong", f"Basic {KEY}", "Bearer", f"Bearer {KEY}x"])
async def test_every_route_but_health_needs_a_key(
    engine: ScriptedEngine, tokenizer: Tokenizer, keys: ApiKeys, authorization: str | None
) -> None:
    headers = {} if authorization is None else {"authorization": authorization}
    async with running_api(engine, tokenizer, keys=keys) as api:
        for method, path in (
            ("GET", "/v1/models"),
            ("POST", "/v1/chat/completions"),
            ("GET", "/mesh/status"),
            ("GET", "/no/such/route"),
            ("GET", "/health/"),
            ("GET", "//health"),
            ("GET", "/health%2f..%2fv1/models"),
            ("OPTIONS", "/v1/models"),
        ):
            response = await api.http.request(method, api.url + path, headers=headers)
            assert response.status_code == 401, path
            assert response.headers["www-authenticate"] == "Bearer"
            assert response.json()["error"]["code"] == "invalid_api_key"


async def test_each_key_opens_and_the_log_has_its_name_only(
    engine: ScriptedEngine, tokenizer: Tokenizer, keys: ApiKeys
) -> None:
    async with running_api(engine, tokenizer, keys=keys) as api:
        with capture_logs() as events:
            assert (await api.openai.models.list()).data
            await api.http.get("/mesh/status", headers={"authorization": "bearer sk-without-name"})
            await api.http.get("/v1/models", headers={"authorization": "Bearer sk-guess"})
            assert (await api.http.get("/health")).status_code == 200
        with pytest.raises(openai.AuthenticationError):
            await api.openai.with_options(api_key="sk-wrong").models.list()
    requests = [event for event in events if event["event"] == "request"]
    assert [event["key"] for event in requests] == ["alice", "key-5dacf57f7782", None, None]
    assert [event["status"] for event in requests] == [200, 200, 401, 200]
    assert "sk-" not in str(events)


async def test_status_comes_from_whoever_knows(engine: ScriptedEngine, tokenizer: Tokenizer) -> None:
    async with running_api(engine, tokenizer, status=lambda: MeshStatus(phase="waiting for hosts")) as api:
        found = (await api.http.get("/mesh/status")).json()
    # What is not known is left out, or null.
    of_model: dict[str, object] = {
        "model": {"name": "?", "architecture": "?", "numeric_mode": "?"},
        "phase": "waiting for hosts",
        "plan": None,
        "failures": [],
        "repairs": {"losses": 0, "count": 0, "last_s": None, "moves": 0},
        "loading": [],
        "stages": [],
        "tokens": {"prompt": 0, "generated": 0},
    }
    assert found == {
        **of_model,
        "hosts": [],
        "state_not_written": None,
        "models": [{"name": MODEL, "kind": "chat", **of_model}],
        "rights": {"load": True, "unload": True},
    }


async def test_while_loading_health_and_requests_get_503(
    engine: ScriptedEngine, tokenizer: Tokenizer
) -> None:
    is_ready = False
    async with running_api(engine, tokenizer, ready=lambda: is_ready) as api:
        body = {"messages": [{"role": "user", "content": "Hello"}]}
        for response in (
            await api.http.get("/health"),
            await api.http.post("/v1/chat/completions", json=body),
        ):
            assert response.status_code == 503
            assert "loading" in response.json()["error"]["message"]
            assert int(response.headers["retry-after"]) > 0
        is_ready = True
        assert (await api.http.get("/health")).json() == {"status": "ok"}
        assert (await api.http.post("/v1/chat/completions", json=body)).status_code == 200


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("# nobody\n", "holds no key"),
        ("one two three\n", "line 1"),
        ("a k1\na k2\n", "names a a second time"),
    ],
)
def test_unusable_key_files_say_why(tmp_path: Path, text: str, reason: str) -> None:
    path = tmp_path / "keys"
    path.write_text(text)
    with pytest.raises(MeshError, match=reason) as caught:
        ApiKeys.from_file(path)
    assert "k1" not in caught.value.message


def test_a_missing_key_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(MeshError, match="No such file"):
        ApiKeys.from_file(tmp_path / "none")


def test_a_port_in_use_is_named_with_the_remedy() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(PortInUse, match=rf"127\.0\.0\.1:{port}.*another --port"):
            listen("127.0.0.1", port)


@pytest.mark.parametrize("host", ["192.0.2.1", "x" * 64])
def test_an_address_of_nobody_here_is_named(host: str) -> None:
    with pytest.raises(MeshError, match=host):
        listen(host, 0)


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.168.1.5", "example.org"])
def test_other_machines_get_in_with_a_key_only(host: str) -> None:
    with pytest.raises(MeshError, match="--api-key-file"):
        require_key_beyond_loopback(host, has_keys=False)
    require_key_beyond_loopback(host, has_keys=True)
    require_key_beyond_loopback(host, has_keys=False, is_insecure=True)


@pytest.mark.parametrize("host", ["127.0.0.1", "127.9.9.9", "::1", "localhost"])
def test_this_machine_needs_no_key(host: str) -> None:
    require_key_beyond_loopback(host, has_keys=False)


async def test_signal_handlers_stay_the_callers(engine: ScriptedEngine, tokenizer: Tokenizer) -> None:
    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    async with running_api(engine, tokenizer):
        assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == before


async def test_the_port_is_free_again_at_once(engine: ScriptedEngine, tokenizer: Tokenizer) -> None:
    async with running_api(engine, tokenizer) as api:
        port = int(api.url.rpartition(":")[2])
        assert (await api.http.get("/health")).status_code == 200
    listen("127.0.0.1", port).close()


async def test_cancelling_the_owner_closes_the_server(engine: ScriptedEngine, tokenizer: Tokenizer) -> None:
    urls: asyncio.Queue[str] = asyncio.Queue()

    async def own() -> None:
        async with running_api(engine, tokenizer) as api:
            urls.put_nowait(api.url)
            await asyncio.Event().wait()

    owner = asyncio.create_task(own())
    url = await urls.get()
    owner.cancel()
    with pytest.raises(asyncio.CancelledError):
        await owner
    async with httpx.AsyncClient() as http:
        with pytest.raises(httpx.ConnectError):
            await http.get(url)


async def test_what_is_not_http_is_refused_and_logged_as_an_event(
    engine: ScriptedEngine, tokenizer: Tokenizer
) -> None:
    async with running_api(engine, tokenizer) as api:
        host, port = api.url.removeprefix("http://").split(":")
        with capture_logs() as events:
            reader, writer = await asyncio.open_connection(host, int(port))
            writer.write(b"\x16\x03\x01 this is no HTTP\r\n\r\n")
            assert b"400" in await reader.readline()
            writer.close()
        assert (await api.http.get("/health")).status_code == 200
    assert [event["event"] for event in events] == ["http_server"]
