"""Gumbel-max over a row of logits: the candidate whose clock rings first wins."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np

from stages.noise import BLOCK_SIZE, block_rings, ring_times

if TYPE_CHECKING:
    from numpy.typing import NDArray

# Scores that can win lie within some hundred of zero, where float64 and its logarithm err by less than 1e-12.
_ROUNDING_SLACK: Final = 1e-9


def race_among(key: int, ids: NDArray[np.int64], scaled: NDArray[np.float64]) -> int:
    """The winner among candidates, each one's noise read.

    Args:
        key: From `stages.noise.position_key`.
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
        key: From `stages.noise.position_key`.
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
