"""Ranges of code points as sequences of byte ranges.

A range is split where the length of its encoding changes and where its continuation bytes would not all
range freely, so that each part is a plain product of byte ranges, as in RE2 and in Rust's utf8-ranges.
Surrogates have no encoding and are left out.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

MAX_CODE_POINT: Final = 0x10FFFF
_SURROGATES: Final = (0xD800, 0xDFFF)
# The last code point of each length of encoding.
_LAST_OF_LENGTH: Final = (0x7F, 0x7FF, 0xFFFF, MAX_CODE_POINT)

ByteRange = tuple[int, int]
CodeRange = tuple[int, int]


def merged(ranges: Iterable[CodeRange]) -> tuple[CodeRange, ...]:
    """The same code points as few disjoint ranges, ascending."""
    out: list[CodeRange] = []
    for low, high in sorted(ranges):
        if out and low <= out[-1][1] + 1:
            out[-1] = (out[-1][0], max(out[-1][1], high))
        else:
            out.append((low, high))
    return tuple(out)


def complement(ranges: Iterable[CodeRange]) -> tuple[CodeRange, ...]:
    """All other code points."""
    out: list[CodeRange] = []
    start = 0
    for low, high in merged(ranges):
        if start < low:
            out.append((start, low - 1))
        start = high + 1
    if start <= MAX_CODE_POINT:
        out.append((start, MAX_CODE_POINT))
    return tuple(out)


def byte_sequences(ranges: Iterable[CodeRange]) -> list[tuple[ByteRange, ...]]:
    """How the code points of `ranges` are written in UTF-8.

    Returns:
        Sequences of 1 to 4 byte ranges; a text of one code point matches exactly one of them.
    """
    return [sequence for low, high in merged(ranges) for sequence in _sequences(low, high)]


def _sequences(low: int, high: int) -> Iterator[tuple[ByteRange, ...]]:
    if low > high:
        return
    if low <= _SURROGATES[1] and high >= _SURROGATES[0]:
        yield from _sequences(low, min(high, _SURROGATES[0] - 1))
        yield from _sequences(max(low, _SURROGATES[1] + 1), high)
        return
    for last in _LAST_OF_LENGTH:
        if low <= last < high:
            yield from _sequences(low, last)
            yield from _sequences(last + 1, high)
            return
    yield from _of_one_length(low, high)


def _of_one_length(low: int, high: int) -> Iterator[tuple[ByteRange, ...]]:
    for bits in (6, 12, 18):
        rest = (1 << bits) - 1
        if high <= 0x7F or low & ~rest == high & ~rest:
            break
        # The lower bits must range freely where the higher ones differ.
        if low & rest:
            yield from _of_one_length(low, low | rest)
            yield from _of_one_length((low | rest) + 1, high)
            return
        if high & rest != rest:
            yield from _of_one_length(low, (high & ~rest) - 1)
            yield from _of_one_length(high & ~rest, high)
            return
    yield tuple(zip(chr(low).encode(), chr(high).encode(), strict=True))
