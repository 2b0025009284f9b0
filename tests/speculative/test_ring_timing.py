"""The live model of the ring."""

import pytest

from speculative.acceptance import Judgement, SpanClass, StageMeasure, WindowOutcome
from speculative.cost_model import Timing
from speculative.proposer import EMPTY

NETWORK_MS = 20.0


def outcome(num_rows: int, *compute_ms: float, queue_ms: float = 0.0) -> WindowOutcome:
    stages = tuple(StageMeasure(num_rows, queue_ms, each) for each in compute_ms)
    return WindowOutcome(
        Judgement((1,), 0, 0, SpanClass.PLAIN),
        EMPTY,
        position=0,
        sent_ms=100.0,
        arrived_ms=100.0 + NETWORK_MS + sum(compute_ms) + queue_ms * len(stages),
        num_in_flight=0,
        stages=stages,
        num_stale=0,
        num_behind=0,
    )


def test_it_knows_nothing_at_first() -> None:
    timing = Timing()
    assert timing.network_ms is None
    assert timing.stages_ms(1, is_alone=True) == ()
    assert timing.contention == 1.0


def test_a_verdict_without_measures_teaches_nothing() -> None:
    timing = Timing()
    timing.add(outcome(1), is_alone=True)
    assert timing.network_ms is None
    assert timing.num_measured == 0


def test_the_network_is_what_no_stage_accounts_for() -> None:
    timing = Timing()
    timing.add(outcome(1, 4.0, 5.0, 6.0, queue_ms=3.0), is_alone=True)
    assert timing.network_ms == pytest.approx(NETWORK_MS)


def test_stages_keep_their_own_times() -> None:
    timing = Timing()
    timing.add(outcome(1, 4.0, 8.0), is_alone=True)
    timing.add(outcome(3, 9.0, 18.0), is_alone=True)
    assert timing.stages_ms(1, is_alone=True) == pytest.approx((4.0, 8.0))
    assert timing.stages_ms(2, is_alone=True) == pytest.approx((6.5, 13.0))


def test_windows_that_share_cores_are_told_from_those_that_do_not() -> None:
    timing = Timing()
    timing.add(outcome(1, 4.0), is_alone=True)
    timing.add(outcome(4, 12.0), is_alone=True)
    for _ in range(60):
        timing.add(outcome(1, 6.0), is_alone=False)
    assert timing.contention == pytest.approx(1.5, rel=0.02)
    assert timing.stages_ms(1, is_alone=True) == pytest.approx((4.0,))
    # Four rows were never seen together with others: their shape is known, and what sharing does to it.
    assert timing.stages_ms(4, is_alone=False) == pytest.approx((18.0,), rel=0.02)


def test_without_a_window_alone_the_others_tell_its_shape() -> None:
    timing = Timing()
    timing.add(outcome(2, 7.0), is_alone=False)
    assert timing.stages_ms(2, is_alone=True) == pytest.approx((7.0,))
