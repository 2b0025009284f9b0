"""Hostile HTTP: how it is made, how an answer is judged, and a short run against a real mesh."""

import asyncio
import json
from collections import Counter
from pathlib import Path
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jsonschema import Draft202012Validator

from mesh.cli.main import run
from mesh.text.tokenizer import Tokenizer
from tests.qualification.fuzz.http_fuzz import HttpCase, HttpCases, Reply, exchange, fault_of, is_whole
from tests.qualification.fuzz.mutations import SchemaValues, damaged_value, json_text
from tests.support import api_harness
from tests.support.api_harness import ScriptedEngine, app_of

pytestmark = pytest.mark.model

tokenizer = api_harness.tokenizer

ERROR = json.dumps({"error": {"message": "no", "type": "t", "param": None, "code": "c"}}).encode()


BODIES = ("ChatBody", "CompletionBody", "ResponsesBody", "TokenizeBody", "DetokenizeBody", "EmbeddingsBody")


class Document(dict[str, Any]):
    """Short to print, as hypothesis prints what a property was given that fails."""

    def __repr__(self) -> str:
        return "<the API's document>"


@pytest.fixture(scope="module")
def document(tokenizer: Tokenizer) -> Document:
    return Document(app_of(ScriptedEngine([]), tokenizer).openapi())


@given(seed=st.integers(0, 2**32))
@settings(max_examples=150)
def test_values_are_what_the_schema_allows(document: dict[str, Any], seed: int) -> None:
    values = SchemaValues(document, Random(seed))
    for name in BODIES:
        schema = {"$ref": f"#/components/schemas/{name}"}
        value = values.value(schema)
        Draft202012Validator({**schema, "components": document["components"]}).validate(value)
        assert json.loads(json.dumps(value)) == value


def test_values_of_4000_seeds_survive_json(document: dict[str, Any]) -> None:
    for seed in range(4000):
        values = SchemaValues(document, Random(seed))
        for name in BODIES:
            value = values.value(document["components"]["schemas"][name])
            assert json.loads(json.dumps(value)) == value, seed


@given(seed=st.integers(0, 2**32))
@settings(max_examples=50)
def test_damage_leaves_the_original_alone_and_can_be_written(document: dict[str, Any], seed: int) -> None:
    random = Random(seed)
    value = SchemaValues(document, random).value({"$ref": "#/components/schemas/ChatBody"})
    before = json.dumps(value)
    json_text(damaged_value(value, random), random)
    assert json.dumps(value) == before


def test_a_seed_makes_the_same_requests_whatever_the_key(document: dict[str, Any]) -> None:
    def cases(seed: int, key: str) -> list[HttpCase]:
        maker = HttpCases(document, key, Random(seed))
        return [maker.next() for _ in range(60)]

    key, other = "Xq" * 20, "Yw" * 20
    first, second = cases(1, key), cases(1, other)
    whole = [(case.data, then.data) for case, then in zip(first, second, strict=True) if case.statuses]
    assert [data.replace(key.encode(), other.encode()) for data, _ in whole] == [data for _, data in whole]
    assert first == cases(1, key)
    assert first != cases(2, key)


def test_there_are_all_sorts_of_requests(document: dict[str, Any]) -> None:
    maker = HttpCases(document, "key", Random(3))
    cases = [maker.next() for _ in range(1000)]
    assert 700 < sum(case.is_whole for case in cases) < 1000
    assert 600 < sum(bool(case.statuses) for case in cases) < 900
    paths = Counter(case.data.split(b" ")[1].partition(b"?")[0] for case in cases if case.statuses)
    assert {path.encode() for path in document["paths"] if "{" not in path} <= set(paths)
    assert any(path.startswith(b"/v1/models/") for path in paths)


@pytest.mark.parametrize(
    ("data", "whole"),
    [
        (b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", True),
        (b"GET / HTTP/1.1\r\nHost: x\r\n", False),
        (b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 3\r\n\r\nab", False),
        (b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\n\r\nab", True),
        (b"\x16\x03\x01\r\n\r\n", True),
        (b"", False),
    ],
)
def test_half_requests_are_known_as_such(data: bytes, *, whole: bool) -> None:
    assert is_whole(data) is whole


@pytest.mark.parametrize(
    ("status", "content_type", "body", "reason"),
    [
        (200, "text/event-stream", b"data: [DONE]", None),
        (400, "application/json", ERROR, None),
        (500, "application/json", ERROR, "status 500"),
        (501, "application/json", ERROR, None),
        (503, "application/json", ERROR, "status 503"),
        (405, "application/json", ERROR, "not in the document"),
        (400, "text/plain", ERROR, "another shape"),
        (400, "application/json", b'{"detail": "no"}', "another shape"),
        (400, "application/json", b"not json", "another shape"),
        (None, "", b"", "no answer"),
    ],
)
def test_who_is_to_blame(status: int | None, content_type: str, body: bytes, reason: str | None) -> None:
    case = HttpCase(b"", is_whole=True, statuses=frozenset({200, 400, 501, 503}))
    found = fault_of(case, Reply(status, content_type, body, is_over=True))
    assert found is None if reason is None else reason in str(found)


def test_a_damaged_request_may_be_met_with_silence_and_never_with_a_fault() -> None:
    case = HttpCase(b"", is_whole=False)
    assert fault_of(case, Reply(None, "", b"", is_over=True)) is None
    assert fault_of(case, Reply(405, "application/json", ERROR, is_over=True)) is None
    assert "status 501" in str(fault_of(case, Reply(501, "application/json", ERROR, is_over=True)))
    assert "status 502" in str(fault_of(case, Reply(502, "", b"", is_over=True)))
    declined = HttpCase(b"", is_whole=True, undamaged=frozenset({501}))
    assert fault_of(declined, Reply(501, "application/json", ERROR, is_over=True)) is None
    assert "status 500" in str(fault_of(declined, Reply(500, "application/json", ERROR, is_over=True)))


@pytest.mark.parametrize(
    ("answer", "status", "is_over"),
    [
        (b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok", 200, True),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nok\r\n0\r\n\r\n", 200, True),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nok\r\n", 200, False),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 3\r\n\r\nok", 200, False),
        (b"", None, False),
    ],
)
async def test_an_answer_without_an_end_is_noticed(
    answer: bytes, status: int | None, *, is_over: bool
) -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(answer)
        await reader.read()
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server:
        port = server.sockets[0].getsockname()[1]
        case = HttpCase(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", is_whole=True)
        reply = await exchange(port, case, 5.0 if is_over else 0.2)
    assert (reply.status, reply.is_over) == (status, is_over)


@pytest.mark.cluster
@pytest.mark.sociable
def test_a_real_mesh_stands_a_short_run(
    tmp_path: Path, stage_cache_dir: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(stage_cache_dir))
    arguments = ["--http", "400", "--seed", "7", "-o", str(tmp_path / "out"), "--json"]
    code = run(["bench", "fuzz", *arguments])
    (report,) = json.loads(capsys.readouterr().out)
    assert (code, report["good"], report["kept"]) == (0, True, []), report
    assert report["cases"] == 400
    assert report["outcomes"]["200"] > 10
    assert report["outcomes"]["400"] > 50
    assert report["flat"]


def test_a_kind_must_be_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["bench", "fuzz"]) == 2
    assert "--http" in capsys.readouterr().err
