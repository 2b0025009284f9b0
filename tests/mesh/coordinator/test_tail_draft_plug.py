"""Which windows ask the tail for drafts, and which drafts are passed on."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

from mesh.coordinator.generation import InFlightWindow, WindowPlan
from mesh.coordinator.tail_draft_plug import SessionDrafts, TailDraftPlug, TailDraftRing
from mesh.status import MeshStatus, SpeculationStatus, TailDraftStatus
from spanmesh_proto import windows_pb2 as wire
from speculative.proposer import Draft, Proposal

PLAIN = WindowPlan(9, (5,), 1)
PROPOSING = WindowPlan(10, (6, 7), 2, Proposal((6, 7), (0.5, 0.5), "assistant"))


@dataclass
class Reader:
    """What a session's speculator has for drafts."""

    num_drafted: int = 4
    drafts: list[Draft] = field(default_factory=list)

    def take_draft(self, draft: Draft) -> None:
        self.drafts.append(draft)


class Session:
    """Drafts of one session, without the session."""

    def __init__(self, room: int = 100) -> None:
        self.plug = TailDraftPlug()
        # What the tail tells of itself.
        self.told: list[wire.StageStats | None] = [None]
        self.ring: TailDraftRing
        self.renew()
        self.reader = Reader()
        # Whether the last window asked for a draft in case only.
        self.is_conditional = False
        generation: Any = SimpleNamespace(room=room)
        speculator: Any = self.reader
        drafts = self.plug.in_session(generation, speculator)
        assert drafts is not None
        self.drafts: SessionDrafts = drafts
        self.drafts.attach(7, is_elsewhere=False)

    def renew(self) -> None:
        """Another ring."""
        ring = SimpleNamespace(latest_stats=self.told)
        new: Any = SimpleNamespace(options=SimpleNamespace(n_vocab=64), ring=ring)
        self.ring = self.plug.in_ring(new)

    def asked(self, window_id: int, plan: WindowPlan) -> int:
        message = wire.Window()
        self.drafts.sending(window_id, plan, message)
        self.is_conditional = message.drafts_on_rejection
        return message.num_drafts

    def judged(self, window_id: int, plan: WindowPlan = PLAIN, *tokens: int) -> None:
        self.drafts.judged(InFlightWindow(window_id, plan, 0.0, 0), wire.Verdict(tokens=tokens))

    def come(self, window_id: int, *tokens: int, session: int = 7, start: int = 10) -> None:
        draft = wire.Draft(
            session=session,
            window_id=window_id,
            start=start,
            tokens=tokens,
            confidences=[0.5] * len(tokens),
            token_us=1500,
        )
        self.ring.received(wire.VerdictBundle(drafts=[draft]))


def test_a_plain_window_asks_only_in_case_that_a_draft_on_its_way_is_wrong() -> None:
    session = Session()
    assert session.asked(0, PLAIN) == 4
    assert not session.is_conditional
    session.judged(0)
    # It stands at the position of the newest token, and foretells the next one.
    assert session.asked(1, PLAIN) == 4
    assert session.is_conditional
    session.come(0, 6, 7)
    assert session.reader.drafts == [Draft(10, (6, 7), (0.5, 0.5), 1.5)]
    assert session.asked(2, PROPOSING) == 4
    assert not session.is_conditional
    # The draft was right: no other is on its way.
    session.judged(1, PLAIN, 6)
    assert session.asked(3, PLAIN) == 4
    assert not session.is_conditional
    session.judged(2, PROPOSING, 7, 8)
    assert session.asked(4, PLAIN) == 4
    assert session.is_conditional


@pytest.mark.parametrize(("token", "start"), [(5, 10), (6, 11), (6, 8)])
def test_one_that_was_wrong_is_followed_by_another(token: int, start: int) -> None:
    session = Session()
    session.asked(0, PLAIN)
    session.judged(0)
    session.asked(1, PLAIN)
    session.come(0, 6, 7, start=start)
    session.judged(1, PLAIN, token)
    assert session.asked(2, PLAIN) == 4
    assert session.is_conditional
    session.come(1, 8, start=11)
    assert session.reader.drafts[-1].tokens == (8,)


