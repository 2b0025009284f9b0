"""Shapes of texts that tokenizers, templates and parsers find hard; pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from random import Random

# A tokenizer splits a text by classes of characters before it merges: one run is one word of any length.
RUNS: Final[Mapping[str, str]] = {
    "letters": "a",
    "capitals": "Z",
    "digits": "1",
    "symbols": "!",
    "dashes": "-",
    "apostrophes": "'",
    "blanks": " ",
    "tabs": "\t",
    "line breaks": "\n",
    "carriage returns": "\r\n",
    "ideographs": "中",
    "full stops": "。",
    "kana": "あ",
    "accents": "é",
    "combining marks": "e\u0301\u0302\u0323",
    "emoji": "🙂",
    "joined emoji": "\U0001f9d1\u200d\U0001f680",
    "no characters": "\u200b",
    "NULs": "\0",
}
_MARKS: Final = ("<|im_start|>", "<|im_end|>", "<|endoftext|>", "</s>", "<s>")
_WORDS: Final = ("the ", "of ", "a ", "tokenizer ", "is\n", "12 ", "naïve ", "中文", "don't ", "x=y; ")


@dataclass(frozen=True)
class HostileText:
    """A text and its name."""

    shape: str
    """Such as `capitals`."""
    text: str
    """May hold NULs, and halves of surrogate pairs, which UTF-8 cannot encode."""


def run_of(name: str, num_chars: int) -> str:
    """A run of one class of characters.

    Args:
        name: One of `RUNS`.
        num_chars: Its length.
    """
    return _repeated(RUNS[name], num_chars)


def hostile_text(random: Random, num_chars: int, marks: Sequence[str] = _MARKS) -> HostileText:
    """A text of one of the shapes: half of them are runs.

    Args:
        random: Decides.
        num_chars: Its length.
        marks: Names of control tokens.
    """
    if random.random() < 0.5:
        name = random.choice(tuple(RUNS))
        return HostileText(name, run_of(name, num_chars))
    shape, make = random.choice(tuple(_SHAPES.items()))
    return HostileText(shape, make(random, num_chars, marks)[:num_chars])


def _repeated(text: str, num_chars: int) -> str:
    return (text * (num_chars // len(text) + 1))[:num_chars]


def _marks(random: Random, num_chars: int, marks: Sequence[str]) -> str:
    return _repeated(f"{random.choice(marks)}a{random.choice(marks)}", num_chars)


def _cut_marks(random: Random, num_chars: int, marks: Sequence[str]) -> str:
    return _repeated(random.choice(marks)[:-1], num_chars)


def _half_surrogates(random: Random, num_chars: int, _marks: Sequence[str]) -> str:
    # A high half before a low one would be a whole character once JSON was read.
    return _repeated(random.choice(("\ud800", "\udc00", "a\udfff")), num_chars)


def _mixed(random: Random, num_chars: int, marks: Sequence[str]) -> str:
    """Up to fifty runs and marks, one behind the other."""
    num_pieces = random.randint(2, 50)
    pieces = [
        random.choice(marks)
        if random.random() < 0.2
        else run_of(random.choice(tuple(RUNS)), random.randint(1, max(2 * num_chars // num_pieces, 1)))
        for _ in range(num_pieces)
    ]
    return "".join(pieces)


def _words(random: Random, num_chars: int, _marks: Sequence[str]) -> str:
    return _repeated("".join(random.choices(_WORDS, k=500)), num_chars)


def _hexadecimal(random: Random, num_chars: int, _marks: Sequence[str]) -> str:
    return _repeated("".join(random.choices("0123456789abcdef", k=5000)), num_chars)


def _any_characters(random: Random, num_chars: int, _marks: Sequence[str]) -> str:
    """Characters of all of Unicode but the halves of surrogate pairs."""
    points = (random.randrange(0x20, 0xD800), random.randrange(0xE000, 0x110000))
    sample = [chr(random.choice(points) ^ random.randrange(0x20)) for _ in range(2000)]
    return _repeated("".join(sample), num_chars)


_SHAPES: Final[Mapping[str, Callable[[Random, int, Sequence[str]], str]]] = {
    "marks": _marks,
    "marks without their ends": _cut_marks,
    "half surrogates": _half_surrogates,
    "mixed": _mixed,
    "words": _words,
    "hexadecimal digits": _hexadecimal,
    "any characters": _any_characters,
}
