"""Ways to damage bytes. Pure: the generator that is handed in decides."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from random import Random

# Lengths and counts that readers trip over, as little-endian numbers of 1, 2, 4 and 8 bytes.
_ODD_NUMBERS: Final = tuple(
    number.to_bytes(width, "little")
    for width in (1, 2, 4, 8)
    for number in (0, 1, 2 ** (8 * width - 1) - 1, 2 ** (8 * width - 1), 2 ** (8 * width) - 1)
)
_MOST_BYTES: Final = 64


def damaged(data: bytes, random: Random) -> bytes:
    """`data` after one to four accidents: bits flipped, bytes changed, lost, doubled, or the end cut off.

    Args:
        data: Any bytes.
        random: Decides.
    """
    wreck = bytearray(data)
    for _ in range(random.choice((1, 1, 1, 2, 4))):
        random.choice((_flip, _overwrite, _insert, _lose, _double, _cut))(wreck, random)
    return bytes(wreck)


def _flip(wreck: bytearray, random: Random) -> None:
    if wreck:
        wreck[random.randrange(len(wreck))] ^= 1 << random.randrange(8)


def _overwrite(wreck: bytearray, random: Random) -> None:
    new = random.choice((random.randbytes(random.randint(1, 8)), random.choice(_ODD_NUMBERS)))
    at = random.randint(0, len(wreck))
    wreck[at : at + len(new)] = new


def _insert(wreck: bytearray, random: Random) -> None:
    at = random.randint(0, len(wreck))
    wreck[at:at] = random.choice((random.randbytes(random.randint(1, 8)), random.choice(_ODD_NUMBERS)))


def _lose(wreck: bytearray, random: Random) -> None:
    at = random.randint(0, len(wreck))
    del wreck[at : at + random.randint(1, _MOST_BYTES)]


def _double(wreck: bytearray, random: Random) -> None:
    at = random.randint(0, len(wreck))
    wreck[at:at] = wreck[at : at + random.randint(1, _MOST_BYTES)]


def _cut(wreck: bytearray, random: Random) -> None:
    del wreck[random.randint(0, len(wreck)) :]
