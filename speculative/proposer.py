"""What every source of proposed tokens looks like."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from speculative.proposal import Proposal


class Proposer(Protocol):
    """Guesses the next tokens of one session.

    It hears of committed tokens only, each once and in order, so it never has anything to take back: a
    rejected proposal is simply not among them. Tokens proposed but not judged yet are named at each call.
    """

    @property
    def name(self) -> str:
        """Such as `ngram`: what its proposals are signed with."""

    def extend(self, tokens: Sequence[int]) -> None:
        """Take note of tokens that became part of the sequence: the prompt first, then each verdict's."""

    def propose(self, max_tokens: int, after: Sequence[int] = ()) -> Proposal:
        """Guess what follows the committed tokens and then `after`. Never blocks.

        Args:
            max_tokens: At most this many ids; 0 or fewer asks for none, and tells what is in flight.
            after: Tokens in flight: proposed before, not judged yet. In-step windows have none.

        Returns:
            Fewer ids, or none, where the proposer knows no better: a wrong guess costs a row at every stage.
        """

    def listen(self, on_ready: Callable[[], None]) -> None:
        """Name a function to call, from any thread, when a short or empty answer would now be longer.

        Proposers that answer at once have nothing to call it for.
        """

    def close(self) -> None:
        """Let go of everything that the session holds; it is not asked again."""
