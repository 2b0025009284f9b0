"""Drafts of the tail for a session's proposer: asked for with windows, taken from the stream of verdicts."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import structlog

from mesh.coordinator.plugs import Plug, RingPlug, SessionPlug
from mesh.status import TailDraftStatus
from speculative.proposer import Draft

if TYPE_CHECKING:
    from mesh.coordinator.generation import Generation, InFlightWindow, WindowPlan
    from mesh.coordinator.plugs import NewRing
    from mesh.coordinator.ring import Ring
    from mesh.coordinator.speculation import Speculator
    from mesh.status import MeshStatus
    from spanmesh_proto import windows_pb2 as wire

log = structlog.get_logger()


class _Asked(NamedTuple):
    num_tokens: int
    """Most tokens of the draft."""
    on_rejection: bool
    """Whether it is made only if the latest one is wrong."""


class TailDraftPlug(Plug):
    """Drafts of all sessions.

    Attributes:
        sessions: Sessions that may ask for drafts, by id.
        n_vocab: Number of token ids; set with each ring.
    """

    def __init__(self) -> None:
        self.sessions: dict[int, SessionDrafts] = {}
        self.n_vocab = 0
        self._ring: Ring | None = None
        self._refusal: str | None = None
        self._num_drafts = 0
        self._num_tokens = 0

    @property
    def why_off(self) -> str | None:
        """Why no drafts come in this ring; None while they do, or while the tail has not told yet."""
        told = None if self._ring is None else self._ring.latest_stats[-1]
        if self._refusal is not None or told is None:
            return self._refusal
        if not told.HasField("drafts_off"):
            return "the last stage has no assistant"
        return told.drafts_off or None

    def in_ring(self, new: NewRing) -> TailDraftRing:
        """Drafts of a new ring, whose tail may be another."""
        self.n_vocab = new.options.n_vocab
        self._ring, self._refusal = new.ring, None
        return TailDraftRing(self)

    def in_session(self, generation: Generation, speculator: Speculator | None) -> SessionDrafts | None:
        """Drafts of a new session; None if it proposes nothing."""
        return None if speculator is None else SessionDrafts(self, generation, speculator)

    def describe(self, status: MeshStatus) -> None:
        """Add the drafts so far, and why none come any more."""
        if status.speculation is not None:
            status.speculation.tail_drafts = TailDraftStatus(
                drafts=self._num_drafts, tokens=self._num_tokens, off=self.why_off
            )

    def take(self, draft: wire.Draft) -> None:
        """Pass a draft on to its session, unless that has ended; a draft that cannot be is the last one."""
        session = self.sessions.get(draft.session)
        if session is None or self._refusal is not None:
            return
        if (reason := session.refusal(draft)) is None:
            self._num_drafts += 1
            self._num_tokens += len(draft.tokens)
            session.take(draft)
        else:
            self._refusal = reason
            log.warning("drafts_refused", session=draft.session, reason=reason)


class TailDraftRing(RingPlug):
    """Drafts that come in one ring."""

    def __init__(self, plug: TailDraftPlug) -> None:
        self._plug = plug

    def received(self, bundle: wire.VerdictBundle) -> None:
        """Pass on the drafts of a message."""
        for draft in bundle.drafts:
            try:
                self._plug.take(draft)
            except Exception:
                # They come on the stream of verdicts, which serves all sessions.
                log.exception("draft_failed", session=draft.session)


class SessionDrafts(SessionPlug):
    """Drafts of one session.

    Args:
        plug: Drafts of all sessions.
        generation: State machine of the request.
        speculator: Reader of the drafts.
    """

    def __init__(self, plug: TailDraftPlug, generation: Generation, speculator: Speculator) -> None:
        self._plug = plug
        self._generation = generation
        self._speculator = speculator
        self._id: int | None = None
        # What each window has asked for.
        self._asked: dict[int, _Asked] = {}
        # The latest draft that was passed on.
        self._latest: Draft | None = None
        # The window whose draft is on its way; None if none is.
        self._awaited: int | None = None

    def attach(self, session: int, *, is_elsewhere: bool) -> None:
        """Ask for drafts from now on; those of the session's former windows are lost."""
        del is_elsewhere
        self.detach()
        self._id = session
        self._plug.sessions[session] = self

    def detach(self) -> None:
        """Take no more drafts."""
        self._asked.clear()
        self._awaited = self._latest = None
        if self._id is not None:
            self._plug.sessions.pop(self._id, None)

    def sending(self, window_id: int, plan: WindowPlan, message: wire.Window) -> None:
        """Ask for a draft behind a window.

        While a draft is on its way, a plain window asks for another only in case that one is wrong: what is
        right of it is proposed behind this window, which a second draft would hold up at the tail.
        """
        if plan.num_verified and plan.scored_next is None and self._plug.why_off is None:
            num_drafts = min(self._speculator.num_drafted, max(0, self._generation.room))
            if num_drafts:
                is_ahead = self._awaited is not None and not plan.proposal.tokens
                message.num_drafts, message.drafts_on_rejection = num_drafts, is_ahead
                self._asked[window_id] = _Asked(num_drafts, is_ahead)

    def judged(self, in_flight: InFlightWindow, verdict: wire.Verdict) -> None:
        """Await the draft behind a verdict whose window has asked for one."""
        asked, window = self._asked.get(in_flight.id), in_flight.window
        position = window.start + len(window.tokens) - window.num_verified + len(verdict.tokens)
        is_coming = asked is not None and not (asked.on_rejection and self._is_drafted(position, verdict))
        self._awaited = in_flight.id if is_coming else None
        # Drafts come in the order of verdicts.
        self._asked = {each: most for each, most in self._asked.items() if each >= in_flight.id}

    def voided(self) -> None:
        """Forget windows without a verdict."""
        self._asked = {each: most for each, most in self._asked.items() if each == self._awaited}

    def refusal(self, draft: wire.Draft) -> str | None:
        """Why a draft cannot be of the tail; None if it can."""
        asked = self._asked.get(draft.window_id)
        if asked is not None and len(draft.tokens) > asked.num_tokens:
            return f"the tail drafted {len(draft.tokens)} tokens, and was asked for {asked.num_tokens}"
        if len(draft.confidences) != len(draft.tokens):
            return f"the tail drafted {len(draft.tokens)} tokens with {len(draft.confidences)} confidences"
        stray = next((token for token in draft.tokens if token >= self._plug.n_vocab), None)
        if stray is not None:
            return f"the tail drafted token {stray}, outside the vocabulary of {self._plug.n_vocab}"
        if not all(0.0 <= confidence <= 1.0 for confidence in draft.confidences):
            return "the tail drafted with confidences outside 0 to 1"
        return None

    def take(self, draft: wire.Draft) -> None:
        """Pass a draft on; one that is not asked for any more is dropped."""
        if self._asked.pop(draft.window_id, None) is None:
            return
        if self._awaited == draft.window_id:
            self._awaited = None
        self._latest = Draft(
            draft.start, tuple(draft.tokens), tuple(draft.confidences), draft.token_us / 1000
        )
        self._speculator.take_draft(self._latest)

    def _is_drafted(self, position: int, verdict: wire.Verdict) -> bool:
        """Whether the latest draft has the last token of a verdict, at this position."""
        latest = self._latest
        if latest is None or not verdict.tokens or position < latest.start:
            return False
        return latest.tokens[position - latest.start :][:1] == (verdict.tokens[-1],)
