"""Texts for the simulated ring, by how well they can be foreseen."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.support.ring_simulator import Text

if TYPE_CHECKING:
    import random

NUM_POSITIONS = 200


def drafted(rng: random.Random, acceptance: float) -> Text:
    """A draft model whose confidences are honest, and vary as a real one's do."""
    sure = [rng.betavariate(2.5 * acceptance, 2.5 * (1 - acceptance)) for _ in range(NUM_POSITIONS)]
    return Text(drafts=[(chance, rng.random() < chance) for chance in sure])


def boasted(rng: random.Random, confidence: float, acceptance: float) -> Text:
    """A draft model that is always as sure, and right at another rate."""
    return Text(drafts=[(confidence, rng.random() < acceptance) for _ in range(NUM_POSITIONS)])


def alternating(right: int, wrong: int) -> Text:
    """A draft model that is right for a while, then wrong for a while, and sure all the time."""
    return Text(drafts=[(0.95, place % (right + wrong) < right) for place in range(NUM_POSITIONS)])


def collapsing(num_right: int) -> Text:
    """A draft model that is right at first and then never again, and sure all the time."""
    return Text(drafts=[(0.95, place < num_right) for place in range(NUM_POSITIONS)])


def looked_up(rng: random.Random, share: float, acceptance: float, length: int) -> Text:
    """Free look-ups that begin at some of the positions, go on as far as they go, and are honest."""
    lookups: list[tuple[tuple[float, ...], int]] = []
    while len(lookups) < NUM_POSITIONS:
        if rng.random() >= share:
            lookups.append(((), 0))
            continue
        num_right = 0
        while num_right < length and rng.random() < acceptance:
            num_right += 1
        num_until_wrong = num_right + (num_right < length)
        lookups += [((acceptance,) * (length - done), num_right - done) for done in range(num_until_wrong)]
    return Text(lookups=lookups)


def known(length: int) -> Text:
    """A recorded answer, told again."""
    return Text(lookups=[((1.0,) * length, length)] * NUM_POSITIONS)


def mistaken(length: int, num_right: int) -> Text:
    """Look-ups that are sure of themselves and soon wrong."""
    return Text(lookups=[((0.9,) * length, num_right)] * NUM_POSITIONS)
