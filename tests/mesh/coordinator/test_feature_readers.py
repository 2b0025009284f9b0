"""Two readers of one session's features: a drafter that may rest, and the record of the answer."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import pytest

from mesh.coordinator import feature_plug
from mesh.coordinator.feature_plug import FeaturePlug, ReceivedFeatures, SessionFeatures
from mesh.coordinator.feature_store import FeatureNeeds
from mesh.coordinator.generation import Generation, InFlightWindow
from mesh.engine import GenerationRequest
from spanmesh_proto import windows_pb2 as wire
from speculative.proposer import Proposal

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from mesh.coordinator.generation import WindowPlan

NEEDS = FeatureNeeds((0,), 3, 1, context=4)
PROMPT = tuple(range(5, 25))


class Reader:
    """Notes what it is given.

    Attributes:
        wants_features: Set by a test.
        features_may_wait: Likewise.
    """

    context = 8

    def __init__(self, *, may_wait: bool) -> None:
        self.wants_features = True
        self.features_may_wait = may_wait
        self.positions: list[int] = []
        self.ended_with: tuple[int, ...] | None = None

    def take_features(self, start: int, rows: NDArray[np.float32]) -> None:
        self.positions += range(start, start + len(rows))

    def end(self, tokens: tuple[int, ...]) -> None:
        self.ended_with = tokens


class Streams:
    """Connections that are there."""

    why_off: str | None = None


class Session:
    """A session whose windows a test sends and judges."""

    def __init__(self) -> None:
        self.plug = FeaturePlug(NEEDS)
        self.plug.streams = cast("Any", Streams())
        self.drafter, self.answer = Reader(may_wait=False), Reader(may_wait=True)
        request = GenerationRequest(PROMPT, 9)
        self.generation = Generation(request, context_length=64, max_rows=32)
        self.features = SessionFeatures(
            self.plug, self.generation, cast("Any", self.drafter), cast("Any", self.answer)
        )
        self.features.attach(7, is_elsewhere=False)
        self._num_sent = 0

    def send(self, plan: WindowPlan) -> tuple[int, wire.Window]:
        message = wire.Window()
        self.features.sending(self._num_sent, plan, message)
        self._num_sent += 1
        return self._num_sent - 1, message

    def judge(self, window_id: int, plan: WindowPlan, tokens: tuple[int, ...]) -> None:
        self.generation.commit(tokens)
        self.features.judged(InFlightWindow(window_id, plan, 0.0, 0), wire.Verdict(tokens=tokens))

    def arrive(self, window_id: int, plan: WindowPlan) -> None:
        rows = np.zeros((len(plan.tokens), 1), np.float32)
        self.plug.take(ReceivedFeatures(7, window_id, plan.start, ((0, rows),), 4))

    def go(self, plan: WindowPlan, tokens: tuple[int, ...]) -> wire.Window:
        """A window whose features are there before its verdict."""
        window_id, message = self.send(plan)
        if message.wants_features:
            self.arrive(window_id, plan)
        self.judge(window_id, plan, tokens)
        return message


@pytest.fixture
def short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feature_plug, "_LATE_S", 0.04)


def test_each_reads_what_it_wants() -> None:
    session = Session()
    # Of a prompt of twenty the record reads the last eight, the drafter four.
    assert not session.go(session.generation.prefill(12), ()).wants_features
    assert session.go(session.generation.prefill(8), (30,)).wants_features
    assert session.drafter.positions == session.answer.positions == list(range(12, 20))
    message = session.go(session.generation.next_window(), (31,))
    assert not message.features_together
    session.drafter.wants_features = False
    message = session.go(session.generation.next_window(), (32,))
    # For the record alone they may wait longer than for a drafter that rests.
    for_record = message.features_together
    assert session.drafter.positions == list(range(12, 21))
    assert session.answer.positions == list(range(12, 22))
    session.drafter.wants_features, session.drafter.features_may_wait = True, True
    plan = session.generation.next_window()
    window_id, message = session.send(plan)
    assert 1 < message.features_together < for_record
    session.judge(window_id, plan, (33,))
    session.drafter.wants_features = False
    session.answer.wants_features = False
    assert not session.go(session.generation.next_window(), (34,)).wants_features
    assert session.answer.positions == list(range(12, 22))


def test_features_of_several_windows_in_one_message() -> None:
    """Each row counts by the verdict of its own window: of the second the last one was rejected."""
    session = Session()
    session.go(session.generation.prefill(20), (30,))
    begun = session.answer.positions.copy()
    first, second = session.generation.next_window(), None
    one, _ = session.send(first)
    session.judge(one, first, (31,))
    second = session.generation.next_window(Proposal((32, 40), (1.0, 1.0), "test"))
    two, _ = session.send(second)
    session.judge(two, second, (32, 33))
    assert session.answer.positions == begun
    rows = np.zeros((4, 1), np.float32)
    session.plug.take(ReceivedFeatures(7, one, first.start, ((0, rows),), 4, (1, 3)))
    assert session.answer.positions == [*begun, 20, 21, 22]


@pytest.mark.usefixtures("short_waits")
async def test_a_record_ends_with_what_came_behind_the_last_verdict() -> None:
    session = Session()
    session.go(session.generation.prefill(16), ())
    session.go(session.generation.prefill(4), (30,))
    plan = session.generation.next_window()
    window_id, _ = session.send(plan)
    session.judge(window_id, plan, (31,))
    session.features.detach()
    assert session.answer.ended_with is None
    session.arrive(window_id, plan)
    assert session.answer.ended_with == (*PROMPT, 30, 31)
    assert session.answer.positions == list(range(21))
    # Once only, and nothing after it.
    session.answer.ended_with = None
    await asyncio.sleep(0.08)
    assert session.answer.ended_with is None
    assert session.plug.sessions == {}


@pytest.mark.usefixtures("short_waits")
async def test_a_record_does_not_wait_long_and_not_for_a_lost_ring() -> None:
    session = Session()
    plan = session.generation.prefill(20)
    window_id, _ = session.send(plan)
    session.judge(window_id, plan, (30,))
    session.features.detach()
    assert session.answer.ended_with is None
    await asyncio.sleep(0.08)
    assert session.answer.ended_with == (*PROMPT, 30)
    session = Session()
    plan = session.generation.prefill(20)
    window_id, _ = session.send(plan)
    session.judge(window_id, plan, (30,))
    Streams.why_off = "the ring is lost"
    try:
        session.features.detach()
    finally:
        Streams.why_off = None
    assert session.answer.ended_with == (*PROMPT, 30)
