"""Gumbel-max sampling with counter-based noise.

Gumbel-max sampling (Gumbel 1954; Maddison et al., "A* Sampling", 2014) picks the id with the largest `log w
+ G`, where `G = -log E` and `E` is exponential with rate 1: the token whose clock `E / w` rings first. Here
`E` is a pure function of (seed, position, id), so a draw needs no state, does not depend on which other ids
are candidates, and comes out the same whatever was proposed and however often the row is computed again:
sampling that is invariant to the drafter (Daliri et al., "Coupling without Communication and Drafter-
Invariant Speculative Decoding", 2024).

The clocks of 256 neighbouring ids form a block. The first of `n` such clocks to ring is exponential with
rate `n` and is any of them with equal chance; given that time, what the others still have to wait is again
exponential with rate 1, because an exponential has no memory. So a block is drawn top down: its first ring,
which id rings then, and for every other id a wait of its own on top. All ids remain independent and
exponential with rate 1, but one hash now bounds 256 of them from below: `stages.sampling.gumbel` skips most
of a vocabulary by it and still finds the exact winner.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

BLOCK_SIZE: Final = 256
"""Ids per block: a power of two, so that a block is the id without its low bits."""
_BLOCK_BITS: Final = BLOCK_SIZE.bit_length() - 1
_MASK_64: Final = (1 << 64) - 1
# SplitMix64 (Steele, Lea, Flood 2014): a Weyl sequence of this odd step, through a finaliser of these two.
_STEP: Final = 0x9E3779B97F4A7C15
_MULTIPLIER_1: Final = 0xBF58476D1CE4E5B9
_MULTIPLIER_2: Final = 0x94D049BB133111EB
# Block counters start above every id, so a block and an id never share a word.
_FIRST_BLOCK_COUNTER: Final = 1 << 32
# Scores that can win lie within some hundred of zero, where float64 and its logarithm err by less than 1e-12.
_ROUNDING_SLACK: Final = 1e-9


class BlockRings(NamedTuple):
    """The first ring of each block."""

    times: NDArray[np.float64]
    """float64, shape (n,): no id of the block rings earlier."""
    first: NDArray[np.int64]
    """int64, shape (n,): the id that rings then; it may lie beyond the vocabulary."""


def position_key(seed: int, position: int) -> int:
    """The 64-bit key of all noise at one absolute position of one session."""
    return _word(_word(seed, 0), position)


def block_rings(key: int, blocks: NDArray[np.int64]) -> BlockRings:
    """When, and by which id, each of `blocks` rings first.

    Args:
        key: From `position_key`.
        blocks: int64, shape (n,): ids divided by `BLOCK_SIZE`.
    """
    words = _words(key, blocks + _FIRST_BLOCK_COUNTER)
    # The low bits choose the id, the high 52 the time: one word gives both, independently.
    first = (blocks << _BLOCK_BITS) + (words & np.uint64(BLOCK_SIZE - 1)).astype(np.int64)
    return BlockRings(_exponential(words) / BLOCK_SIZE, first)


def ring_times(key: int, ids: NDArray[np.int64]) -> NDArray[np.float64]:
    """The clock `E` of each id: independent over ids, exponential with rate 1, never zero.

    Args:
        key: From `position_key`.
        ids: int64, shape (n,), any order.
    """
    block = block_rings(key, ids >> _BLOCK_BITS)
    return block.times + np.where(block.first == ids, 0.0, _exponential(_words(key, ids)))


def _word(key: int, counter: int) -> int:
    """Word number `counter` of the SplitMix64 sequence that starts at `key`."""
    word = (key + (counter + 1) * _STEP) & _MASK_64
    word = ((word ^ (word >> 30)) * _MULTIPLIER_1) & _MASK_64
    word = ((word ^ (word >> 27)) * _MULTIPLIER_2) & _MASK_64
    return word ^ (word >> 31)


def _words(key: int, counters: NDArray[np.int64]) -> NDArray[np.uint64]:
    """`_word` for many counters at once, uint64; arrays wrap around by themselves."""
    words = (counters.astype(np.uint64) + np.uint64(1)) * np.uint64(_STEP) + np.uint64(key)
    words = (words ^ (words >> np.uint64(30))) * np.uint64(_MULTIPLIER_1)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(_MULTIPLIER_2)
    return words ^ (words >> np.uint64(31))


def _exponential(words: NDArray[np.uint64]) -> NDArray[np.float64]:
    """Exponential variates of rate 1 from the high 52 bits, by inversion.

    The uniform is the middle of one of 2**52 equal cells: neither 0 nor 1, and exact in float64.
    """
    uniform = ((words >> np.uint64(12)).astype(np.float64) + 0.5) * 2.0**-52
    return -np.log(uniform)


def race_among(key: int, ids: NDArray[np.int64], scaled: NDArray[np.float64]) -> int:
    """The winner among candidates, each one's noise read.

    Args:
        key: From `stages.sampling.gumbel.position_key`.
        ids: int64, shape (n,), ascending.
        scaled: float64, shape (n,): `(logit - largest logit) / temperature` of each.

    Returns:
        The id with the largest `scaled - log E`; the lowest on a tie.
    """
    return int(ids[np.argmax(scaled - np.log(ring_times(key, ids)))])


def race_all(key: int, logits: NDArray[np.float32], peak: float, temperature: float) -> int:
    """The winner among a whole vocabulary: as `race_among` all its ids, but reading little of the noise.

    In each block, score two ids: the one with the largest logit, and the one that rings first. The winner
    scores no less than the best of these. No id scores more than its logit with its block's first ring, so
    whatever stays below even so is dropped unread, and what is left races in full.

    Args:
        key: From `stages.sampling.gumbel.position_key`.
        logits: float32, shape (n_vocab,); minus infinity takes an id out of the race.
        peak: The largest of them.
        temperature: Above 0.
    """
    n_blocks = -(-logits.size // BLOCK_SIZE)
    padded = np.full(n_blocks * BLOCK_SIZE, -np.inf, dtype=np.float32)
    padded[: logits.size] = logits
    table = padded.reshape(n_blocks, BLOCK_SIZE)

    blocks = np.arange(n_blocks)
    rings = block_rings(key, blocks)
    bonuses = -np.log(rings.times)
    likeliest = blocks * BLOCK_SIZE + table.argmax(axis=1)
    least = max(
        np.max(_scale(padded[likeliest], peak, temperature) - np.log(ring_times(key, likeliest))),
        np.max(_scale(padded[rings.first], peak, temperature) + bonuses),
    )
    # The logit that each block's ids need; one float32 down outweighs all rounding on the way there.
    needed = peak + (least - _ROUNDING_SLACK - bonuses) * temperature
    needed = np.nextafter(needed.astype(np.float32), np.float32(-np.inf))
    able = np.flatnonzero(table >= needed[:, np.newaxis])
    return race_among(key, able, _scale(padded[able], peak, temperature))


def _scale(logits: NDArray[np.float32], peak: float, temperature: float) -> NDArray[np.float64]:
    return (logits.astype(np.float64) - peak) / temperature
