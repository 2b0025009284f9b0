"""The search of the number of groups, in a pipeline that is simulated by its formula."""

from collections.abc import Callable
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mesh.coordinator.groups import GroupCountSearch, group_counts

NUM_STAGES = 3
NETWORK_MS = 20.0


def cpu_ms(rows: int) -> float:
    """Rows cost nearly as much together as one by one."""
    return 1.0 + 4.5 * rows


def gpu_ms(rows: int) -> float:
    """Rows cost nearly nothing beside the first."""
    return 10.0 + 0.1 * rows


class Pipeline:
    """A mesh whose rate follows from the number of groups, with noise.

    Args:
        num_sessions: Sessions that decode.
        t_ms: Time of a batch at a stage, by its rows.
        num_cores: Processors that all stages share; None for one each.
        noise: Largest relative error of a window's time.
    """

    def __init__(
        self,
        num_sessions: int,
        t_ms: Callable[[int], float],
        *,
        num_cores: int | None = None,
        noise: float = 0.0,
    ) -> None:
        self.num_sessions = num_sessions
        self.t_ms = t_ms
        self.num_cores = num_cores
        self.now_ms = 0.0
        self.search = GroupCountSearch(NUM_STAGES, lambda: self.now_ms)
        self._noise = noise
        self._random = Random(22)
        self.search.set_num_sessions(num_sessions)

    def rate(self, count: int) -> float:
        """Windows a millisecond."""
        size = -(-self.num_sessions // count)
        batch_ms = self.t_ms(size)
        by_stage = 1 / batch_ms if self.num_cores is None else self.num_cores / (NUM_STAGES * batch_ms)
        return min(size * by_stage, self.num_sessions / (NUM_STAGES * batch_ms + NETWORK_MS))

    def run(self, seconds: float) -> None:
        until_ms = self.now_ms + 1000 * seconds
        while self.now_ms < until_ms:
            wobble = 1 + self._noise * self._random.uniform(-1, 1)
            self.now_ms += wobble / self.rate(self.search.count)
            self.search.landed(1, self.num_sessions / self.rate(self.search.count))

    @property
    def best(self) -> float:
        return max(self.rate(count) for count in group_counts(self.num_sessions))


@pytest.mark.parametrize("num_cores", [None, 2])
@pytest.mark.parametrize("t_ms", [cpu_ms, gpu_ms])
@pytest.mark.parametrize("num_sessions", [1, 2, 4, 8, 16, 32])
def test_it_comes_to_lie_near_the_best(
    num_sessions: int, t_ms: Callable[[int], float], num_cores: int | None
) -> None:
    pipeline = Pipeline(num_sessions, t_ms, num_cores=num_cores, noise=0.3)
    pipeline.run(90)
    while pipeline.search.is_searching:
        pipeline.run(1)
    assert pipeline.rate(pipeline.search.count) >= 0.95 * pipeline.best


def test_it_searches_though_sessions_come_and_go() -> None:
    """Answers of 10 s, sixteen at once: one ends and another begins every 0.6 s."""
    pipeline = Pipeline(16, gpu_ms, noise=0.3)
    for _ in range(400):
        for num_sessions, seconds in ((16, 0.4), (15, 0.2)):
            pipeline.num_sessions = num_sessions
            pipeline.search.set_num_sessions(num_sessions)
            pipeline.run(seconds)
    pipeline.num_sessions = 16
    pipeline.search.set_num_sessions(16)
    while pipeline.search.is_searching:
        pipeline.run(1)
    assert pipeline.rate(pipeline.search.count) >= 0.95 * pipeline.best


def test_it_tells_what_was_found() -> None:
    pipeline = Pipeline(16, cpu_ms)
    assert pipeline.search.found == {}
    pipeline.run(60)
    while pipeline.search.is_searching:
        assert 16 not in pipeline.search.found
        pipeline.run(1)
    assert pipeline.search.found == {16: pipeline.search.count}


def test_it_looks_again_when_the_load_changes() -> None:
    pipeline = Pipeline(16, gpu_ms)
    pipeline.run(60)
    assert pipeline.rate(pipeline.search.count) >= 0.95 * pipeline.best
    pipeline.t_ms = lambda rows: 0.2 + 3.0 * rows
    pipeline.run(60)
    while pipeline.search.is_searching:
        pipeline.run(1)
    assert pipeline.rate(pipeline.search.count) >= 0.95 * pipeline.best


def test_it_rests_when_nothing_is_better() -> None:
    pipeline = Pipeline(16, cpu_ms)
    pipeline.run(400)
    num_searching = 0
    for _ in range(200):
        pipeline.run(0.5)
        num_searching += pipeline.search.is_searching
    assert num_searching < 40


def test_it_begins_with_as_many_groups_as_stages() -> None:
    for num_sessions, count in ((1, 1), (2, 2), (3, 3), (16, 3)):
        search = GroupCountSearch(NUM_STAGES, lambda: 0.0)
        search.set_num_sessions(num_sessions)
        assert search.count == count


@given(st.integers(1, 200))
def test_each_size_of_a_group_is_tried_with_the_fewest_groups(num_sessions: int) -> None:
    counts = group_counts(num_sessions)
    assert list(counts) == sorted(set(counts))
    assert (counts[0], counts[-1]) == (1, num_sessions)
    sizes = {-(-num_sessions // count) for count in range(1, num_sessions + 1)}
    assert {-(-num_sessions // count) for count in counts} == sizes
    assert len(counts) == len(sizes)


@given(
    st.lists(st.one_of(st.integers(0, 40), st.tuples(st.floats(0.0, 5e3), st.integers(0, 9))), max_size=200)
)
def test_it_is_always_a_number_of_groups_of_sessions(events: list[int | tuple[float, int]]) -> None:
    now_ms = 0.0
    num_sessions = 1
    search = GroupCountSearch(2, lambda: now_ms)
    for event in events:
        if isinstance(event, int):
            num_sessions = max(1, event)
            search.set_num_sessions(event)
        else:
            now_ms += event[0]
            search.landed(event[1], 50.0)
        assert 1 <= search.count <= num_sessions
