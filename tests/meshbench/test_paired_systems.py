import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, HTTPServer
from importlib.metadata import version
from pathlib import Path

import pytest

from mesh.status import MeshStatus, StageStatus
from mesh.util.completion_stream import COMPLETION_PATH
from meshbench.datasets import BUILT_IN, load_prompts
from meshbench.lab.llama_cpp_build import build_llama_rpc, build_name
from meshbench.lab.systems import StageTotals
from meshbench.load_client.client import LoadClient
from meshbench.load_client.schedule import Request
from meshbench.paired_systems import OWN, PEERS, Comparison, Pair, even_split, side_by_side
from spanmesh_proto.errors import MeshError
from tests.support.requests import answer_here, timed_answer


def comparison(*pairs: Pair, in_process_ms: float = 8.0) -> Comparison:
    return Comparison(
        kernels=OWN,
        delay_ms=5.0,
        hop_ms=5.0,
        in_process_ms=in_process_ms,
        compute_ms=8.4,
        queue_ms=0.1,
        num_hops=4,
        pairs=pairs,
        target_ratio=1.35,
        target_overhead_ms=1.5,
        target_transport_ms=0.7,
    )


def test_the_ratio_is_the_median_over_pairs_not_of_the_medians() -> None:
    found = comparison(Pair(30, 20), Pair(60, 20), Pair(20, 20), Pair(90, 45), Pair(10, 5))
    assert found.ratio == 2.0
    assert (min(found.ratios), max(found.ratios)) == (1.0, 3.0)
    assert (found.mesh_tokens_per_s, found.peer_tokens_per_s) == (30, 20)


def test_overhead_is_what_computing_and_the_wire_leave() -> None:
    found = comparison(Pair(1000 / 29.0, 20.0))
    assert found.overhead_ms == pytest.approx(1.0)
    assert found.slower_compute_ms == pytest.approx(0.4)
    assert found.transport_ms == pytest.approx(0.5)
    assert "of these 1.00: +0.40 since the stages computed 8.40, 0.10 in their queues, 0.50" in found.report()


def test_the_times_of_decode_steps_are_what_two_looks_at_the_totals_leave() -> None:
    def look(num_windows: int, first_ms: float, second_ms: float) -> StageTotals:
        stages = (
            StageStatus(windows=num_windows, mean_queue_ms=0.5, mean_compute_ms=compute_ms)
            for compute_ms in (first_ms, second_ms)
        )
        return StageTotals.from_status(MeshStatus(stages=tuple(stages)))

    times = (look(30, 4.0, 2.0) - look(10, 6.0, 3.0)).per_window()
    assert times.compute_ms == pytest.approx((30 * 6 - 10 * 9) / 20)
    assert times.queue_ms == pytest.approx(1.0)
    assert (look(5, 1.0, 1.0) - look(5, 1.0, 1.0)).per_window().compute_ms == 0.0


def test_the_report_says_which_targets_were_missed() -> None:
    good = comparison(Pair(1000 / 29.0, 20.0)).report()
    assert good.count("reached") == 3
    assert "missed" not in good
    bad = comparison(Pair(25.0, 20.0)).report()
    assert "ratio 1.25 (1.25 to 1.25), target 1.35: missed" in bad
    assert "+ 12.00, target 1.50: missed" in bad


def test_both_kinds_of_kernels_stand_beside_the_peer() -> None:
    own = comparison(Pair(30, 20))
    table = side_by_side([own, replace(own, kernels=PEERS, pairs=(Pair(24, 20),))]).splitlines()
    assert [word for word in table[1].split() if word[0].isdigit()] == ["5", "30.00", "24.00", "20.00"]
    assert ("(1.50 times)" in table[1], "(1.20 times)" in table[1]) == (True, True)


def test_an_even_split_uses_every_layer_once() -> None:
    assert even_split(30, 3) == (10, 10, 10)
    assert even_split(18, 4) == (4, 5, 4, 5)


def test_the_first_token_is_not_part_of_the_decode_rate() -> None:
    answer = timed_answer("", 128, 999.0, 1500.0, 2269.0)
    assert (answer.ttft_ms, answer.decode_ms) == pytest.approx((999.0, 1270.0))
    assert answer.tokens_per_s == pytest.approx(100.0)


def test_prompts_are_the_chat_questions_spread_over_the_file(tmp_path: Path) -> None:
    path = tmp_path / "question.jsonl"
    rows = [("writing", "a"), ("translation", "b"), ("math", "c"), ("coding", "d"), ("stem", "e")]
    path.write_text(
        "\n".join(
            json.dumps({"question_id": 1, "category": kind, "turns": [text, "more"]}) for kind, text in rows
        )
    )
    assert load_prompts(path, 10) == ("a", "c", "d", "e")
    assert load_prompts(path, 2) == ("a", "d")
    assert load_prompts(None, 3) == (BUILT_IN[0], BUILT_IN[2], BUILT_IN[5])


@pytest.mark.parametrize(
    "content", ["not json", '{"turns": []}', '{"question_id": 1, "category": "rag", "turns": ["x"]}']
)
def test_a_file_of_another_kind_is_named(tmp_path: Path, content: str) -> None:
    path = tmp_path / "question.jsonl"
    path.write_text(content)
    with pytest.raises(MeshError, match=r"question\.jsonl"):
        load_prompts(path, 3)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(MeshError, match="nowhere"):
        load_prompts(tmp_path / "nowhere", 3)


