"""What the report of `mesh bench serve` says beside the figures."""

import json
from dataclasses import replace

import pytest

from meshbench.request_record import Failure, Record
from meshbench.serving_metrics import work_out
from meshbench.serving_report import Findings, RunConditions, serving_report, warnings

CIRCUMSTANCES = RunConditions(
    url="http://127.0.0.1:8000",
    endpoint="chat",
    model="m",
    loop="open loop, inf requests/s, burstiness 1",
    rate=float("inf"),
    burstiness=1.0,
    concurrency=None,
    num_planned=2,
    prompts="random prompts of about 5 tokens",
    num_prompts=2,
    max_tokens=4,
    temperature=None,
    ignore_eos=False,
    extra_body=None,
    goodput={},
    seed=1,
    num_warmup=0,
    started_at="2026-01-01T00:00:00+00:00",
    software="spanmesh",
)
RECORD = Record(0, "a", 0.0, 0.0, 0.0, 1.0, (0.5, 1.0), 1.0, 5, None, 4, has_usage=True, finish="length")
REFUSED = Record(1, "b", 0.0, 0.0, 0.0, 0.1, last_s=0.1, failure=Failure("http_500", "no | room"))


def findings(*records: Record, duration_s: float = 2.0, client_cpu_share: float = 0.1) -> Findings:
    figures = work_out(records, duration_s, percentiles=(50.0, 99.9), slos=())
    return Findings(CIRCUMSTANCES, figures, records, client_cpu_share)


def test_a_quiet_client_has_nothing_to_warn_of() -> None:
    assert warnings(findings(RECORD, REFUSED)) == []


@pytest.mark.parametrize(
    ("made", "words"),
    [
        (findings(RECORD), "interrupted: 1 of 2 requests were sent"),
        (findings(replace(RECORD, sent_s=0.03), REFUSED), "up to 30 ms late"),
        (findings(RECORD, REFUSED, client_cpu_share=0.8), "used 80% of a core"),
    ],
)
def test_a_client_that_disturbed_its_own_measurement_says_so(made: Findings, words: str) -> None:
    (found,) = warnings(made)
    assert words in found


def test_a_moment_says_nothing_of_how_busy_the_client_is() -> None:
    assert warnings(findings(RECORD, REFUSED, duration_s=0.5, client_cpu_share=0.8)) == []


def test_page_and_terminal_tell_the_same() -> None:
    made = serving_report(findings(RECORD, REFUSED))
    page, text = made.markdown(["latencies.png"]), made.text()
    for name, figure in (("TTFT", "500.00"), ("E2EL", "1000.00"), ("TPOT", "166.67")):
        assert f"| {name} | {figure} |" in page
        assert f"{name} " in text
        assert figure in text
    assert "| http_500 | 1 | no / room |" in page
    assert "http_500  1  no | room" in text
    assert "p99.9" in page
    assert "![latencies.png](latencies.png)" in page


def test_json_is_json_though_a_rate_may_be_infinite() -> None:
    report = serving_report(findings(RECORD, REFUSED))
    made = json.loads(report.json(with_samples=True), parse_constant=pytest.fail)
    assert made["circumstances"]["rate"] == "inf"
    assert (made["p99.9_ttft_ms"], made["total_cached_tokens"]) == (500.0, None)
    assert [request["ttft_ms"] for request in made["requests"]] == [500.0, None]
