"""How sessions share a draft model: rows of a batch, and slots of its KV cache."""

import os
import subprocess
import sys
import threading

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from speculative.draft.context import DraftOptions, probability
from speculative.draft.session import DraftSequence, FeatureSequence
from speculative.draft.worker import DraftSlots, ThreadPriority, share_rows

FORMER = DraftSequence("draft", DraftOptions(), lambda _token: False)


@pytest.mark.parametrize(
    ("wanted", "granted"),
    [
        ([], []),
        ([0, 0], [0, 0]),
        ([1, 1, 2], [1, 1, 2]),
        ([300], [128]),
        ([300, 300], [128, 0]),
        ([60, 300], [60, 68]),
        ([300, 1], [8, 1]),
        ([1, 300, 2, 300], [1, 8, 2, 0]),
    ],
)
def test_rows(wanted: list[int], granted: list[int]) -> None:
    assert share_rows(wanted, 128) == granted


@given(st.lists(st.integers(0, 500), max_size=8), st.integers(4, 128))
def test_a_batch_is_never_overfull_and_never_empty(wanted: list[int], max_rows: int) -> None:
    granted = share_rows(wanted, max_rows)
    assert sum(granted) <= max_rows
    assert all(0 <= given <= asked for given, asked in zip(granted, wanted, strict=True))
    assert any(granted) == any(wanted)


def test_a_slot_with_the_same_beginning_is_found_again() -> None:
    slots = DraftSlots(2)
    assert slots.take([1, 2, 3]) == (0, 0, None)
    assert slots.take([7, 8]) == (1, 0, None)
    assert slots.take([1]) is None
    slots.give_back(0, [7, 8])
    slots.give_back(1, [1, 2, 3])
    assert slots.take([1, 2, 4, 5]) == (1, 2, None)
    assert slots.take([7, 8, 9]) == (0, 2, None)


def test_a_slot_whose_rows_begin_late_is_not_preferred() -> None:
    """Of a text whose beginning stages had cached, a drafter has read features of the end only."""
    early, late = (FeatureSequence("eagle3", DraftOptions(), lambda _token: False) for _ in range(2))
    early.first_row, late.first_row = 1, 12
    slots = DraftSlots(3)
    for _ in range(3):
        slots.take(())
    text = tuple(range(20))
    slots.give_back(0, text, late)
    slots.give_back(1, text[:14], early)
    slots.give_back(2, text[:5], early)
    found = slots.take(text)
    assert found is not None
    assert (found.slot, found.num_shared, found.former) == (1, 14, early)
    # More rows, even so, than of a short beginning.
    found = slots.take(text)
    assert found is not None
    assert (found.slot, found.num_shared, found.former) == (0, 20, late)


def test_a_slot_of_another_client_holds_nothing_to_reuse() -> None:
    slots = DraftSlots(2)
    for client in ("ann", None):
        free = slots.take([1, 2, 3], client)
        assert free is not None
        slots.give_back(free.slot, [1, 2, 3], FORMER, client)
    found = slots.take([1, 2, 3, 4], "bob")
    assert found is not None
    assert found[1:] == (0, None)
    slots.give_back(found.slot, [1, 2, 3, 4], FORMER, "bob")
    assert slots.take([1, 2, 3, 5], "bob") == (found.slot, 3, FORMER)


@given(st.integers(0, 3000), st.integers(0, 3000), st.integers(0, 3000))
def test_common_beginnings_of_long_texts(num_common: int, num_held: int, num_asked: int) -> None:
    common = [number % 7 for number in range(num_common)]
    slots = DraftSlots(1)
    assert slots.take([]) is not None
    slots.give_back(0, [*common, *[8] * num_held])
    assert slots.take([*common, *[9] * num_asked]) == (0, num_common, None)


def test_probability() -> None:
    logits = np.log(np.array([0.2, 0.7, 0.1], np.float32)) + 50
    before = logits.copy()
    assert [round(probability(logits, token), 5) for token in range(3)] == [0.2, 0.7, 0.1]
    assert (logits == before).all()
    with pytest.raises(ValueError, match="probability of nan"):
        probability(np.array([1.0, np.nan], np.float32), 0)


@pytest.mark.parametrize(
    ("name", "value", "need"),
    [
        ("draft_max", 0, "1 or more"),
        ("draft_max", -3, "1 or more"),
        ("draft_min", 9, "from 1 to draft_max, 8"),
        ("p_min", 1.5, "from 0 (off) to 1"),
        ("p_min", -0.1, "from 0 (off) to 1"),
        ("p_min", float("nan"), "from 0 (off) to 1"),
        ("num_threads", 0, "1 or more"),
    ],
)
def test_options_out_of_range(name: str, value: float, need: str) -> None:
    with pytest.raises(ValueError) as raised:  # noqa: PT011 - the text is compared below
        DraftOptions(**{name: value})  # type: ignore[arg-type]
    assert str(raised.value).startswith(f"{name} is {value}: it must be {need}")


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux gives each thread its own niceness")
def test_a_thread_gives_way_until_somebody_waits_for_it() -> None:
    thread_id = []
    seen: list[int] = []
    can_be_lowered: list[bool] = []

    def work() -> None:
        thread_id.append(threading.get_native_id())
        priority = ThreadPriority(thread_id[0], 7)
        can_be_lowered.append(priority.can_be_lowered)
        seen.append(os.getpriority(os.PRIO_PROCESS, thread_id[0]))
        with priority.lowered():
            seen.append(os.sched_getscheduler(thread_id[0]))
            priority.raise_again()
            seen.append(os.sched_getscheduler(thread_id[0]))
        with priority.lowered():
            pass
        seen.append(os.sched_getscheduler(thread_id[0]))

    before = os.getpriority(os.PRIO_PROCESS, threading.get_native_id())
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert os.getpriority(os.PRIO_PROCESS, threading.get_native_id()) == before
    if not can_be_lowered[0]:
        pytest.skip("this process may not take a niceness back")
    assert seen == [7, os.SCHED_IDLE, os.SCHED_OTHER, os.SCHED_OTHER]


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux schedules threads of other processes")
def test_a_process_that_ended_has_no_priority_to_raise() -> None:
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    priority = ThreadPriority(process.pid, 0)
    with priority.lowered():
        process.kill()
        process.communicate()
