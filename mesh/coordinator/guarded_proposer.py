"""A proposer that can do no harm: whatever it does wrong, the answer goes on."""

from __future__ import annotations

import operator
from typing import TYPE_CHECKING

import structlog

from speculative.proposer import EMPTY, Proposal

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from speculative.proposer import Proposer

log = structlog.get_logger()


class GuardedProposer:
    """Passes on what a proposer says until it raises or names a token that does not exist.

    From then on it proposes nothing for this session, and one warning says why. See
    `speculative.proposer.Proposer`.

    Args:
        proposer: Not trusted.
        n_vocab: Token ids are below this.
        session: Whose proposer it is, for the warning.
    """

    def __init__(self, proposer: Proposer, *, n_vocab: int, session: int) -> None:
        self.name = proposer.name
        self._proposer = proposer
        self._n_vocab = n_vocab
        self._session = session
        self._is_off = False

    @property
    def draft_ms_per_token(self) -> float | None:
        """What a token costs a proposer that computes; None for others."""
        return getattr(self._proposer, "draft_ms_per_token", None)

    def extend(self, tokens: Sequence[int]) -> None:
        """See `Proposer.extend`."""
        if not self._is_off:
            try:
                self._proposer.extend(tokens)
            except Exception as error:  # noqa: BLE001 - whatever it is, the answer goes on
                self._switch_off(repr(error))

    def propose(self, max_tokens: int, after: Sequence[int] = ()) -> Proposal:
        """See `Proposer.propose`."""
        if self._is_off:
            return EMPTY
        try:
            proposal = self._proposer.propose(max_tokens, after).first(max_tokens)
            tokens = tuple(map(operator.index, proposal.tokens))
            confidences = tuple(map(float, proposal.confidences))
        except Exception as error:  # noqa: BLE001
            self._switch_off(repr(error))
            return EMPTY
        stray = next((token for token in tokens if not 0 <= token < self._n_vocab), None)
        if stray is not None:
            self._switch_off(f"it proposed token {stray}, which is outside the vocabulary of {self._n_vocab}")
            return EMPTY
        if len(confidences) != len(tokens):
            self._switch_off(f"it proposed {len(tokens)} tokens with {len(confidences)} confidences")
            return EMPTY
        return Proposal(tokens, confidences, proposal.proposer)

    def listen(self, on_ready: Callable[[], None]) -> None:
        """See `Proposer.listen`."""
        try:
            self._proposer.listen(on_ready)
        except Exception as error:  # noqa: BLE001
            self._switch_off(repr(error))

    def close(self) -> None:
        """See `Proposer.close`."""
        try:
            self._proposer.close()
        except Exception as error:  # noqa: BLE001
            self._switch_off(repr(error))

    def _switch_off(self, reason: str) -> None:
        if not self._is_off:
            self._is_off = True
            log.warning("proposer_switched_off", proposer=self.name, session=self._session, reason=reason)
