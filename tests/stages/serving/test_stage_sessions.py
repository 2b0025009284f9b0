"""The stage's session table and window queue: pure rules, checked as rules."""

import sys
import threading
from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spanmesh_proto.errors import InvalidWindow, UnknownSession
from stages.runtime.spans import Span, run_around
from stages.sampling.sampler import SamplingParams
from stages.sampling.session_spec import Resumed
from stages.sampling.verifier import WindowVerifier
from stages.serving.scheduler import QueueBarrier, QueuedWindow, SlotAssigned, WindowScheduler, Work
from stages.serving.sessions import SessionTable
from tests.support.fake_stage import window_message


def window(
    session: int,
    rows: int,
    *,
    epoch: int = 0,
    id: int = 0,
    start: int = 0,
    num_outputs: int | None = None,
    bundle: int = 0,
) -> QueuedWindow:
    num_outputs = rows if num_outputs is None else num_outputs
    span = Span(slot=session, start=start, tokens=[1] * rows, num_outputs=num_outputs)
    message = window_message(span, session, id, epoch=epoch)
    return QueuedWindow(message, span, WindowVerifier(SamplingParams()), (), 0, bundle)


def take(scheduler: WindowScheduler) -> Work | None:
    """Wait for work as a worker does; None once the queue is closed."""
    while (work := scheduler.take_ready()) is None and not scheduler.is_closed:
        scheduler.wait()
    return work


def test_a_slot_given_to_a_new_session_ends_the_old_one() -> None:
    table = SessionTable(num_slots=2)
    table.open(1, 0, WindowVerifier(SamplingParams()))
    table.open(2, 0, WindowVerifier(SamplingParams()))
    assert not table.is_live(1, 0)
    assert table.admit(1, 0) is None
    late_close = table.close(1)
    assert late_close is None, "closing the evicted session must not free its successor's slot"
    assert table.close(2) == 0


def test_a_session_goes_on_with_its_own_slot_only() -> None:
    table = SessionTable(num_slots=2)
    table.open(1, 0, WindowVerifier(SamplingParams()))
    table.open(2, 1, WindowVerifier(SamplingParams()))
    table.close_all()
    assert table.open(3, 0, WindowVerifier(SamplingParams()), Resumed(1, 40)).num_resumed == 40
    assert table.open(4, 1, WindowVerifier(SamplingParams()), Resumed(1, 40)).num_resumed == 0
    assert table.open(5, 1, WindowVerifier(SamplingParams()), Resumed(2, 40)).num_resumed == 0, (
        "4 was there since"
    )


def test_a_session_that_was_closed_before_it_was_opened_is_over_at_once() -> None:
    table = SessionTable(num_slots=2)
    table.open(1, 0, WindowVerifier(SamplingParams()))
    assert table.close(2) is None
    table.open(2, 0, WindowVerifier(SamplingParams()))
    assert not table.is_open(1), "its slot is another's"
    assert not table.is_open(2)
    assert len(table) == 0
    assert table.admit(2, 0) is None
    table.open(3, 0, WindowVerifier(SamplingParams()))
    assert table.slots == {3: 0}
    with pytest.raises(UnknownSession, match="session 4"):
        table.admit(4, 0)


def test_windows_of_an_older_epoch_are_void() -> None:
    table = SessionTable(num_slots=1)
    table.open(1, 0, WindowVerifier(SamplingParams()))
    assert table.admit(1, 3) is not None
    assert table.admit(1, 2) is None
    table.cancel(1, 5)
    assert not table.is_live(1, 4)
    assert table.is_live(1, 5)
    table.cancel(1, 4)
    assert not table.is_live(1, 4), "an old cancel must not lower the epoch"


def test_unknown_sessions_and_slots_are_named() -> None:
    table = SessionTable(num_slots=1)
    with pytest.raises(UnknownSession, match="session 7"):
        table.admit(7, 0)
    with pytest.raises(InvalidWindow, match="slot 1 of 1"):
        table.open(1, 1, WindowVerifier(SamplingParams()))
    table.cancel(7, 3)
    assert len(table) == 0


