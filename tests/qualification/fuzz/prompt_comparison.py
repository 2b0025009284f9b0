"""Comparison of a prompt with what was sent: marks that clients forged, and words that were hidden; pure.

A conversation is put to a template twice: with marks, such as names of control tokens, in its texts, and
with a harmless word in place of each. Only the template may make control tokens, so both must have the
same ones at the same places. Places are told by *anchors*, words that occur once in a conversation.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from random import Random

_ANCHOR: Final = re.compile(r"qz[a-y]{6}z")
_LETTERS: Final = "abcdefghijklmnoprstuvwxy"


@dataclass(frozen=True)
class Piece:
    """What one token of a prompt stands for."""

    data: bytes
    """Its bytes, part of a UTF-8 sequence at times; the name of a control token."""
    is_control: bool
    """Whether it is a control token."""


def anchor(random: Random) -> str:
    """A word that no template, no vocabulary and no other text has."""
    return f"qz{''.join(random.choices(_LETTERS, k=6))}z"


def anchors_in(text: str) -> tuple[str, ...]:
    """Anchors of a text, in order."""
    return tuple(_ANCHOR.findall(text))


def skeleton(pieces: Iterable[Piece]) -> tuple[str, ...]:
    """Control tokens and anchors of a prompt, in order; control tokens in brackets `⟨…⟩`."""
    found: list[str] = []
    text = bytearray()
    for piece in pieces:
        if piece.is_control:
            found += anchors_in(text.decode(errors="replace"))
            text.clear()
            found.append(f"⟨{piece.data.decode(errors='replace')}⟩")
        else:
            text += piece.data
    return (*found, *anchors_in(text.decode(errors="replace")))


def forged(marked: Sequence[str], harmless: Sequence[str]) -> str | None:
    """The first difference between the skeletons of a conversation with marks and without.

    Args:
        marked: Skeleton of the one with marks.
        harmless: Skeleton of the one with words in place of them.

    Returns:
        What differs, with what stands before it; None if they are the same.
    """
    for place, (found, expected) in enumerate(zip(marked, harmless, strict=False)):
        if found != expected:
            return f"after {' '.join(marked[max(place - 3, 0) : place])}: {found} in place of {expected}"
    if len(marked) == len(harmless):
        return None
    longer = max(marked, harmless, key=len)
    rest = " ".join(longer[min(len(marked), len(harmless)) :][:3])
    return f"{'more' if len(marked) > len(harmless) else 'less'} at the end: {rest}"


def hidden(texts: Iterable[Sequence[str]], shown: Sequence[str]) -> str | None:
    """The first word that was sent and is not shown, or only in another order.

    Args:
        texts: Anchors of each text, or row of texts, whose words must be shown in this order.
        shown: Skeleton of the prompt.

    Returns:
        What is missing; None if nothing is.
    """
    for text in texts:
        rest = iter(shown)
        for word in text:
            if word not in rest:
                how = "is shown in another order" if word in shown else "is not in the prompt"
                return f"{word}, word {text.index(word) + 1} of {len(text)}, {how}"
    return None
