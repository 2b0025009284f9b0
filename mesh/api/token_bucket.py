"""A share of something per minute. Pure."""

from __future__ import annotations

from typing import Final

_MINUTE_S: Final = 60.0


class TokenBucket:
    """Holds a minute's share, fills evenly, and is drawn from; see RFC 2697 for the idea.

    What costs more than a minute's share is let through when the bucket is full, and the bucket then owes:
    nothing is shut out for good, and over time the share holds all the same.

    Args:
        per_minute: The share, at least 1.
        now_s: A steady clock, in seconds.
    """

    def __init__(self, per_minute: int, now_s: float) -> None:
        self.per_minute = per_minute
        self._level = float(per_minute)
        self._at_s = now_s

    def level(self, now_s: float) -> float:
        """What is in it; less than nothing while it owes."""
        filled = self._level + max(0.0, now_s - self._at_s) * self.per_minute / _MINUTE_S
        return min(filled, self.per_minute)

    def wait_s(self, amount: float, now_s: float) -> float:
        """Seconds until `amount` may be drawn, if nobody else draws; 0 if it may be now."""
        return self._seconds_to(min(amount, self.per_minute), now_s)

    def full_in_s(self, now_s: float) -> float:
        """Seconds until it is full."""
        return self._seconds_to(self.per_minute, now_s)

    def draw(self, amount: float, now_s: float) -> None:
        """Take `amount` out, whether or not it is there; less than nothing puts it back."""
        self._level = min(self.level(now_s) - amount, self.per_minute)
        self._at_s = max(self._at_s, now_s)

    def _seconds_to(self, level: float, now_s: float) -> float:
        return max(0.0, level - self.level(now_s)) * _MINUTE_S / self.per_minute
