"""Features come out once, complete, for committed positions only, in whatever order they arrive."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mesh.coordinator.feature_store import FeatureRows, FeatureStore

LAYERS = (5, 2)
N_EMBD = 2


def rows(layer: int, start: int, count: int) -> np.ndarray[tuple[int, int], np.dtype[np.float32]]:
    """Rows that tell layer and position."""
    return np.array([[layer, position] for position in range(start, start + count)], np.float32)


def expected(start: int, count: int) -> np.ndarray[tuple[int, int], np.dtype[np.float32]]:
    return np.concatenate([rows(layer, start, count) for layer in LAYERS], axis=1)


def check(run: FeatureRows) -> range:
    """The run's positions, whose rows are the right ones."""
    assert np.array_equal(run.rows, expected(run.start, len(run.rows)))
    return range(run.start, run.start + len(run.rows))


def test_layers_stand_side_by_side_in_the_drafter_s_order() -> None:
    store = FeatureStore(LAYERS, N_EMBD)
    store.sent(1, 10, 3)
    assert not store.add(1, 10, [(2, rows(2, 10, 3))])
    assert not store.judged(1, 2)
    (run,) = store.add(1, 10, [(5, rows(5, 10, 3))])
    assert check(run) == range(10, 12)
    assert (store.num_wanted, store.num_received) == (2, 2)


def test_rows_of_a_void_window_never_come_out() -> None:
    store = FeatureStore(LAYERS, N_EMBD)
    store.sent(1, 10, 1)
    store.sent(2, 11, 2)
    store.judged(1, 1)
    store.void()
    assert not store.add(2, 11, [(2, rows(2, 11, 2)), (5, rows(5, 11, 2))])
    (run,) = store.add(1, 10, [(2, rows(2, 10, 1)), (5, rows(5, 10, 1))])
    assert check(run) == range(10, 11)


def test_what_was_not_wanted_is_refused() -> None:
    store = FeatureStore(LAYERS, N_EMBD)
    store.sent(1, 10, 3)
    with pytest.raises(ValueError, match="layer 3 at positions 10 to 13 were not wanted"):
        store.add(1, 10, [(3, rows(3, 10, 3))])
    with pytest.raises(ValueError, match="positions 12 to 14"):
        store.add(1, 12, [(2, rows(2, 12, 2))])
    assert not store.add(7, 12, [(2, rows(2, 12, 2))]), "a window that did not ask"
    assert not store.judged(7, 2)


def test_memory_is_bounded() -> None:
    store = FeatureStore(LAYERS, N_EMBD)
    for window_id in range(1000):
        store.sent(window_id, window_id, 1)
        store.judged(window_id, 1)
    assert len(store._windows) <= 64
    for window_id in range(1000, 3000):
        store.sent(window_id, window_id, 1)
        store.judged(window_id, 1)
        if window_id % 2:
            store.add(window_id, window_id, [(layer, rows(layer, window_id, 1)) for layer in LAYERS])
    assert len(store._behind_gap) <= 64


def test_positions_that_are_computed_again_come_out_once() -> None:
    store = FeatureStore(LAYERS, N_EMBD)

    def add(window_id: int, start: int, count: int) -> list[range]:
        features = [(layer, rows(layer, start, count)) for layer in LAYERS]
        return [check(run) for run in store.add(window_id, start, features)]

    store.sent(1, 10, 4)
    store.judged(1, 2)  # rejected behind position 12: the next window goes back
    assert add(1, 10, 4) == [range(10, 12)]
    store.sent(2, 10, 4)
    store.judged(2, 4)
    assert add(2, 10, 4) == [range(12, 14)]
    assert (store.num_wanted, store.num_received, store.num_known) == (4, 4, 14)
    assert not store._windows


def test_what_is_missing_comes_when_it_is_computed_again() -> None:
    store = FeatureStore(LAYERS, N_EMBD)
    store.sent(1, 10, 2)
    store.judged(1, 2)
    store.add(1, 10, [(layer, rows(layer, 10, 1)) for layer in LAYERS])
    assert (store.num_wanted, store.num_received, store.num_known) == (2, 1, 11)
    store.sent(2, 10, 3)
    store.judged(2, 3)
    (run,) = store.add(2, 10, [(layer, rows(layer, 10, 3)) for layer in LAYERS])
    assert check(run) == range(11, 13)
    assert (store.num_wanted, store.num_received, store.num_known) == (3, 3, 13)
    assert not store.add(1, 11, [(layer, rows(layer, 11, 1)) for layer in LAYERS]), "the first came late"
    assert store.num_received == 3


def test_what_is_known_ends_at_the_first_gap() -> None:
    store = FeatureStore(LAYERS, N_EMBD)
    for window_id, start in enumerate((10, 12, 14)):
        store.sent(window_id, start, 2)
        store.judged(window_id, 2)
    assert store.num_known == 10
    for window_id, start, known in ((0, 10, 12), (2, 14, 12), (1, 12, 16)):
        store.add(window_id, start, [(layer, rows(layer, start, 2)) for layer in LAYERS])
        assert store.num_known == known


@given(st.data())
def test_any_order_of_arrival(data: st.DataObject) -> None:
    """Some parts are lost, some come twice, some positions are computed again.

    What is complete comes out once, and nothing else.
    """
    store = FeatureStore(LAYERS, N_EMBD)
    sizes = data.draw(st.lists(st.integers(1, 4), min_size=1, max_size=4))
    starts = [0]
    for size in sizes[:-1]:
        starts.append(data.draw(st.integers(max(0, starts[-1] + size - 3), starts[-1] + size)))
    events: list[tuple[int, int, int, int]] = []
    wanted: set[int] = set()
    counted: set[int] = set()
    for window_id, (start, size) in enumerate(zip(starts, sizes, strict=True)):
        store.sent(window_id, start, size)
        num_valid = data.draw(st.integers(0, size))
        events.append((window_id, -1, 0, num_valid))
        counted |= set(range(start, start + num_valid))
        held = {layer: set[int]() for layer in LAYERS}
        for layer in LAYERS:
            for _ in range(data.draw(st.integers(0, 2))):
                first = data.draw(st.integers(0, size - 1))
                stop = data.draw(st.integers(first + 1, size))
                events.append((window_id, layer, first, stop))
                held[layer] |= set(range(first, stop))
        wanted |= {start + row for row in set.intersection(*held.values()) if row < num_valid}
    seen: list[int] = []
    for window_id, layer, first, stop in data.draw(st.permutations(events)):
        start = starts[window_id]
        if layer < 0:
            found = store.judged(window_id, stop)
        else:
            found = store.add(window_id, start + first, [(layer, rows(layer, start + first, stop - first))])
        for run in found:
            seen += check(run)
    assert sorted(seen) == sorted(wanted)
    assert (store.num_wanted, store.num_received) == (len(counted), len(wanted))
    assert store.num_known == next(position for position in range(99) if position not in wanted)