def test_a_window_that_samples_nothing_asks_for_none() -> None:
    session = Session()
    assert session.asked(0, WindowPlan(0, (5, 6), 0, is_prompt=True)) == 0
    assert session.asked(1, WindowPlan(0, (5, 6), 2, is_prompt=True, scored_next=7)) == 0
    assert session.asked(2, WindowPlan(0, (5, 6), 1, is_prompt=True)) == 4


def test_no_more_is_asked_for_than_is_of_use() -> None:
    assert Session(room=2).asked(0, PLAIN) == 2
    assert Session(room=-1).asked(0, PLAIN) == 0
    session = Session()
    session.reader.num_drafted = 0
    assert session.asked(0, PLAIN) == 0


def test_drafts_of_other_windows_sessions_and_rings_are_dropped() -> None:
    session = Session()
    session.asked(0, PLAIN)
    session.asked(1, PROPOSING)
    session.come(5, 6)
    session.come(0, 6, session=8)
    # The first was rejected: the second one's draft is behind tokens that are void.
    session.judged(0)
    session.drafts.voided()
    session.come(1, 6)
    assert session.reader.drafts == []
    session.come(0, 6)
    session.come(0, 7)
    assert [draft.tokens for draft in session.reader.drafts] == [(6,)]
    session.asked(2, PLAIN)
    session.drafts.attach(9, is_elsewhere=True)
    session.come(2, 6)
    session.come(2, 6, session=9)
    session.drafts.detach()
    assert session.plug.sessions == {}
    assert len(session.reader.drafts) == 1
    assert session.plug.why_off is None


def test_one_that_cannot_be_ends_drafting_in_its_ring() -> None:
    session = Session()
    session.asked(0, PLAIN)
    session.come(0, 6, 64)
    assert session.plug.why_off == "the tail drafted token 64, outside the vocabulary of 64"
    session.come(0, 6)
    assert session.reader.drafts == []
    assert session.asked(1, PLAIN) == 0
    session.renew()
    assert session.asked(2, PLAIN) == 4
    session.come(2, 6, 7)
    status = MeshStatus(speculation=SpeculationStatus())
    session.plug.describe(status)
    assert status.speculation is not None
    assert status.speculation.tail_drafts == TailDraftStatus(drafts=1, tokens=2)


@pytest.mark.parametrize(
    ("told", "reason"),
    [
        (None, None),
        (wire.StageStats(drafts_off=""), None),
        (wire.StageStats(drafts_off="no memory"), "no memory"),
        (wire.StageStats(), "the last stage has no assistant"),
    ],
)
def test_none_is_asked_for_where_the_tail_tells_that_it_does_not_draft(
    told: wire.StageStats | None, reason: str | None
) -> None:
    session = Session()
    session.told[:] = [told]
    assert (session.asked(0, PLAIN) == 0) == (reason is not None)
    status = MeshStatus(speculation=SpeculationStatus())
    session.plug.describe(status)
    assert status.speculation is not None
    assert status.speculation.tail_drafts == TailDraftStatus(off=reason)


@pytest.mark.parametrize("confidence", [-0.1, 1.5, float("nan"), float("inf")])
def test_confidences_are_shares(confidence: float) -> None:
    session = Session()
    session.asked(0, PLAIN)
    draft = wire.Draft(session=7, window_id=0, start=10, tokens=[6], confidences=[confidence])
    session.ring.received(wire.VerdictBundle(drafts=[draft]))
    assert session.plug.why_off == "the tail drafted with confidences outside 0 to 1"


def test_a_session_that_proposes_nothing_has_no_drafts() -> None:
    generation: Any = None
    assert TailDraftPlug().in_session(generation, None) is None
