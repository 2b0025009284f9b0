"""When the windows of a group leave, as rules."""

from hypothesis import given
from hypothesis import strategies as st

from mesh.coordinator.groups import GroupDepartures

ROUND_TRIP_MS = 60.0


def departures(num_sessions: int, num_groups: int) -> GroupDepartures:
    """Sessions in slots of their own number, none of which has sent anything."""
    found = GroupDepartures()
    found.set_num_groups(num_groups)
    for session in range(num_sessions):
        found.join(session, session)
    return found


@given(
    slots=st.lists(st.integers(0, 63), unique=True, min_size=1, max_size=40), num_groups=st.integers(1, 50)
)
def test_groups_are_neighbours_and_as_equal_as_can_be(slots: list[int], num_groups: int) -> None:
    found = GroupDepartures()
    found.set_num_groups(num_groups)
    for session, slot in enumerate(slots):
        found.join(session, slot)
    in_order = [slots[session] for group in found.groups for session in group]
    assert in_order == sorted(slots)
    sizes = [len(group) for group in found.groups]
    assert len(sizes) == min(num_groups, len(slots))
    assert max(sizes) - min(sizes) <= 1


def test_a_group_leaves_once_none_of_its_windows_is_in_flight() -> None:
    found = departures(4, 2)
    found.left([0, 1, 2, 3])
    found.landed(0)
    found.wait(0, 10.0)
    assert found.due(10.0, ROUND_TRIP_MS) == []
    found.landed(1)
    found.wait(1, 11.0)
    assert found.due(11.0, ROUND_TRIP_MS) == [[0, 1]]


def test_a_session_that_sends_nothing_more_is_not_waited_for() -> None:
    found = departures(2, 1)
    found.left([0, 1])
    found.landed(0)
    found.wait(0, 10.0)
    assert not found.due(10.0, ROUND_TRIP_MS)
    # Its answer has ended, or its reader is too far behind.
    found.landed(1)
    assert found.due(10.0, ROUND_TRIP_MS) == [[0]]
    found.left([0])
    found.landed(0)
    found.left([1])
    found.wait(0, 20.0)
    found.leave(1)
    assert found.due(20.0, ROUND_TRIP_MS) == [[0]]


def test_most_of_a_group_wait_for_the_others_for_one_group_time() -> None:
    found = departures(6, 2)
    found.left(range(6))
    for session in (0, 1):
        found.landed(session)
        found.wait(session, 100.0)
    assert found.next_ms(ROUND_TRIP_MS) == 100.0 + ROUND_TRIP_MS / 2
    assert found.due(100.0 + ROUND_TRIP_MS / 2, ROUND_TRIP_MS) == [[0, 1]]


def test_a_session_that_missed_its_group_joins_it_at_its_next_departure() -> None:
    found = departures(3, 1)
    found.left([0, 1, 2])
    for session in (0, 1):
        found.landed(session)
        found.wait(session, 0.0)
    found.left([0, 1])
    found.landed(2)
    found.wait(2, 5.0)
    assert found.due(5.0 + ROUND_TRIP_MS / 2, ROUND_TRIP_MS) == []
    for session in (0, 1):
        found.landed(session)
        found.wait(session, ROUND_TRIP_MS)
    assert found.due(ROUND_TRIP_MS, ROUND_TRIP_MS) == [[0, 1, 2]]


@given(st.data())
def test_no_window_waits_for_longer_than_a_round_trip(data: st.DataObject) -> None:
    found = departures(data.draw(st.integers(1, 8)), data.draw(st.integers(1, 8)))
    sessions = list(range(len(found)))
    now_ms = 0.0
    waits_since_ms: dict[int, float] = {}
    out: set[int] = set()
    for _ in range(data.draw(st.integers(1, 40))):
        session = data.draw(st.sampled_from(sessions))
        match data.draw(st.sampled_from(["wait", "land", "time", "resize"])):
            case "wait" if session not in waits_since_ms and session not in out:
                found.wait(session, now_ms)
                waits_since_ms[session] = now_ms
            case "land" if session in out:
                found.landed(session)
                out.remove(session)
            case "resize":
                found.set_num_groups(data.draw(st.integers(1, 8)))
            case _:
                now_ms += data.draw(st.floats(0.0, ROUND_TRIP_MS))
        for group in found.due(now_ms, ROUND_TRIP_MS):
            assert group, "a group without a window left"
            assert set(group) <= set(waits_since_ms)
            found.left(group)
            out |= set(group)
            for each in group:
                del waits_since_ms[each]
        assert all(now_ms - since_ms < ROUND_TRIP_MS + 1e-6 for since_ms in waits_since_ms.values())
        next_ms = found.next_ms(ROUND_TRIP_MS)
        assert (next_ms is None) == (not waits_since_ms)
        assert next_ms is None or next_ms > now_ms
