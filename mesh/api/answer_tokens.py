"""Which tokens of an answer belong to the text that was passed on, for clients that want logprobs.

Text may be held back, because it could become a stop string or because a character is not complete, and some
of it is never passed on. A token follows the first character that it had a part in: it appears with that
character, and not at all if that is cut off. Tokens that share a character appear together.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mesh.text.detokenizer import AnswerText
    from stages.sampling.logprobs import TokenLogprobs


@dataclass(frozen=True)
class AnswerToken:
    """A token whose text is part of the answer.

    Attributes:
        id: Token id.
        offset: Characters of the answer before it.
        logprobs: How likely it was, and what else was likely.
    """

    id: int
    offset: int
    logprobs: TokenLogprobs


class AnswerTokens:
    """Holds tokens back for as long as their text is.

    Args:
        text: The answer's; each token goes to it first.
    """

    def __init__(self, text: AnswerText) -> None:
        self._text = text
        self._waiting: deque[AnswerToken] = deque()

    def push(self, token: AnswerToken) -> None:
        """Take a token that has just gone to the text; its offset is what had been decoded before."""
        self._waiting.append(token)

    def settle(self) -> tuple[AnswerToken, ...]:
        """The tokens whose text has been passed on since the last call."""
        settled = []
        text = self._text
        while self._waiting and (
            self._waiting[0].offset < text.num_passed
            # Tokens that add no text, such as control tokens, go with what is before them.
            or (self._waiting[0].offset == text.num_passed == text.num_decoded and not text.is_in_character)
        ):
            settled.append(self._waiting.popleft())
        return tuple(settled)