CHUNK = 'data: {"choices": [{"delta": {"content": %s}, "finish_reason": %s}], "usage": null}\n\n'


@contextmanager
def server(status: int, body: str) -> Iterator[str]:
    """A real HTTP server that gives everybody the same answer."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            received.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(status)
            self.end_headers()
            self.wfile.write(body.encode())

        def log_message(self, format: str, *args: object) -> None:
            pass

    received: list[object] = []
    with HTTPServer(("127.0.0.1", 0), Handler) as running:
        thread = threading.Thread(target=running.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield f"http://127.0.0.1:{running.server_port}"
        finally:
            running.shutdown()
            thread.join()


HELLO = Request.chat("Hello", 3, {"ignore_eos": True})


def test_a_streamed_answer_is_timed_and_put_together() -> None:
    body = 'data: {"choices": [{"delta": {"role": "assistant", "content": ""}, "finish_reason": null}]}\n\n'
    body += (
        ": ping\n\n" + CHUNK % ('"Good "', "null") + CHUNK % ('"day"', "null") + CHUNK % ("null", '"length"')
    )
    body += 'data: {"choices": [], "usage": {"completion_tokens": 3}, "timings": {"draft_n": 2}}\n\n'
    with server(200, body + "data: [DONE]\n\n") as url:
        answer = answer_here(url, HELLO)
    assert (answer.text, answer.num_tokens, answer.timings) == ("Good day", 3, {"draft_n": 2})
    assert len(answer.arrivals_ms) == 3
    assert 0 < answer.ttft_ms <= answer.ttft_ms + answer.decode_ms


def test_a_raw_completion_is_read_too() -> None:
    body = 'data: {"choices": [{"text": "day", "finish_reason": "length"}], "usage": null}\n\n'
    body += 'data: {"choices": [], "usage": {"completion_tokens": 1}}\n\ndata: [DONE]\n\n'
    with server(200, body) as url:
        answer = answer_here(url, Request.streamed({"prompt": "Good "}, COMPLETION_PATH))
    assert answer.text == "day"


def test_token_ids_are_put_together_and_time_tokens_without_text() -> None:
    chunk = 'data: {"choices": [{"text": "%s", "token_ids": %s, "finish_reason": null}], "usage": null}\n\n'
    body = chunk % ("", "[]") + chunk % ("", "[2]") + chunk % ("Good", "[300, 301]")
    body += 'data: {"choices": [{"text": "", "token_ids": [], "finish_reason": "length"}], "usage": null}\n\n'
    body += 'data: {"choices": [], "usage": {"completion_tokens": 3}}\n\ndata: [DONE]\n\n'
    with server(200, body) as url:
        request = Request.streamed({"prompt": "Hello", "return_token_ids": True}, COMPLETION_PATH)
        answer = answer_here(url, request)
    assert (answer.text, answer.token_ids) == ("Good", (2, 300, 301))
    assert len(answer.arrivals_ms) == 3


def test_a_batch_keeps_its_order_however_many_are_under_way() -> None:
    body = CHUNK % ('"x"', '"stop"') + 'data: {"choices": [], "usage": {"completion_tokens": 1}}\n\n'
    with server(200, body) as url, LoadClient(None) as client:
        for num_at_once in (1, 3):
            outcome = client.answer(url, (HELLO,) * 3, num_at_once=num_at_once)
            assert [answer.text for answer in outcome.answers] == ["x"] * 3
            assert [answer.record.number for answer in outcome.answers] == [0, 1, 2]


@pytest.mark.parametrize(
    ("status", "body", "message"),
    [
        (503, "loading", "503: loading"),
        (200, 'data: {"error": {"message": "stage 2 went away"}}\n\n', "stage 2 went away"),
        (200, CHUNK % ('"Good"', "null"), "ended without a finish reason"),
        (200, CHUNK % ('"Good"', '"stop"'), "no usage"),
        (
            200,
            CHUNK % ("null", '"stop"') + 'data: {"choices": [], "usage": {"completion_tokens": 0}}\n\n',
            "no token",
        ),
    ],
)
def test_an_answer_that_cannot_be_measured_is_an_error(status: int, body: str, message: str) -> None:
    with server(status, body) as url, pytest.raises(MeshError, match=message):
        answer_here(url, HELLO)


def test_a_server_that_is_not_there_is_an_error() -> None:
    with server(200, "") as url:
        pass
    with pytest.raises(MeshError, match="connection: Connect call failed"):
        answer_here(url, HELLO)


def test_servers_that_were_built_are_not_built_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home = tmp_path / f"llama-rpc-{version('llama-cpp-python')}"
    programs = home / build_name() / "bin"
    programs.mkdir(parents=True)
    for name in ("llama-server", "ggml-rpc-server"):
        (programs / name).touch()
    monkeypatch.setenv("PATH", "/nowhere")
    found = build_llama_rpc(tmp_path)
    assert (found.server.parent, found.rpc_server.name) == (programs, "ggml-rpc-server")


def test_a_missing_cmake_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(MeshError, match="pip install cmake"):
        build_llama_rpc(tmp_path)
    assert list(tmp_path.iterdir()) == []
