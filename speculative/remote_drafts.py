"""Remote drafts: proposals of tokens that an assistant beside the target's last stage has drafted.

It drafts behind each verdict, while the next windows are on their way already. What of its draft agrees with
committed tokens and those in flight goes on behind them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from speculative.cost_model import DraftCost, smoothed
from speculative.proposer import EMPTY, Draft, DrafterKind, Proposal

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from speculative.proposer import Replace


class RemoteDrafter:
    """What all sessions know of an assistant, and its options.

    Args:
        draft_max: Most tokens of a draft.
        draft_min: Fewest that are proposed, unless fewer are asked for.
        p_min: A token less likely than this, by the assistant's own estimate, ends what is proposed.

    Attributes:
        draft_max: As given.
        draft_min: As given.
        p_min: As given.
    """

    def __init__(self, draft_max: int, *, draft_min: int = 1, p_min: float = 0.0) -> None:
        self.draft_max = draft_max
        self.draft_min = draft_min
        self.p_min = p_min
        self._ms_per_token: float | None = None

    @property
    def cost(self) -> DraftCost | None:
        """What it costs, as the last stage measures it; None before the first draft."""
        ms = self._ms_per_token
        return None if ms is None else DraftCost(ms, row_ms=ms, is_at_tail=True)

    def note(self, ms_per_token: float) -> None:
        """Record the time of a drafted token, in ms."""
        self._ms_per_token = smoothed(self._ms_per_token, ms_per_token)


class RemoteDraftProposer:
    """Proposer of the latest draft; see `speculative.proposer.Proposer` and `DraftReader`.

    Args:
        drafter: The assistant.
        replace: For benchmarks: what is proposed instead of what was drafted, after as much computing.

    Attributes:
        num_drafted: Most tokens of a draft.
    """

    name = DrafterKind.ASSISTANT.proposer

    def __init__(self, drafter: RemoteDrafter, replace: Replace | None = None) -> None:
        self.num_drafted = drafter.draft_max
        self._drafter = drafter
        self._replace = replace
        self._tokens: list[int] = []
        self._draft: Draft | None = None
        self._on_ready: Callable[[], None] | None = None

    @property
    def draft_cost(self) -> DraftCost | None:
        """What the assistant costs, as measured over all sessions."""
        return self._drafter.cost

    def extend(self, tokens: Sequence[int]) -> None:
        """Note committed tokens."""
        self._tokens.extend(tokens)

    def take_draft(self, draft: Draft) -> None:
        """Propose from this draft from now on."""
        self._draft = draft
        if draft.tokens:
            self._drafter.note(draft.ms_per_token)
        if draft.tokens and self._on_ready is not None:
            self._on_ready()

    def propose(self, max_tokens: int, after: Sequence[int] = ()) -> Proposal:
        """What of the draft goes on behind the committed tokens and `after`, if it agrees with them."""
        draft = self._draft
        if draft is None or max_tokens < 1:
            return EMPTY
        num_known = len(self._tokens) + len(after) - draft.start
        if self._replace is not None and num_known >= 0:
            draft = self._replaced(draft, after, self._replace)
        known = (*self._tokens[draft.start :], *after)[-num_known:] if num_known > 0 else ()
        if num_known < 0 or draft.tokens[:num_known] != known:
            return EMPTY
        stop = next(
            (
                index
                for index, confidence in enumerate(draft.confidences)
                if index >= num_known and confidence < self._drafter.p_min
            ),
            len(draft.tokens),
        )
        if stop - num_known < min(self._drafter.draft_min, max_tokens):
            return EMPTY
        proposal = Proposal(draft.tokens[num_known:stop], draft.confidences[num_known:stop], self.name)
        return proposal.first(max_tokens)

    def _replaced(self, draft: Draft, after: Sequence[int], replace: Replace) -> Draft:
        text = (*self._tokens, *after)[: draft.start]
        tokens, confidences = replace(text, len(draft.tokens))
        return Draft(draft.start, tuple(tokens), tuple(confidences), draft.ms_per_token)

    def listen(self, on_ready: Callable[[], None]) -> None:
        """Set the function to be called when a draft has come."""
        self._on_ready = on_ready

    def close(self) -> None:
        """No effect: it holds no resources."""
