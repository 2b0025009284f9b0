"""`mesh bench serve` against real servers: ours, and somebody else's."""

import asyncio
import json
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from mesh.api.api_keys import ApiKeys
from mesh.cli.main import run
from mesh.cluster.addresses import free_port
from mesh.engine import Engine
from mesh.text.tokenizer import Tokenizer
from spanmesh_proto.errors import Overloaded
from tests.support.api_harness import KEY, ScriptedEngine, running_api, tokenizer
from tests.support.peer_server import ANSWER, DONE, END, WORD, Reply, peer_server
from tests.support.whole_model_engine import WholeModelEngine

__all__ = ["tokenizer"]

CLOSED = ("--requests", "4", "--concurrency", "2", "--prompt-tokens", "5", "--max-tokens", "4")


@contextmanager
def api_thread(engine: Engine, tokenizer: Tokenizer, *, keys: ApiKeys | None = None) -> Iterator[str]:
    """The real API in a thread of its own: the command has the main thread, as it does in life."""
    started, urls = threading.Event(), list[str]()
    loop = asyncio.new_event_loop()
    finish = asyncio.Event()

    async def serve() -> None:
        async with running_api(engine, tokenizer, keys=keys) as api:
            urls.append(api.url)
            started.set()
            await finish.wait()

    thread = threading.Thread(target=lambda: loop.run_until_complete(serve()))
    thread.start()
    try:
        assert started.wait(30)
        yield urls[0]
    finally:
        loop.call_soon_threadsafe(finish.set)
        thread.join()
        loop.close()


@pytest.fixture(scope="module")
def whole_model_url(smollm2_path: Path, tokenizer: Tokenizer) -> Iterator[str]:
    engine = WholeModelEngine(smollm2_path, num_slots=2, is_exact=False)
    try:
        with api_thread(engine, tokenizer) as url:
            yield url
    finally:
        engine.close()


def report_of(capsys: pytest.CaptureFixture[str], *arguments: str, code: int = 0) -> dict[str, Any]:
    assert run(["bench", "serve", "--json", *arguments]) == code
    report: dict[str, Any] = json.loads(capsys.readouterr().out)
    return report


def error_of(capsys: pytest.CaptureFixture[str], *arguments: str, code: int = 1) -> str:
    assert run(["bench", "serve", "--requests", "1", *arguments]) == code
    return capsys.readouterr().err