@given(st.lists(st.tuples(st.sampled_from(["open", "close"]), st.integers(1, 6), st.integers(0, 2))))
def test_a_slot_never_has_two_owners(steps: list[tuple[str, int, int]]) -> None:
    table = SessionTable(num_slots=3)
    owner: dict[int, int] = {}
    fresh = 0
    alive: dict[int, int] = {}
    for kind, pick, slot in steps:
        if kind == "open":
            fresh += 1
            table.open(fresh, slot, WindowVerifier(SamplingParams()))
            evicted = owner.get(slot)
            if evicted is not None:
                assert not table.is_live(evicted, 0)
                del alive[evicted]
            owner[slot] = fresh
            alive[fresh] = slot
        elif alive:
            session = sorted(alive)[pick % len(alive)]
            assert table.close(session) == alive.pop(session)
            owner = {s: o for s, o in owner.items() if o != session}
        assert len(table) == len(alive)


@given(
    st.lists(st.tuples(st.integers(0, 4), st.integers(1, 24), st.booleans()), max_size=30),
    st.integers(24, 40),
    st.booleans(),
)
def test_batches_keep_order_and_fit(
    arrivals: list[tuple[int, int, bool]],
    max_rows: int,
    takes_runs: bool,  # noqa: FBT001
) -> None:
    run_of = partial(run_around, most_rows=max_rows) if takes_runs else None
    scheduler = WindowScheduler(max_rows, lambda _session, _epoch: True, run_of=run_of)
    for index, (session, rows, is_verified) in enumerate(arrivals):
        scheduler.put(window(session, rows, id=index, num_outputs=rows if is_verified else 0))
    seen: dict[int, list[int]] = {}
    while len(scheduler):
        work = take(scheduler)
        assert work is not None
        assert work.windows
        assert sum(len(w.span.tokens) for w in work.windows) <= max_rows
        assert len({w.session for w in work.windows}) == len(work.windows)
        for each in work.windows:
            seen.setdefault(each.session, []).append(each.id)
    for session in {session for session, _, _ in arrivals}:
        assert seen[session] == [index for index, (s, _, _) in enumerate(arrivals) if s == session]


def chunk(session: int, id: int) -> QueuedWindow:
    return window(session, 20, id=id, num_outputs=0)


def taken(scheduler: WindowScheduler) -> list[tuple[int, int]]:
    work = take(scheduler)
    assert work is not None
    return [(each.session, each.id) for each in work.windows]


def test_chunks_of_a_prompt_and_others_take_turns() -> None:
    scheduler = WindowScheduler(64, lambda _session, _epoch: True)
    for number in range(3):
        scheduler.put(chunk(1, number))
    assert taken(scheduler) == [(1, 0)]
    # Three sessions came while it was computed. They wait for no second chunk, and that for nobody else.
    for session in (2, 3, 4):
        scheduler.put(window(session, 2))
    assert taken(scheduler) == [(2, 0), (3, 0), (4, 0)]
    scheduler.put(window(2, 2, id=1))
    assert taken(scheduler) == [(1, 1)]
    assert taken(scheduler) == [(2, 1)]
    # Of two prompts in a row, each chunk is a batch of its own.
    scheduler.put(chunk(5, 0))
    assert [taken(scheduler), taken(scheduler)] == [[(1, 2)], [(5, 0)]]


def test_a_short_prompt_goes_before_long_ones_but_not_for_ever() -> None:
    scheduler = WindowScheduler(64, lambda _session, _epoch: True)
    scheduler.put(chunk(1, 0))
    scheduler.put(chunk(2, 0))
    for session in range(3, 11):
        scheduler.put(window(session, 4, num_outputs=1))
    order = [taken(scheduler)[0][0] for _ in range(10)]
    assert order == [3, 4, 5, 6, 1, 7, 8, 9, 10, 2]


