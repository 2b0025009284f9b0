"""What `mesh bench serve` makes of what it measured: definitions, percentiles, goodput, words."""

import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshbench.load_generator import arrival_times_s
from meshbench.request_record import Failure, Record
from meshbench.serving_metrics import FailureCount, Figures, Slo, is_good, parse_slo, spread, work_out
from spanmesh_proto.errors import InvalidRequest

PERCENTILES = (50.0, 99.0)


def record(number: int = 0, **fields: object) -> Record:
    """Due at 1 s, sent 0.25 s later, three parts until 2.25 s, the end at 2.5 s."""
    common: dict[str, object] = {
        "scheduled_s": 1.0,
        "ready_s": 1.125,
        "sent_s": 1.25,
        "ended_s": 2.5,
        "parts_s": (1.75, 2.0, 2.25),
        "last_s": 2.5,
        "num_input_tokens": 10,
        "num_output_tokens": 4,
        "has_usage": True,
        "finish": "length",
    }
    return Record(number, f"prompt-{number}", **{**common, **fields})  # type: ignore[arg-type]


def failed(number: int, kind: str, retry_after: str | None = None) -> Record:
    failure = Failure(kind, f"because of {kind}", retry_after)
    return record(number, parts_s=(), num_output_tokens=0, finish=None, failure=failure)


def figures(*records: Record, duration_s: float = 2.5, slos: tuple[Slo, ...] = ()) -> Figures:
    return work_out(records, duration_s, percentiles=PERCENTILES, slos=slos)


def test_latencies_are_those_of_vllm() -> None:
    one = record()
    assert (one.ttft_ms, one.e2el_ms) == (500.0, 1250.0)
    assert one.tpot_ms == (1250.0 - 500.0) / 3
    assert one.itls_ms == (250.0, 250.0)
    assert (one.queue_ms, one.lag_ms, one.delay_ms) == (125.0, 125.0, 250.0)


def test_an_answer_of_one_token_has_no_time_per_output_token() -> None:
    assert record(num_output_tokens=1).tpot_ms is None
    # Its first token ended it: there was nothing to show, but the end came.
    assert record(parts_s=(), num_output_tokens=1).ttft_ms == 1250.0


def test_rates_are_of_completed_requests_over_the_whole_run() -> None:
    found = figures(record(0), record(1), failed(2, "http_500"))
    assert (found.completed, found.failed, found.num_requests) == (2, 1, 3)
    assert found.request_throughput == 2 / 2.5
    assert found.output_throughput == 8 / 2.5
    assert found.total_token_throughput == 28 / 2.5


def test_what_is_not_measured_is_not_zero() -> None:
    found = figures(failed(0, "timeout"))
    assert found.ttft_ms is found.tpot_ms is found.itl_ms is found.e2el_ms is None
    assert found.total_input_tokens is found.total_token_throughput is found.request_goodput is None
    assert found.request_throughput == 0.0


def test_failures_are_counted_by_kind_and_429_apart() -> None:
    found = figures(
        record(0),
        failed(1, "http_429", "1"),
        failed(2, "http_429", "5"),
        failed(3, "http_429", "5"),
        failed(4, "timeout"),
        failed(5, "unfinished"),
    )
    assert (found.completed, found.failed, found.rejected, found.unfinished) == (1, 1, 3, 1)
    assert found.retry_after == {"1": 1, "5": 2}
    assert found.failures[0] == FailureCount("http_429", 3, "because of http_429")
    assert {failure.kind for failure in found.failures} == {"http_429", "timeout", "unfinished"}


def test_goodput_counts_what_failed_as_not_good_and_leaves_out_what_was_interrupted() -> None:
    slos = (Slo("ttft", 500.0), Slo("e2el", 1250.0))
    found = figures(
        record(0), record(1, last_s=2.6), failed(2, "http_429"), failed(3, "unfinished"), slos=slos
    )
    assert found.request_goodput == 1 / 2.5
    assert found.good_share == 1 / 3
    # From the schedule it all began a quarter of a second earlier.
    assert found.scheduled_good_share == 0.0


@pytest.mark.parametrize(
    ("slo", "good", "good_from_schedule"),
    [
        (Slo("ttft", 500.0), True, False),
        (Slo("ttft", 750.0), True, True),
        (Slo("ttft", 499.0), False, False),
        (Slo("tpot", 250.0), True, True),
        (Slo("tpot", 249.0), False, False),
        (Slo("e2el", 1499.0), True, False),
        (Slo("e2el", 1500.0), True, True),
    ],
)
def test_a_limit_may_be_reached(slo: Slo, *, good: bool, good_from_schedule: bool) -> None:
    assert is_good(record(), (slo,)) is good
    assert is_good(record(), (slo,), from_schedule=True) is good_from_schedule
    assert not is_good(failed(0, "timeout"), (slo,))


