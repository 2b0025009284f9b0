"""Windows that are held until their group leaves."""

import asyncio
from collections.abc import Sequence

from mesh.coordinator.groups import WindowGroups
from spanmesh_proto import windows_pb2 as wire

ROUND_TRIP_MS = 50.0


class Line:
    """What left, bundle by bundle, as (session, window id)."""

    def __init__(self, num_groups: int) -> None:
        self.bundles: list[list[tuple[int, int]]] = []
        self.now_ms = 0.0
        self.groups = WindowGroups(3, self._send, clock_ms=lambda: self.now_ms, num_groups=num_groups)
        self._num_sent: dict[int, int] = {}
        self.left_ms: dict[int, float] = {}

    def _send(self, windows: Sequence[wire.Window]) -> None:
        self.bundles.append([(window.session, window.id) for window in windows])

    def send(self, session: int, *, is_first: bool = True, num_windows: int = 1) -> bool:
        first = self._num_sent.get(session, 0)
        self._num_sent[session] = first + num_windows
        windows = [wire.Window(session=session, id=first + number) for number in range(num_windows)]
        return self.groups.send(
            session,
            windows,
            is_first=is_first,
            on_left=lambda now_ms: self.left_ms.__setitem__(session, now_ms),
        )

    def land(self, *sessions: int) -> None:
        """Verdicts of one bundle, a round trip after all windows left."""
        self.now_ms += ROUND_TRIP_MS
        for session in sessions:
            self.groups.landed(session, 1)

    def take(self) -> list[list[tuple[int, int]]]:
        taken, self.bundles = self.bundles, []
        return taken


def started(num_groups: int, num_sessions: int) -> Line:
    """Sessions that have sent their first windows, which wait to leave."""
    line = Line(num_groups)
    for session in range(num_sessions):
        line.groups.join(session, session)
    for session in range(num_sessions):
        line.send(session)
    return line


async def turn() -> None:
    for _ in range(3):
        await asyncio.sleep(0)


async def test_alone_a_window_leaves_at_once() -> None:
    line = Line(1)
    line.groups.join(1, 0)
    line.send(1)
    assert line.take() == [[(1, 0)]]
    # A prefill chunk of a session that does not decode yet, too.
    line.send(2, num_windows=2)
    assert line.take() == [[(2, 0), (2, 1)]]


async def test_windows_of_a_group_leave_in_one_bundle_and_stay_together() -> None:
    line = started(2, 4)
    await turn()
    assert line.take() == [[(0, 0), (1, 0)], [(2, 0), (3, 0)]]
    line.land(2, 3)
    for session in (2, 3):
        line.send(session)
    await turn()
    assert line.take() == [[(2, 1), (3, 1)]]


async def test_a_verdict_that_is_late_is_waited_for() -> None:
    line = started(1, 2)
    await turn()
    line.take()
    line.land(0)
    line.send(0)
    await turn()
    assert line.take() == []
    line.land(1)
    line.send(1)
    await turn()
    assert line.take() == [[(0, 1), (1, 1)]]
    # But no longer than a round trip took.
    line.land(0)
    line.send(0)
    line.now_ms += 3 * ROUND_TRIP_MS
    await asyncio.sleep(3 * ROUND_TRIP_MS / 1000)
    assert line.take() == [[(0, 2)]]


async def test_a_session_is_told_when_its_window_leaves() -> None:
    line = started(1, 2)
    await turn()
    line.left_ms.clear()
    line.land(0)
    assert not line.send(0)
    line.now_ms += 7.0
    line.groups.landed(1, 1)
    assert not line.send(1)
    await turn()
    assert line.left_ms == {0: line.now_ms, 1: line.now_ms}
    # One that leaves at once is not.
    line.groups.leave(1)
    line.groups.landed(0, 1)
    assert line.send(0)
    assert line.left_ms[0] == line.now_ms


async def test_a_prefill_chunk_says_nothing_about_round_trips() -> None:
    line = Line(1)
    line.send(7, num_windows=2)
    line.now_ms += 5000.0
    line.groups.landed(7, 0)
    for session in (0, 1):
        line.groups.join(session, session)
    for session in (0, 1):
        line.send(session)
    await turn()
    line.land(0)
    line.take()
    line.send(0)
    line.now_ms += 2 * ROUND_TRIP_MS
    await asyncio.sleep(3 * ROUND_TRIP_MS / 1000)
    assert line.take() == [[(0, 1)]]


async def test_windows_of_one_session_leave_in_order() -> None:
    line = started(1, 2)
    await turn()
    line.take()
    line.land(0)
    line.send(0)
    line.send(0, is_first=False)
    await turn()
    assert line.take() == []
    line.land(1)
    await turn()
    assert line.take() == [[(0, 1), (0, 2)]]


async def test_further_windows_of_sessions_leave_together_without_waiting() -> None:
    line = started(1, 3)
    await turn()
    line.take()
    for session in (0, 1):
        line.send(session, is_first=False)
    await turn()
    assert line.take() == [[(0, 1), (1, 1)]]


async def test_a_session_that_is_alone_at_once_overtakes_no_window_of_its_own() -> None:
    line = started(1, 2)
    await turn()
    line.take()
    line.send(0, is_first=False)
    line.groups.leave(1)
    line.send(0, is_first=False)
    await turn()
    assert line.take() == [[(0, 1), (0, 2)]]


async def test_a_session_that_leaves_takes_its_window_along_and_holds_nobody_up() -> None:
    line = started(1, 3)
    await turn()
    line.take()
    line.land(0, 1)
    for session in (0, 1):
        line.send(session)
    line.groups.leave(1)
    await turn()
    assert line.take() == []
    line.groups.leave(2)
    await turn()
    assert line.take() == [[(0, 1)]]


async def test_nothing_leaves_after_the_end() -> None:
    line = started(1, 2)
    line.groups.close()
    assert not line.send(7)
    await asyncio.sleep(0.1)
    assert line.take() == []


async def test_further_windows_of_a_session_that_leaves_do_not_leave_either() -> None:
    line = started(1, 2)
    await turn()
    line.take()
    line.send(0, is_first=False)
    line.groups.leave(0)
    await turn()
    assert line.take() == []


async def test_only_groups_with_sessions_are_told() -> None:
    line = Line(3)
    assert (line.groups.sizes, line.groups.found) == ([], {})
    line.groups.join(1, 0)
    assert (line.groups.sizes, line.groups.found) == ([1], {})