@pytest.mark.model
@pytest.mark.parametrize("endpoint", ["chat", "completions"])
def test_a_closed_loop_measures_a_real_model(
    endpoint: str, whole_model_url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ("--url", whole_model_url, "--endpoint", endpoint, "--ignore-eos", "--warmup", "1")
    report = report_of(capsys, *options, *CLOSED, "--goodput", "e2el:600000", "-o", str(tmp_path / "out"))
    assert (report["completed"], report["failed"], report["rejected"]) == (4, 0, 0)
    # All four were asked for to the last token, and the server counted them.
    assert (report["total_output_tokens"], report["num_without_usage"]) == (16, 0)
    assert report["total_input_tokens"] >= 4 * 5
    assert report["max_concurrent_requests"] == 2
    assert report["output_throughput"] == pytest.approx(16 / report["duration"])
    assert 0 < report["median_ttft_ms"] < report["median_e2el_ms"] <= report["max_e2el_ms"]
    assert report["p50_tpot_ms"] == pytest.approx(report["median_tpot_ms"])
    assert report["median_tpot_ms"] > 0
    assert report["good_share"] == 1.0
    assert report["circumstances"]["model"] == "smollm2"

    written = json.loads((tmp_path / "out" / "report.json").read_text())
    requests = written.pop("requests")
    assert written == report
    assert [request["number"] for request in requests] == [0, 1, 2, 3]
    for request in requests:
        span_ms = request["e2el_ms"] - request["ttft_ms"]
        assert request["tpot_ms"] == pytest.approx(span_ms / (request["num_output_tokens"] - 1))
    page = (tmp_path / "out" / "report.md").read_text()
    assert "| TPOT |" in page
    assert page.count("![") == len(list((tmp_path / "out").glob("*.png"))) == 3


@pytest.mark.model
def test_an_open_loop_over_the_slots_counts_429_apart(
    whole_model_url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    dataset = tmp_path / "dataset.jsonl"
    dataset.write_text('{"prompt": "Hello"}\n{"messages": [{"role": "user", "content": "Good day"}]}\n')
    options = ("--rate", "inf", "--requests", "6", "--max-tokens", "4", "--percentiles", "75")
    arguments = ("--url", whole_model_url, "--dataset", str(dataset), "--temperature", "0", *options)
    assert run(["bench", "serve", *arguments]) == 0
    said = capsys.readouterr().out
    # Two slots and no line: the others are turned away at once.
    assert "Completed requests" in said
    assert "2 of 6" in said
    assert "4; Retry-After, s: 1 (4)" in said
    assert "p75" in said
    assert "TTFT from the schedule" in said
    assert "6 requests out of 2 prompts" in said


@pytest.mark.model
def test_engine_failures_are_counted_by_what_the_server_says(
    tokenizer: Tokenizer, capsys: pytest.CaptureFixture[str]
) -> None:
    with api_thread(ScriptedEngine([(300,), Overloaded("no room")]), tokenizer) as url:
        report = report_of(capsys, "--url", url, *CLOSED, code=1)
    assert (report["completed"], report["failed"]) == (0, 4)
    assert report["failures"] == [{"kind": "stream_error", "count": 4, "example": "no room"}]
    assert "mean_ttft_ms" not in report


@pytest.mark.model
def test_a_key_is_needed_where_the_server_wants_one(
    tokenizer: Tokenizer, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("MESH_API_KEY", raising=False)
    path = tmp_path / "keys"
    path.write_text(KEY)
    with api_thread(ScriptedEngine([(300,)]), tokenizer, keys=ApiKeys.from_file(path)) as url:
        assert "needs another API key; give it with --api-key-file" in error_of(capsys, "--url", url)
        report = report_of(capsys, "--url", url, *CLOSED, "--api-key-file", str(path))
        assert report["completed"] == 4
        assert KEY not in json.dumps(report)
        monkeypatch.setenv("MESH_API_KEY", KEY)
        assert report_of(capsys, "--url", url, *CLOSED)["completed"] == 4


@pytest.mark.parametrize("protocol", ["HTTP/1.0", "HTTP/1.1"])
def test_other_peoples_servers_are_measured_too(protocol: str, capsys: pytest.CaptureFixture[str]) -> None:
    with peer_server(lambda _: Reply(), protocol=protocol) as peer:
        extra = ("--extra-body", '{"top_k": 5}', "--temperature", "0.5")
        report = report_of(capsys, "--url", f"{peer.url}/v1", *CLOSED, *extra)
    assert (report["completed"], report["total_output_tokens"], report["total_input_tokens"]) == (4, 8, 28)
    assert report["circumstances"]["model"] == peer.bodies[0]["model"] == "theirs"
    assert all((body["top_k"], body["temperature"]) == (5, 0.5) for body in peer.bodies)
    assert "authorization" not in peer.headers[0]


def test_a_connection_that_was_closed_while_idle_fails_no_request(capsys: pytest.CaptureFixture[str]) -> None:
    with peer_server(lambda _: Reply(), protocol="HTTP/1.1", hangs_up=True) as peer:
        report = report_of(capsys, "--url", peer.url, "--requests", "40", "--concurrency", "4")
    assert (report["completed"], report["failures"]) == (40, [])


def test_an_answer_that_is_no_http_is_a_failure(capsys: pytest.CaptureFixture[str]) -> None:
    with peer_server(lambda _: Reply(status=7)) as peer:
        report = report_of(capsys, "--url", peer.url, "--requests", "1", code=1)
    assert report["failures"][0]["kind"] == "connection"
    assert "not HTTP" in report["failures"][0]["example"]


def test_parts_are_counted_where_a_server_sends_no_usage(capsys: pytest.CaptureFixture[str]) -> None:
    with peer_server(lambda _: Reply(WORD * 3 + END + DONE)) as peer:
        assert run(["bench", "serve", "--url", peer.url, *CLOSED]) == 0
    said = capsys.readouterr().out
    assert "4 answers came without `usage`" in said
    assert re.search(r"^Input tokens +not counted$", said, re.MULTILINE)
    assert re.search(r"^Output tokens +12$", said, re.MULTILINE)


def test_a_server_that_does_not_know_ignore_eos_is_found_out(capsys: pytest.CaptureFixture[str]) -> None:
    with peer_server(lambda _: Reply(ANSWER.replace("length", "stop"))) as peer:
        assert run(["bench", "serve", "--url", peer.url, *CLOSED, "--ignore-eos"]) == 0
    assert "4 answers ended before the last token" in capsys.readouterr().out
    assert all(body["ignore_eos"] is True for body in peer.bodies)


def test_every_kind_of_failure_is_shown_beside_what_went_well(capsys: pytest.CaptureFixture[str]) -> None:
    replies = [
        Reply(),
        Reply('{"error": {"message": "full"}}', 429, {"Retry-After": "3"}),
        Reply(WORD),
        Reply("out of order", 500),
    ]
    with peer_server(lambda number: replies[number]) as peer:
        report = report_of(capsys, "--url", peer.url, *CLOSED, "--goodput", "ttft:600000")
    assert (report["completed"], report["rejected"], report["failed"]) == (1, 1, 2)
    assert {failure["kind"]: failure["example"] for failure in report["failures"]} == {
        "http_429": "full",
        "broken_off": "the stream ended without a finish reason and without [DONE]",
        "http_500": "out of order",
    }
    assert report["retry_after"] == {"3": 1}
    # Of all that were asked, not of those that were answered.
    assert report["good_share"] == 0.25


def test_an_open_loop_does_not_forget_who_waited_for_a_place(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with peer_server(lambda _: Reply()) as peer:
        options = ("--rate", "inf", "--requests", "5", "--concurrency", "1", "-o", str(tmp_path))
        report = report_of(capsys, "--url", peer.url, *options)
    assert report["max_concurrent_requests"] == 1
    requests = json.loads((tmp_path / "report.json").read_text())["requests"]
    assert {request["scheduled_s"] for request in requests} == {0.0}
    # Each waited until all those before it had been answered.
    waited_s = [request["ready_s"] - request["scheduled_s"] for request in requests]
    for index in range(1, 5):
        assert waited_s[index] >= sum(request["e2el_ms"] for request in requests[:index]) / 1e3
    own_ms = requests[-1]["e2el_ms"]
    assert report["max_scheduled_e2el_ms"] >= report["max_client_queue_ms"] + own_ms - 1e-3


def test_a_request_without_end_times_out(capsys: pytest.CaptureFixture[str]) -> None:
    release = threading.Event()

    def reply(_number: int) -> Reply:
        release.wait(30)
        return Reply()

    with peer_server(reply) as peer:
        report = report_of(capsys, "--url", peer.url, "--requests", "1", "--timeout", "0.2", code=1)
        release.set()
    assert report["failures"] == [
        {"kind": "timeout", "count": 1, "example": "no end of the answer within 0.2 s"}
    ]


def test_ctrl_c_reports_what_was_measured() -> None:
    asked, release = threading.Semaphore(0), threading.Event()

    def reply(number: int) -> Reply:
        asked.release()
        if number >= 2:
            release.wait(30)
        return Reply()

    with peer_server(reply) as peer:
        command = [sys.executable, "-c", "from mesh.cli.main import main; main()", "bench", "serve", "--json"]
        with subprocess.Popen([*command, "--url", peer.url], stdout=subprocess.PIPE, text=True) as process:
            for _ in range(3):
                assert asked.acquire(timeout=30)
            process.send_signal(signal.SIGINT)
            said, _ = process.communicate(timeout=120)
        release.set()
    report = json.loads(said)
    assert (report["completed"], report["unfinished"], report["failed"]) == (2, 1, 0)
    assert process.returncode == 130


@pytest.mark.parametrize(
    ("models", "words"),
    [
        (Reply('{"data": []}'), "lists no model; name one with --model"),
        (Reply("not found", 404), "answered 404 to /v1/models: not found; name the model with --model"),
        (Reply("loading", 503), "answered 503 to /v1/models: loading; try again"),
        (Reply("", 403), "needs another API key"),
    ],
)
def test_a_server_that_names_no_model_gets_the_remedy(
    models: Reply, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with peer_server(lambda _: Reply(), models=models) as peer:
        assert words in error_of(capsys, "--url", peer.url)
        assert peer.bodies == []
        if models.status != 403:
            assert report_of(capsys, "--url", peer.url, *CLOSED, "--model", "mine")["completed"] == 4
            assert peer.bodies[0]["model"] == "mine"


def test_nobody_there_is_said_at_once(capsys: pytest.CaptureFixture[str]) -> None:
    url = f"http://127.0.0.1:{free_port('127.0.0.1')}"
    assert f"no server answers at {url} (" in error_of(capsys, "--url", url)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--url", "127.0.0.1:8000"), "write http://HOST:PORT"),
        (("--rate", "0"), "0 is not a number above 0"),
        (("--rate", "-2"), "-2 is not a number above 0"),
        (("--rate", "nan"), "nan is not a number above 0"),
        (("--burstiness", "0"), "0 is not a number above 0"),
        (("--timeout", "soon"), "soon is not a number above 0"),
        (("--concurrency", "0"), "--concurrency"),
        (("--requests", "0"), "--requests"),
        (("--goodput", "itl:5"), "there are ttft, tpot, e2el"),
        (("--goodput", "ttft"), "write ttft:500"),
        (("--percentiles", "50,101"), "101.0 is above 100.0"),
        (("--percentiles", "nan"), "'nan' is not a list of numbers"),
        (("--temperature", "nan"), "nan is not a number"),
        (("--extra-body", "{"), "is not JSON"),
        (("--extra-body", "[1]"), "is not a JSON object"),
        (("--endpoint", "embeddings"), "'embeddings' is not one of"),
    ],
)
def test_wrong_options_are_named(
    arguments: tuple[str, ...], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert words in error_of(capsys, *arguments, code=2)


def test_a_report_without_a_place_is_refused_before_the_load(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    with peer_server(lambda _: Reply()) as peer:
        said = error_of(capsys, "--url", peer.url, "-o", str(tmp_path / "file" / "out"))
    assert "cannot make the folder" in said
    assert peer.bodies == []


def test_a_wrong_dataset_is_refused_with_its_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "dataset.jsonl"
    path.write_text('{"prompt": "Hello"}\n{"prompt": 5}\n')
    assert "dataset.jsonl, line 2" in error_of(capsys, "--dataset", str(path))
