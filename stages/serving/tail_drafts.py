"""Drafts of the tail: what an assistant foretells behind verdicts, sent once these have left.

Nothing waits for it but the tail's next batch. Errors of an assistant cost drafts, and nothing else.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import structlog

from spanmesh_proto import windows_pb2 as wire
from spanmesh_proto.errors import MeshError
from stages.runtime.assistant import DraftStart
from stages.serving.plugs import StagePlug

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray

    from stages.runtime.assistant import Assistant
    from stages.runtime.stage_runtime import StageRuntime
    from stages.sampling.verifier import WindowVerifier
    from stages.serving.plugs import StageAccess
    from stages.serving.scheduler import QueuedWindow

log = structlog.get_logger()


class _Wanted(NamedTuple):
    window: QueuedWindow
    start: DraftStart


class _Judged(NamedTuple):
    """The latest verdict of a slot."""

    verifier: WindowVerifier
    """Of its session: ids begin again with each coordinator."""
    epoch: int
    """Of its window."""
    position: int
    """Of its last token."""
    token: int
    """The last token."""


class TailDrafts(StagePlug):
    """Drafts behind the verdicts on windows that ask for them.

    Args:
        runtime: The loaded tail.
        assistant: The assistant beside it, or why it could not be loaded.
    """

    def __init__(self, runtime: StageRuntime, assistant: Assistant | MeshError) -> None:
        self._runtime = runtime
        self._assistant = None if isinstance(assistant, MeshError) else assistant
        self._why_off = assistant.message if isinstance(assistant, MeshError) else ""
        self._head_state = runtime.info.n_layers
        self._wanted: list[_Wanted] = []
        # For each slot its latest draft, with the verifier of the session, and its latest verdict.
        self._latest: dict[int, tuple[WindowVerifier, wire.Draft]] = {}
        self._judged: dict[int, _Judged] = {}
        self._stage: StageAccess
        self._send: Callable[[wire.VerdictBundle], None]

    def attach(self, stage: StageAccess) -> None:
        """Send drafts from the event loop from now on."""
        self._stage = stage
        self._send = stage.from_worker(stage.answer)

    def count(self, stats: wire.StageStats) -> None:
        """Tell why it does not draft, if it does not."""
        stats.drafts_off = self._why_off

    def voids(self, window: QueuedWindow) -> bool:
        """Whether a window was sent before a verdict was known that makes it void.

        What a draft dropped from the slot it may lack, and its failure would be the session's. A draft behind
        it would be of no use.
        """
        judged, span = self._judged.get(window.span.slot), window.span
        if judged is None or judged.verifier is not window.verifier or window.epoch > judged.epoch:
            return False
        is_next = span.start == judged.position
        return span.start > judged.position or (is_next and span.tokens[0] != judged.token)

    def outlasts(self, window: QueuedWindow) -> bool:
        """Whether a draft follows: in the event loop the verdict would leave behind it."""
        return self._assistant is not None and window.message.num_drafts > 0

    def taps(self, windows: Sequence[QueuedWindow]) -> bool:
        """Whether a window of a batch asks for drafts, which begin with its head state."""
        self._wanted.clear()
        if self._assistant is None or not any(window.message.num_drafts for window in windows):
            return False
        # Drafters on the coordinator set other layers, and none at their end.
        self._runtime.tap_features((self._head_state,))
        return True

    def verified(self, window: QueuedWindow, verdict: wire.Verdict) -> None:
        """Note where a draft begins: with the verdict's last token."""
        message, span = window.message, window.to_compute
        if not verdict.tokens or window.scored_next is not None:
            return
        row = len(span.tokens) - span.num_outputs + len(verdict.tokens) - 1
        position = span.start + row + 1
        self._judged[span.slot] = _Judged(window.verifier, window.epoch, position, verdict.tokens[-1])
        if self._assistant is None or not message.num_drafts:
            return
        states = self._runtime.features(span.slot)
        if not states or states[-1] is None:
            self._give_up("the model's graph gives no head state")
            return
        if message.drafts_on_rejection and self._has_foretold(window, position, verdict.tokens[-1]):
            return
        # More than a window takes are of no use.
        num_tokens = min(message.num_drafts, self._runtime.max_rows)
        start = DraftStart(span.slot, position, verdict.tokens[-1], states[-1][row], num_tokens)
        self._wanted.append(_Wanted(window, start))

    def handed_on(self) -> None:
        """Draft behind the verdicts, which have left."""
        wanted, self._wanted = self._wanted, []
        if self._assistant is None or not wanted:
            return
        texts = [[each.start.token] for each in wanted]
        confidences: list[list[float]] = [[] for _ in wanted]

        def draw(index: int, _count: int, logits: NDArray[np.float32]) -> int | None:
            verifier, start = wanted[index].window.verifier, wanted[index].start
            try:
                token = verifier.foretell(logits, texts[index], start.position)
            except MeshError:  # the grammar ends here
                return None
            texts[index].append(token)
            confidences[index].append(_probability(logits, token))
            return token

        begun_ns = time.perf_counter_ns()
        try:
            for each in wanted:
                self._stage.slots.trim(each.start.slot, each.start.position)
            self._assistant.draft([each.start for each in wanted], draw)
        except Exception as error:  # noqa: BLE001 - whatever it is, verdicts go on
            self._give_up(error.message if isinstance(error, MeshError) else repr(error))
            return
        elapsed_us = (time.perf_counter_ns() - begun_ns) // 1000
        token_us = elapsed_us // max(1, *(len(text) - 1 for text in texts))
        drafts = [
            wire.Draft(
                session=each.window.session,
                window_id=each.window.id,
                start=each.start.position + 1,
                tokens=text[1:],
                confidences=own,
                token_us=token_us,
            )
            for each, text, own in zip(wanted, texts, confidences, strict=True)
        ]
        for each, draft in zip(wanted, drafts, strict=True):
            self._latest[each.start.slot] = each.window.verifier, draft
        self._send(wire.VerdictBundle(drafts=drafts))

    def _has_foretold(self, window: QueuedWindow, position: int, token: int) -> bool:
        """Whether the latest draft of a window's session has a token at a position."""
        verifier, draft = self._latest.get(window.span.slot, (None, wire.Draft()))
        place = position - draft.start
        return verifier is window.verifier and 0 <= place < len(draft.tokens) and draft.tokens[place] == token

    def _give_up(self, reason: str) -> None:
        log.warning("assistant_failed", reason=reason)
        self._assistant, self._why_off = None, reason


def _probability(logits: NDArray[np.float32], token: int) -> float:
    """The probability of a token, by logits that may exclude some."""
    shares = np.exp(logits - logits.max())
    return float(shares[token] / shares.sum())
