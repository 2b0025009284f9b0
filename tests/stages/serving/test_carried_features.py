"""Features that travel with their windows, and those that are sent after them."""

from __future__ import annotations

import queue
from typing import TYPE_CHECKING, Any

import pytest

from spanmesh_proto import windows_pb2 as wire
from stages.runtime.spans import Span
from stages.sampling.sampler import SamplingParams
from stages.sampling.verifier import WindowVerifier
from stages.serving import feature_outlet
from stages.serving.feature_outlet import FeatureOutlet, feature_bytes
from stages.serving.scheduler import QueuedWindow, WindowScheduler
from stages.serving.slots import KvSlots
from stages.serving.worker import StageWorker
from stages.transport.hidden_codec import HiddenType
from tests.support.fake_stage import FakeRuntime, window_message

if TYPE_CHECKING:
    from collections.abc import Iterator


class Stage:
    """The worker of a stage in the middle of a fake ring, and what it sends, in order."""

    def __init__(self) -> None:
        runtime: Any = FakeRuntime(0, 3)
        self.sent: queue.Queue[tuple[str, Any]] = queue.Queue()
        outlet = FeatureOutlet(runtime)
        outlet._send = lambda features: self.sent.put(("features", features))
        self.scheduler = WindowScheduler(64, lambda _session, _epoch: True)
        self.worker = StageWorker(
            runtime,
            self.scheduler,
            clock_us=lambda: 0,
            hidden_type=HiddenType.F32,
            slots=KvSlots(runtime, 1 << 20),
            on_windows=lambda bundle: self.sent.put(("windows", bundle)),
            on_verdicts=lambda bundle: self.sent.put(("verdicts", bundle)),
            on_failures=lambda failures: self.sent.put(("failures", failures)),
            on_ended=lambda error: self.sent.put(("ended", error)),
            plugs=[outlet],
        )
        assert outlet.tap((0,), HiddenType.F32) == (0,)
        self.worker.start()

    def next(self) -> tuple[str, Any]:
        return self.sent.get(timeout=10)


@pytest.fixture
def stage() -> Iterator[Stage]:
    stage = Stage()
    yield stage
    stage.scheduler.close()
    stage.worker.join()


def window(
    slot: int, num_rows: int = 1, *carried: wire.Features, asks: bool = True, id: int = 7, together: int = 0
) -> QueuedWindow:
    span = Span(slot, id - 7, [3] * num_rows, None, num_outputs=num_rows)
    message = window_message(span, 1 + slot, id, wants_features=asks, features_together=together)
    return QueuedWindow(message, span, WindowVerifier(SamplingParams()), (), 0, 0, travelling=carried)


def test_features_of_a_few_rows_travel_with_their_window(stage: Stage) -> None:
    earlier = wire.Features(session=1, window_id=7, num_rows=2, rows=[bytes(8)], stage=9)
    stage.scheduler.put(window(0, 2, earlier), window(1))
    kind, bundle = stage.next()
    assert kind == "windows"
    assert [(each.session, each.num_rows, each.stage) for each in bundle.features] == [
        (1, 2, 9),
        (1, 2, 0),
        (2, 1, 0),
    ]
    assert stage.sent.empty()


def test_features_that_may_wait_are_sent_together(stage: Stage) -> None:
    """Three rows of one session are one message, a row of another one its own."""
    for window_id in (7, 8):
        stage.scheduler.put(window(0, id=window_id, together=4))
        assert not stage.next()[1].features
    stage.scheduler.put(window(1, together=4))
    assert not stage.next()[1].features
    assert stage.sent.empty()
    stage.scheduler.put(window(0, id=9, together=4))
    assert not stage.next()[1].features
    kind, features = stage.next()
    assert kind == "features"
    assert [(each.session, each.window_id, each.start, list(each.window_rows)) for each in features] == [
        (1, 7, 0, [1, 1, 1]),
        (2, 7, 0, [1]),
    ]
    assert [each.num_rows for each in features] == [3, 1]


def test_features_that_wait_go_before_those_that_do_not(stage: Stage) -> None:
    stage.scheduler.put(window(0, together=9))
    assert not stage.next()[1].features
    stage.scheduler.put(window(0, id=8))
    kind, bundle = stage.next()
    assert (kind, [each.window_id for each in bundle.features]) == ("windows", [8])
    kind, features = stage.next()
    assert (kind, [each.window_id for each in features]) == ("features", [7])
    # Of another reader's next window that may wait: nothing is left.
    stage.scheduler.put(window(0, id=9, together=9))
    stage.next()
    assert stage.sent.empty()


def test_many_are_sent_after_the_window(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feature_outlet, "MOST_CARRIED_BYTES", 4 * 3)
    stage.scheduler.put(window(0, 3))
    assert len(stage.next()[1].features) == 1
    # What came from earlier stages counts as well, and goes on in any case.
    earlier = wire.Features(session=2, window_id=7, num_rows=1, rows=[bytes(4)], stage=9)
    stage.scheduler.put(window(1, 3, earlier))
    kind, bundle = stage.next()
    assert (kind, list(bundle.features)) == ("windows", [earlier])
    kind, features = stage.next()
    assert (kind, feature_bytes(features)) == ("features", 4 * 3)


def test_windows_that_want_none_have_none(stage: Stage) -> None:
    stage.scheduler.put(window(0, asks=False), window(1, asks=False))
    assert not stage.next()[1].features
    assert stage.sent.empty()