def test_windows_of_a_bundle_share_a_batch_and_a_chunk_waits_for_all_that_came_before_it() -> None:
    scheduler = WindowScheduler(64, lambda _session, _epoch: True)
    scheduler.put(chunk(9, 0))
    scheduler.put(chunk(9, 1))
    assert taken(scheduler) == [(9, 0)]
    for first in (0, 2, 4):
        scheduler.put(*(window(session, 1, bundle=first) for session in range(first, min(first + 2, 5))))
    groups = [taken(scheduler) for _ in range(4)]
    assert groups == [[(0, 0), (1, 0)], [(2, 0), (3, 0)], [(4, 0)], [(9, 1)]]


def taken_with_changes(scheduler: WindowScheduler) -> tuple[list[int], list[tuple[int, int]]]:
    work = take(scheduler)
    assert work is not None
    begun = [change.session for change in work.changes if isinstance(change, SlotAssigned)]
    return begun, [(each.session, each.id) for each in work.windows]


def test_a_slot_is_copied_once_what_is_copied_is_computed() -> None:
    scheduler = WindowScheduler(64, lambda _session, _epoch: True)
    scheduler.change(SlotAssigned(1, 1, 1, ()))
    scheduler.put(chunk(1, 0))
    scheduler.put(window(1, 10, id=1, start=20, num_outputs=1))
    scheduler.put(window(1, 2, id=2, start=30))
    # These begin with the first 25 positions of session 1, of which none is computed yet. Here the second has
    # them itself, but a stage behind this one may not.
    for session in (2, 3):
        scheduler.change(SlotAssigned(session, 1, session, (1,) * 25, num_resumed=40 * (session == 3)))
        scheduler.put(window(session, 2, start=25))
    scheduler.change(SlotAssigned(4, 4, 4, ()))
    scheduler.put(window(4, 2))
    scheduler.put(window(5, 2))
    assert taken_with_changes(scheduler) == ([1], [(5, 0)])
    assert taken_with_changes(scheduler) == ([], [(1, 0)])
    assert taken_with_changes(scheduler) == ([], [(1, 1)])
    assert taken_with_changes(scheduler) == ([2, 3, 4], [(1, 2), (2, 0), (3, 0), (4, 0)])
    assert len(scheduler) == 0


def test_nobody_waits_for_what_will_never_be_computed() -> None:
    void: set[int] = set()
    scheduler = WindowScheduler(64, lambda session, _epoch: session not in void)
    scheduler.put(chunk(1, 0))
    scheduler.change(SlotAssigned(2, 1, 2, (1,) * 10))
    scheduler.put(window(2, 1, start=10))
    void.add(1)
    assert taken_with_changes(scheduler) == ([2], [(2, 0)])


def test_windows_of_a_session_that_ended_while_its_slot_waited_are_not_computed_in_the_next_one_s() -> None:
    void: set[int] = set()
    scheduler = WindowScheduler(64, lambda session, _epoch: session not in void)
    scheduler.put(chunk(1, 0))
    scheduler.put(window(1, 20, id=1, start=20, num_outputs=1))
    assert taken(scheduler) == [(1, 0)]
    # Both copy what session 1 is still to compute, one after the other into the same slot.
    for session in (2, 3):
        scheduler.change(SlotAssigned(session, 1, 2, (1,) * 25))
        scheduler.put(window(session, 2, start=25))
    assert taken(scheduler) == [(1, 1)]
    void.add(2)
    assert taken_with_changes(scheduler) == ([2, 3], [(3, 0)])
    assert scheduler.num_dropped == 1