def test_a_limit_is_read_from_name_and_milliseconds() -> None:
    assert parse_slo("ttft:500") == Slo("ttft", 500.0)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("itl:5", "'itl' is not a latency; there are ttft, tpot, e2el"),
        ("ttft", "has no limit above 0 ms; write ttft:500"),
        ("ttft:fast", "has no limit"),
        ("tpot:0", "has no limit"),
        ("e2el:-1", "has no limit"),
        ("e2el:nan", "has no limit"),
    ],
)
def test_a_limit_that_is_none_is_named(text: str, words: str) -> None:
    with pytest.raises(InvalidRequest, match=words):
        parse_slo(text)


def test_tokens_that_nobody_counted_are_told_apart() -> None:
    counted, parts = record(0), record(1, has_usage=False, num_input_tokens=None, num_output_tokens=3)
    found = figures(counted, parts)
    assert (found.num_without_usage, found.total_input_tokens, found.total_output_tokens) == (1, 10, 7)
    assert figures(parts).total_input_tokens is None


def test_concurrency_is_of_requests_under_way() -> None:
    # One ends as the next is sent: that makes one under way, not two.
    found = figures(record(0, sent_s=0.0, ended_s=1.0), record(1, sent_s=1.0, ended_s=2.0), duration_s=2.0)
    assert (found.mean_concurrency, found.max_concurrency) == (1.0, 1)
    found = figures(record(0, sent_s=0.0, ended_s=1.5), record(1, sent_s=1.0, ended_s=2.0), duration_s=2.5)
    assert (found.mean_concurrency, found.max_concurrency) == (1.0, 2)


@given(st.lists(st.floats(0, 1e6), min_size=1), st.lists(st.floats(0, 100), min_size=2))
def test_percentiles_rise_between_the_shortest_and_the_longest(
    values_ms: list[float], percentiles: list[float]
) -> None:
    found = spread(values_ms, sorted(percentiles))
    assert found is not None
    measured = list(found.percentiles.values())
    assert all(min(values_ms) <= value <= max(values_ms) for value in measured)
    assert all(
        earlier <= later or math.isclose(earlier, later) for earlier, later in itertools.pairwise(measured)
    )
    assert found.highest == max(values_ms)


def test_a_percentile_lies_on_the_line_between_two_values() -> None:
    found = spread([10.0, 20.0, 40.0], (25.0, 50.0, 75.0))
    assert found is not None
    assert found.percentiles == {25.0: 15.0, 50.0: 20.0, 75.0: 30.0}
    assert found.mean == pytest.approx(70 / 3)
    assert found.count == 3


@given(st.integers(1, 200), st.floats(0.01, 1e4), st.floats(0.05, 100) | st.just(math.inf), st.integers(0, 9))
def test_an_open_loop_keeps_its_rate_whatever_the_seed(
    count: int, rate: float, burstiness: float, seed: int
) -> None:
    times = arrival_times_s(count, rate, burstiness, seed)
    assert len(times) == count
    assert list(times) == sorted(times)
    assert times[0] >= 0
    assert times[-1] == pytest.approx(count / rate)
    assert times == arrival_times_s(count, rate, burstiness, seed)


def test_burstiness_says_how_uneven_arrivals_are() -> None:
    def unevenness(burstiness: float) -> float:
        gaps = np.diff(arrival_times_s(4000, 10.0, burstiness, 1))
        return float(gaps.std() / gaps.mean())

    # Of gaps from a gamma distribution with shape b it is 1 over the root of b; 1 is a Poisson process.
    assert unevenness(1.0) == pytest.approx(1.0, abs=0.1)
    assert unevenness(0.25) == pytest.approx(2.0, abs=0.2)
    assert unevenness(100.0) == pytest.approx(0.1, abs=0.01)
    assert unevenness(math.inf) == pytest.approx(0.0, abs=1e-6)
    assert arrival_times_s(4, 10.0, 1.0, 1) != arrival_times_s(4, 10.0, 1.0, 2)


def test_an_infinite_rate_sends_all_at_once() -> None:
    assert arrival_times_s(3, math.inf, 1.0, 1) == (0.0, 0.0, 0.0)


def test_latencies_add_up_from_the_schedule() -> None:
    found = figures(record(0), record(1, scheduled_s=0.5, ready_s=0.5))
    assert found.scheduled_ttft_ms is not None
    assert found.scheduled_ttft_ms.highest == 1250.0
    assert found.scheduled_e2el_ms is not None
    assert found.scheduled_e2el_ms.mean == (1500.0 + 2000.0) / 2
