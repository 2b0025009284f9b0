"""What every source of proposed tokens looks like."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Sequence


class Proposer(Protocol):
    """Guesses the next tokens of one session.

    It hears of committed tokens only, each once and in order, so it never has anything to take back: a
    rejected proposal is simply not among them. Tokens proposed but not judged yet are named at each call.
    """

    def extend(self, tokens: Sequence[int]) -> None:
        """Take note of tokens that became part of the sequence: the prompt first, then each verdict's."""

    def propose(self, max_tokens: int, after: Sequence[int] = ()) -> list[int]:
        """Guess what follows the committed tokens and then `after`.

        Args:
            max_tokens: At most this many ids; 0 or fewer asks for none.
            after: Tokens in flight: proposed before, not judged yet. In-step windows have none.

        Returns:
            Fewer ids, or none, where the proposer knows no better: a wrong guess costs a row at every stage.
        """
