"""What pongs tell: stages that stand still in a batch, and windows that are nowhere."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mesh.coordinator.heartbeat import BatchMonitor, WindowMonitor, longest_batch_s
from spanmesh_proto import windows_pb2 as wire

INTERVAL_S = 0.25
TIMEOUT_S = 1.2


def pong(
    number: int = 0,
    *,
    age_s: float = 0.0,
    batch_rows: int = 1,
    num_done: int = 10,
    num_rows: int = 100,
    num_queued: int = 0,
    num_received: int = 7,
    num_sent: int = 7,
    row_s: float = 0.01,
) -> wire.Pong:
    return wire.Pong(
        sent_us=number,
        activity=wire.Activity(
            batch_age_us=int(age_s * 1e6),
            batch_rows=batch_rows,
            num_received=num_received,
            num_sent=num_sent,
        ),
        stats=wire.StageStats(
            num_windows=num_done,
            num_rows=num_rows,
            compute_us=int(num_rows * row_s * 1e6),
            num_queued_windows=num_queued,
        ),
    )


@pytest.mark.parametrize(
    ("num_rows", "earlier_rows", "row_s", "longest_s"),
    [
        (1, 100, 0.01, 60),
        # A long chunk on a slow processor: half a second a row.
        (512, 100, 0.5, 8 * 512 * 0.5),
        # The first batch reads the weights from the disk.
        (1, 0, 0, 600),
    ],
)
def test_how_long_a_batch_may_take_follows_from_earlier_ones(
    num_rows: int, earlier_rows: int, row_s: float, longest_s: float
) -> None:
    assert longest_batch_s(num_rows, earlier_rows, earlier_rows * row_s) == pytest.approx(longest_s)


def test_a_batch_that_never_ends_is_found_and_its_stage_named() -> None:
    batches = BatchMonitor(3, INTERVAL_S)
    for tick in range(1, 300):
        now_s = tick * INTERVAL_S
        found = batches.tick(INTERVAL_S, [pong(), pong(age_s=now_s), None])
        assert found == ((1,) if now_s > 60 else ()), now_s


@given(st.lists(st.tuples(st.floats(0, 100), st.floats(0, 1000)), max_size=100))
def test_neither_a_clock_that_jumped_nor_a_late_coordinator_makes_a_batch_long(
    steps: list[tuple[float, float]],
) -> None:
    batches = BatchMonitor(1, INTERVAL_S)
    # At most 25 s can be counted in a hundred intervals.
    assert not any(batches.tick(elapsed_s, [pong(age_s=age_s)]) for elapsed_s, age_s in steps)


class Ring:
    """A ring of two stages, seen once in each interval."""

    def __init__(self) -> None:
        self.windows = WindowMonitor(4, INTERVAL_S, TIMEOUT_S)
        self._number = 0

    def sees_lost(
        self,
        *told: wire.Pong,
        elapsed_s: float = INTERVAL_S,
        num_overtaking: int | None = 0,
        num_sent: int = 7,
        num_received: int = 7,
        is_new: bool = True,
    ) -> bool:
        self._number += is_new
        pongs = [pong(), pong(), *told][-2:]
        for each in pongs:
            each.sent_us = self._number
        return self.windows.tick(
            elapsed_s,
            pongs,
            num_overtaking=num_overtaking,
            num_sent=num_sent,
            num_received=num_received,
        )

    def num_ticks(self, *told: wire.Pong, most: int = 40, **seen: int) -> int | None:
        """Intervals until windows count as lost."""
        lost = (tick for tick in range(1, most) if self.sees_lost(*told, **seen))  # type: ignore[arg-type]
        return next(lost, None)


def test_windows_that_are_nowhere_are_lost_within_two_seconds() -> None:
    ticks = Ring().num_ticks(pong())
    assert ticks is not None
    assert ticks * INTERVAL_S <= 2


@pytest.mark.parametrize("told", [pong(age_s=0.001), pong(num_queued=1)], ids=["computed", "queued"])
def test_windows_that_a_stage_has_are_not_lost(told: wire.Pong) -> None:
    assert Ring().num_ticks(told) is None


def test_what_is_on_its_way_is_not_lost_however_slow_the_network_is() -> None:
    """A long chunk takes half a minute over a megabit a second, most of it in the buffers of the system."""
    assert Ring().num_ticks(num_sent=8) is None
    assert Ring().num_ticks(pong(num_received=6)) is None
    assert Ring().num_ticks(num_received=6) is None


def test_without_a_session_that_waits_nothing_is_lost() -> None:
    ring = Ring()
    assert not any(ring.sees_lost(num_overtaking=None) for _ in range(20))
    # Nor does that time count for the next one.
    assert not ring.sees_lost()


def test_progress_anywhere_and_verdicts_begin_the_wait_anew() -> None:
    ring = Ring()
    for number in range(40):
        assert not ring.sees_lost(pong(num_done=number // 4))
    for _ in range(20):
        ring.windows.note_verdict()
        assert not ring.sees_lost()


def test_only_intervals_in_which_every_stage_answered_count() -> None:
    ring = Ring()
    assert not ring.sees_lost()
    assert not any(ring.sees_lost(is_new=False) for _ in range(40))
    # Of a long interval, in which the coordinator itself was late, little counts.
    assert not ring.sees_lost(elapsed_s=60.0)


def test_a_window_that_far_too_many_overtook_is_lost_though_stages_are_busy() -> None:
    ring = Ring()
    # A window of each of four sessions between two chunks of each, several times, is no reason.
    assert not ring.sees_lost(pong(age_s=0.1), num_overtaking=5 * 4 * 5)
    assert ring.sees_lost(pong(age_s=0.1), num_overtaking=1000)