@given(
    st.lists(
        st.one_of(
            st.tuples(st.just("window"), st.integers(0, 4), st.integers(1, 20), st.integers(0, 30)),
            st.tuples(st.just("begin"), st.integers(0, 4), st.integers(0, 4), st.integers(0, 30)),
        ),
        max_size=30,
    )
)
def test_changes_come_in_order_behind_what_they_copy(steps: list[tuple[str, int, int, int]]) -> None:
    scheduler = WindowScheduler(64, lambda _session, _epoch: True)
    # Of each step, those that must come before it.
    before: dict[int, set[int]] = {}
    windows: dict[int, tuple[int, int]] = {}
    changes: list[int] = []
    for number, (kind, session, other, start) in enumerate(steps):
        if kind == "window":
            scheduler.put(window(session, other, id=number, start=start, num_outputs=number % 2))
            before[number] = {each for each in windows if windows[each][0] == session}
            before[number] |= {each for each in changes if steps[each][1] == session}
            windows[number] = (session, start)
        else:
            scheduler.change(SlotAssigned(session, other, session, (1,) * start, number % 50))
            before[number] = set(changes)
            if other != session:
                before[number] |= {
                    each for each, (whose, at) in windows.items() if whose == other and at < start
                }
            changes.append(number)
    scheduler.change(QueueBarrier(lambda: None))
    scheduler.put(window(9, 1, id=len(steps)))
    done: set[int] = set()
    begun = iter(changes)
    while len(done) <= len(steps):
        work = take(scheduler)
        assert work is not None
        for change in work.changes:
            if isinstance(change, SlotAssigned):
                number = next(begun)
                assert change.session == steps[number][1]
                assert before[number] <= done
                done.add(number)
        for each in work.windows:
            assert before.get(each.id, set()) <= done
        done |= {each.id for each in work.windows}


def test_a_void_chunk_holds_nobody_up() -> None:
    void: set[int] = set()
    scheduler = WindowScheduler(64, lambda session, _epoch: session not in void)
    scheduler.put(window(2, 1))
    scheduler.put(chunk(1, 0))
    assert taken(scheduler) == [(2, 0)]
    void.add(1)
    scheduler.put(window(2, 1, id=1))
    assert taken(scheduler) == [(2, 1)]
    assert (len(scheduler), scheduler.num_dropped) == (0, 1)


def test_void_windows_are_dropped_before_computing() -> None:
    table = SessionTable(num_slots=2)
    table.open(0, 0, WindowVerifier(SamplingParams()))
    table.open(1, 1, WindowVerifier(SamplingParams()))
    scheduler = WindowScheduler(8, table.is_live)
    scheduler.put(window(0, 2, epoch=0))
    scheduler.put(window(1, 2, epoch=0))
    table.cancel(0, 1)
    work = take(scheduler)
    assert work is not None
    assert [w.session for w in work.windows] == [1]
    assert scheduler.num_dropped == 1


def test_close_wakes_a_waiting_taker() -> None:
    scheduler = WindowScheduler(8, lambda _session, _epoch: True)
    results: list[object] = []
    taker = threading.Thread(target=lambda: results.append(take(scheduler)))
    taker.start()
    scheduler.close()
    taker.join(timeout=5)
    assert results == [None]


def test_the_length_can_be_asked_while_another_thread_takes() -> None:
    """As a stage's event loop does for each window that arrives, to refuse one too many."""
    scheduler = WindowScheduler(64, lambda _session, _epoch: True)
    num_rounds, num_taken = 200, 0
    lengths: set[int] = set()

    def take_all() -> None:
        nonlocal num_taken
        while (work := take(scheduler)) is not None:
            num_taken += len(work.windows)

    interval_s = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        taker = threading.Thread(target=take_all)
        taker.start()
        for number in range(num_rounds):
            scheduler.put(window(1, 4, start=0, id=number))
            # Sessions that begin with what this window brings, and windows of theirs that wait with them.
            for session in (2, 3):
                scheduler.change(SlotAssigned(session, 1, session, (1,) * 4))
                scheduler.put(window(session, 1, start=4, id=number))
            lengths.update(len(scheduler) for _ in range(4))
        while len(scheduler):
            pass
        scheduler.close()
        taker.join(20)
    finally:
        sys.setswitchinterval(interval_s)
    assert num_taken == 3 * num_rounds
    assert max(lengths) > 0
    assert len(scheduler) == 0
