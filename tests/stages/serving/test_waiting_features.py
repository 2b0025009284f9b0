"""Features of several windows that wait for one another."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from stages.serving.waiting_features import WaitingFeatures

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from stages.serving.waiting_features import FeatureRun


def rows(session: int, window_id: int, num_rows: int) -> list[NDArray[np.float32]]:
    """Rows of two layers that tell whose they are."""
    first = [[session, window_id, row] for row in range(num_rows)]
    return [np.array(first, np.float32), -np.array(first, np.float32)]


def windows(run: FeatureRun) -> list[tuple[int, int, int, int]]:
    """Session, id, first position and rows of each window of a run, whose rows are checked."""
    found, stop = [], 0
    layers = run.layers()
    for window_id, num_rows in enumerate(run.window_rows, run.window_id):
        for layer, wanted in zip(layers, rows(run.session, window_id, num_rows), strict=True):
            assert np.array_equal(layer[stop : stop + num_rows], wanted)
        found.append((run.session, window_id, run.start + stop, num_rows))
        stop += num_rows
    assert {len(layer) for layer in layers} == {stop}
    return found


@given(
    st.lists(
        st.tuples(
            st.integers(0, 2), st.integers(0, 1), st.integers(-2, 2), st.integers(1, 4), st.integers(0, 9)
        ),
        max_size=30,
    )
)
def test_each_row_comes_once_and_in_the_order_of_its_session(
    steps: list[tuple[int, int, int, int, int]],
) -> None:
    """Windows are skipped now and then, and begin before or behind the last one's end."""
    waiting, added, taken = WaitingFeatures(), [], []
    ids, stops = dict.fromkeys(range(3), 0), dict.fromkeys(range(3), 9)
    for session, skipped, moved, num_rows, together in steps:
        window_id, start = ids[session] + skipped, max(0, stops[session] + moved)
        waiting.add(session, window_id, start, rows(session, window_id, num_rows), together)
        added.append((session, window_id, start, num_rows))
        ids[session], stops[session] = window_id + 1, start + num_rows
        taken += [each for run in waiting.take() for each in windows(run)]
        if not together:
            assert len(taken) == len(added)
    for session in range(3):
        waiting.hurry(session)
    taken += [each for run in waiting.take() for each in windows(run)]
    assert sorted(taken) == sorted(added)
    for session in range(3):
        assert [each for each in taken if each[0] == session] == [
            each for each in added if each[0] == session
        ]


def test_those_of_one_session_leave_without_the_others() -> None:
    waiting = WaitingFeatures()
    for session in (1, 2):
        for window_id in (5, 6):
            waiting.add(session, window_id, window_id, rows(session, window_id, 1), 5)
    assert waiting.take() == []
    waiting.hurry(2)
    waiting.hurry(3)
    (run,) = waiting.take()
    assert windows(run) == [(2, 5, 5, 1), (2, 6, 6, 1)]
    waiting.add(1, 7, 7, rows(1, 7, 2), 5)
    assert waiting.take() == []
    # They go as soon as the least patient of them does.
    waiting.add(2, 7, 7, rows(2, 7, 1), 3)
    assert [each for run in waiting.take() for each in windows(run)] == [
        (1, 5, 5, 1),
        (1, 6, 6, 1),
        (1, 7, 7, 2),
        (2, 7, 7, 1),
    ]
    waiting.add(1, 8, 9, rows(1, 8, 1), 5)
    waiting.clear()
    waiting.hurry(1)
    assert waiting.take() == []
