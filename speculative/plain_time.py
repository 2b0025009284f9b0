"""What a plain window takes, by how long its session's text is: attention reads all of it, each time.

A server answers short questions and long ones. Held against the time of short texts, a long one's windows
would all seem slow, and speculation be blamed for it.
"""

from __future__ import annotations

from typing import Final

from speculative.staircase import smoothed

_QUICKER_WEIGHT: Final = 0.3
_SLOWER_WEIGHT: Final = 0.06
# How many windows the slope remembers.
_SLOPE_MEMORY: Final = 512
# Positions closer together than this, in tokens, say little about the slope.
_NEAR_TOKENS: Final = 64.0
# Most of a window's time that may be owed to its position.
_MAX_SHARE: Final = 0.9


class PlainTime:
    """A line over positions, learned window by window. Shared by the sessions of a coordinator.

    Its slope comes from what the stages computed, so that a wire that changes does not pass for a text that
    grew; its height from whole windows. What disturbs a window makes it slower, never quicker, so quick ones
    count for more: taking plain windows for slow would make speculation seem to pay where it does not.

    Attributes:
        num_measured: Windows learned from.
    """

    def __init__(self) -> None:
        self.num_measured = 0
        self._base_ms = 0.0
        self._slope_ms = 0.0
        # Running means of positions and computing times, and how they vary together.
        self._position = 0.0
        self._computed_ms = 0.0
        self._covariance = 0.0
        self._variance = 0.0

    def add(self, position: int, elapsed_ms: float, computed_ms: float) -> None:
        """Learn from a plain window that nothing but chance disturbed.

        Args:
            position: Where it stood in its session's text, in tokens.
            elapsed_ms: From sending to verdict.
            computed_ms: What of this the stages computed.
        """
        self.num_measured += 1
        if self.num_measured == 1:
            self._base_ms, self._position, self._computed_ms = elapsed_ms, float(position), computed_ms
            return
        known_ms = self._base_ms + self._slope_ms * position
        self._learn_slope(position, computed_ms)
        weight = _QUICKER_WEIGHT if elapsed_ms < known_ms else _SLOWER_WEIGHT
        found_ms = smoothed(known_ms, elapsed_ms, weight)
        # A window at position 0 takes some time too, whatever noise says of the slope.
        self._slope_ms = min(self._slope_ms, _MAX_SHARE * found_ms / max(position, 1))
        # The line turns around where this window stands, so what was known there still holds.
        self._base_ms = found_ms - self._slope_ms * position

    def ms(self, position: int) -> float | None:
        """What a plain window takes there; None before anything was measured."""
        return self._base_ms + self._slope_ms * position if self.num_measured else None

    def _learn_slope(self, position: int, computed_ms: float) -> None:
        weight = 1.0 / min(self.num_measured, _SLOPE_MEMORY)
        off_position = position - self._position
        off_ms = min(computed_ms, 2.0 * self._computed_ms) - self._computed_ms
        self._position += weight * off_position
        self._computed_ms += weight * off_ms
        self._covariance = (1.0 - weight) * (self._covariance + weight * off_position * off_ms)
        self._variance = (1.0 - weight) * (self._variance + weight * off_position**2)
        self._slope_ms = max(0.0, self._covariance / (self._variance + _NEAR_TOKENS**2))
