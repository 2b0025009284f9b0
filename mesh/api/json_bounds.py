"""How many values a JSON text holds, found out in far less time than parsing it takes.

A parser makes an object for each value: two mebibytes of nested brackets hold up all other answers for most
of a second. Text, however long, is one value, and costs next to nothing.
"""

from __future__ import annotations

from typing import Final

_LEAST_VALUES: Final = 16384
_VALUES_PER_POSITION: Final = 4
_MOST_VALUES: Final = 2**18


def max_values(context_length: int) -> int:
    """Values of the largest body that is parsed: a full context as token ids, and ample fields beside."""
    return min(_LEAST_VALUES + _VALUES_PER_POSITION * context_length, _MOST_VALUES)


def has_at_most(data: bytes, most: int) -> bool:
    """Whether a JSON text has no more than about so many values and containers.

    Args:
        data: The text; it need not be JSON.
        most: An array of so many numbers still passes.
    """
    if _count(data) <= most:
        return True
    # Commas and brackets in strings do not count. What is escaped goes first, so that every quote that is
    # left begins or ends a string.
    bare = data.replace(b"\\\\", b"").replace(b'\\"', b"")
    if bare.count(b'"') > 4 * most:
        return False
    return _count(b"".join(bare.split(b'"')[::2])) <= most


def _count(data: bytes) -> int:
    return data.count(b",") + data.count(b"[") + data.count(b"{")
