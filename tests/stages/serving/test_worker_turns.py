"""Batches that the event loop computes itself while the worker's thread has nothing to do."""

from __future__ import annotations

import functools
import queue
import threading
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from stages.runtime.spans import Span
from stages.sampling.sampler import SamplingParams
from stages.sampling.verifier import WindowVerifier
from stages.serving.scheduler import QueueBarrier, QueuedWindow, SlotAssigned, WindowScheduler
from stages.serving.slots import KvSlots
from stages.serving.worker import StageWorker
from stages.transport.hidden_codec import HiddenType
from tests.support.fake_stage import FakeRuntime, window_message

if TYPE_CHECKING:
    from collections.abc import Iterator

SLOW_US = 20_000
FAST_US = 2_000
LONG_AFTER_US = 5_000


class Stage:
    """The worker of a first stage, with a clock that moves only while it computes."""

    def __init__(self) -> None:
        self.now_us = 0
        self.decode_us = FAST_US
        self.may_decode = threading.Event()
        self.may_decode.set()
        self.is_decoding = threading.Event()
        # (id, thread) of each window that was sent on.
        self.sent: queue.Queue[tuple[int, int]] = queue.Queue()
        runtime: Any = FakeRuntime(0, 3)
        decode = runtime.decode

        def timed(spans: Any, **options: Any) -> Any:
            self.is_decoding.set()
            assert self.may_decode.wait(10)
            self.now_us += self.decode_us
            return decode(spans, **options)

        runtime.decode = timed
        self.scheduler = WindowScheduler(64, lambda _session, _epoch: True)
        self.worker = StageWorker(
            runtime,
            self.scheduler,
            clock_us=lambda: self.now_us,
            hidden_type=HiddenType.F32,
            slots=KvSlots(runtime, 1 << 20),
            on_windows=lambda bundle: self.sent.put((bundle.windows[0].id, threading.get_ident())),
            on_verdicts=lambda _bundle: None,
            on_failures=lambda failures: pytest.fail(str(failures)),
            on_ended=lambda error: pytest.fail(repr(error)),
        )
        self.worker.start()

    def compute(self, number: int, *, num_rows: int = 1, **fields: Any) -> bool:
        """Give it a window as a stage's event loop does; returns whether this thread computed it."""
        given = replace(window(number, num_rows), **fields)
        self.is_decoding.clear()
        if self.worker.compute_in_loop(given):
            return True
        self.scheduler.put(given)
        return False

    def next(self) -> tuple[int, int]:
        return self.sent.get(timeout=10)

    def warm_up(self) -> None:
        """Measure a batch of one row, and be idle for a while."""
        assert not self.compute(0)
        assert self.next() == (0, self.worker.ident)
        self.rest()

    def rest(self) -> None:
        """Return once the worker's thread waits for work, and has for long."""
        passed = threading.Event()
        self.scheduler.change(QueueBarrier(passed.set))
        assert passed.wait(10)
        # It is free once the thread waits again.
        with self.worker._turn:
            self.now_us += LONG_AFTER_US


@pytest.fixture
def stage() -> Iterator[Stage]:
    stage = Stage()
    yield stage
    stage.may_decode.set()
    stage.scheduler.close()
    stage.worker.join(10)
    assert not stage.worker.is_alive()


def window(number: int, num_rows: int = 1) -> QueuedWindow:
    # Within the context of the fake.
    span = Span(0, number % 100, [3] * num_rows, None, num_outputs=num_rows)
    return QueuedWindow(
        window_message(span, 1, number), span, WindowVerifier(SamplingParams()), (), 0, number
    )


def test_an_idle_stage_computes_a_short_batch_in_the_thread_that_has_it(stage: Stage) -> None:
    stage.warm_up()
    assert stage.compute(1)
    assert stage.next() == (1, threading.get_ident())


def test_batches_of_unknown_length_are_left_to_the_worker(stage: Stage) -> None:
    stage.warm_up()
    assert not stage.compute(1, num_rows=2)
    assert stage.next() == (1, stage.worker.ident)


def test_long_batches_are_left_to_the_worker(stage: Stage) -> None:
    stage.decode_us = SLOW_US
    stage.warm_up()
    for start in range(1, 4):
        assert not stage.compute(start)
        assert stage.next() == (start, stage.worker.ident)
        stage.rest()


def test_a_batch_that_was_slow_once_is_short_again_later(stage: Stage) -> None:
    stage.decode_us = SLOW_US
    stage.warm_up()
    stage.decode_us = FAST_US
    assert not stage.compute(1)
    start = 2
    while not stage.compute(start):
        stage.rest()
        start += 1
        assert start < 20
    assert start > 2


def test_the_first_batch_of_a_slot_is_left_to_the_worker(stage: Stage) -> None:
    """It may copy the cache of another slot."""
    stage.warm_up()
    stage.scheduler.change(SlotAssigned(1, 0, 0, (3,)))
    stage.rest()
    assert not stage.compute(1)
    assert stage.next() == (1, stage.worker.ident)
    stage.rest()
    assert stage.compute(2)


def test_prompts_checkpoints_and_grammars_are_left_to_the_worker(stage: Stage) -> None:
    stage.warm_up()
    span = window(1).span
    grammar = WindowVerifier(SamplingParams(), open_masks=lambda: pytest.fail("a first stage needs no masks"))
    cases: tuple[dict[str, Any], ...] = (
        {"span": replace(span, num_outputs=0)},
        {"span": replace(span, checkpoints=(1,))},
        {"span": span, "verifier": grammar},
    )
    for number, fields in enumerate(cases, 1):
        assert not stage.compute(number, **fields)
        assert stage.next() == (number, stage.worker.ident)
        stage.rest()
    assert stage.compute(4, span=span)


def test_a_busy_stage_leaves_batches_to_the_worker(stage: Stage) -> None:
    stage.warm_up()
    assert stage.compute(1)
    # It has only just finished.
    assert not stage.compute(2)
    assert [stage.next() for _ in range(2)][1] == (2, stage.worker.ident)


def test_windows_never_overtake_what_waits(stage: Stage) -> None:
    stage.warm_up()
    stage.may_decode.clear()
    # The first has a length that is not known.
    assert not stage.compute(1, num_rows=2)
    assert stage.is_decoding.wait(10)
    assert not stage.compute(3)
    assert not stage.compute(4)
    stage.may_decode.set()
    assert [stage.next()[0] for _ in range(3)] == [1, 3, 4]
    stage.rest()
    assert stage.compute(5)


def test_nothing_is_computed_after_the_end(stage: Stage) -> None:
    stage.warm_up()
    stage.scheduler.close()
    stage.worker.join(10)
    assert not stage.worker.compute_in_loop(window(1))


def test_windows_keep_their_order_and_changes_theirs_in_either_thread(stage: Stage) -> None:
    stage.warm_up()
    passed: list[int] = []
    num_here = 0
    for number in range(1, 300):
        num_here += stage.compute(number)
        stage.now_us += LONG_AFTER_US
        if number % 7 == 0:
            stage.scheduler.change(QueueBarrier(functools.partial(passed.append, number)))
    stage.rest()
    assert [stage.next()[0] for _ in range(299)] == list(range(1, 300))
    assert passed == list(range(7, 300, 7))
    assert 0 < num_here < 299
