"""Clients that hang up before the end of an answer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from random import Random

# Of those that hang up in the middle of a stream: at once, before the first token, or right at the end. The
# others leave at some token between.
_AT_ONCE: Final = 0.2
_EARLY: Final = 0.35
_LATE: Final = 0.15
# From the way to the server to several chunks of a prompt.
_LEAST_S: Final = 0.0005
_EARLY_S: Final = 1.0
_WHOLE_S: Final = 4.0
# After a token, and after the last one.
_BETWEEN_S: Final = 0.03
_END_S: Final = 0.003


@dataclass(frozen=True)
class HangUpTime:
    """Moment at which a client closes its connection."""

    num_tokens: int
    """After so many tokens of the answer; 0 counts from the request's writing."""
    after_s: float
    """So long after that, seconds."""


@dataclass(frozen=True)
class HangUps:
    """Clients that do not wait for the end."""

    share: float
    """Of requests, 0 to 1."""
    seed: int
    """Seed of the random choices."""


NO_HANG_UPS: Final = HangUps(0.0, 0)


def draw_hang_up_time(
    random: Random, share: float, max_tokens: int, *, is_streamed: bool = True
) -> HangUpTime | None:
    """A moment for one request, or None if its client waits for the end.

    Times are drawn evenly over their orders of magnitude: what can go wrong within a millisecond and within a
    second is not the same.

    Args:
        random: Where it is drawn from; takes as many draws as it needs.
        share: Share of requests whose clients hang up, 0 to 1.
        max_tokens: Most tokens of the answer.
        is_streamed: Whether the client sees tokens arrive; otherwise only the time decides.
    """
    if random.random() >= share:
        return None
    kind = random.random()
    if kind < _AT_ONCE:
        return HangUpTime(0, 0.0)
    if not is_streamed:
        return HangUpTime(0, _over_magnitudes(random, _LEAST_S, _WHOLE_S))
    if kind < _AT_ONCE + _EARLY:
        return HangUpTime(0, _over_magnitudes(random, _LEAST_S, _EARLY_S))
    if kind < _AT_ONCE + _EARLY + _LATE:
        return HangUpTime(max_tokens, random.uniform(0.0, _END_S))
    return HangUpTime(random.randint(1, max_tokens), random.uniform(0.0, _BETWEEN_S))


def _over_magnitudes(random: Random, least: float, most: float) -> float:
    return float(least * (most / least) ** random.random())
