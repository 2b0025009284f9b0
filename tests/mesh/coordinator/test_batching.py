"""How many windows share a batch, in a pipeline that is simulated by its formula."""

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mesh.coordinator.batching import Grouping
from speculative.outcome import StageMeasure

NUM_STAGES = 3
NETWORK_MS = 20.0


def cpu_ms(rows: int) -> float:
    return 1.0 + 4.5 * rows


def gpu_ms(rows: int) -> float:
    return 10.0 + 0.1 * rows


def rate(together: int, num_sessions: int, t_ms: Callable[[int], float], rows: int) -> float:
    """Windows a millisecond: what a stage can compute, or what comes round."""
    batch_ms = t_ms(together * rows)
    return min(together / batch_ms, num_sessions / (NUM_STAGES * batch_ms + NETWORK_MS))


def settled(num_sessions: int, t_ms: Callable[[int], float], rows: int = 1) -> Grouping:
    grouping = Grouping(NUM_STAGES)
    grouping.set_num_sessions(num_sessions)
    for _ in range(600):
        batch = min(grouping.most_together, num_sessions) * rows
        grouping.learn(
            rows, [StageMeasure(batch, 0.0, t_ms(batch))] * NUM_STAGES, NUM_STAGES * t_ms(batch) + NETWORK_MS
        )
    return grouping


@pytest.mark.parametrize("t_ms", [cpu_ms, gpu_ms])
@pytest.mark.parametrize("rows", [1, 4])
@pytest.mark.parametrize("num_sessions", [1, 2, 4, 8, 16, 32])
def test_it_comes_to_lie_near_the_best(num_sessions: int, t_ms: Callable[[int], float], rows: int) -> None:
    found = settled(num_sessions, t_ms, rows).most_together
    best = max(rate(together, num_sessions, t_ms, rows) for together in range(1, num_sessions + 1))
    # Unseen sizes are guessed at, so it may stop a step short.
    assert rate(found, num_sessions, t_ms, rows) >= 0.8 * best


def test_rows_that_cost_nothing_go_together_and_dear_ones_apart() -> None:
    assert settled(16, gpu_ms).most_together > 8
    assert settled(16, cpu_ms).most_together <= 5


def test_before_anything_is_known_there_are_as_many_groups_as_stages() -> None:
    grouping = Grouping(NUM_STAGES)
    for num_sessions, together in ((1, 1), (3, 1), (4, 2), (8, 3), (9, 3)):
        grouping.set_num_sessions(num_sessions)
        assert grouping.most_together == together


@given(
    st.lists(st.tuples(st.integers(1, 40), st.floats(0.0, 1e4), st.floats(0.0, 1e4)), max_size=80),
    st.integers(0, 40),
)
def test_it_is_always_a_number_of_sessions(
    measured: list[tuple[int, float, float]], num_sessions: int
) -> None:
    grouping = Grouping(2)
    grouping.set_num_sessions(num_sessions)
    for rows, compute_ms, elapsed_ms in measured:
        grouping.learn(rows, [StageMeasure(rows, 1.0, compute_ms)] * 2, elapsed_ms)
    assert 1 <= grouping.most_together <= max(1, num_sessions)
