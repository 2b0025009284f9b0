"""Text that goes in circles: any proposer predicts it, so it flatters them all. Pure."""

from __future__ import annotations

from typing import Final

# Characters, not words or tokens: the same for every script and every tokenizer.
_GRAM_CHARS: Final = 16
_LIMIT: Final = 0.4


def repeated_share(text: str) -> float:
    """Share of the text's 16-character spans that occurred before in it, in [0, 1].

    The measure is seq-rep-n of Welleck et al., Neural Text Generation With Unlikelihood Training (2020), on
    characters instead of tokens. A line that is said over and over comes near 1; ordinary prose, code and
    JSON stay below 0.2.
    """
    num_grams = len(text) - _GRAM_CHARS + 1
    if num_grams < 1:
        return 0.0
    return 1 - len({text[start : start + _GRAM_CHARS] for start in range(num_grams)}) / num_grams


def is_degenerate(text: str) -> bool:
    """Whether the text repeats itself for 40 % of its length or more."""
    return repeated_share(text) >= _LIMIT
