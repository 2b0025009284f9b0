"""Rate limits by API key: token buckets and reservations."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Final

from mesh.coordinator.request_queue import HoldTimes
from spanmesh_proto.errors import RateLimited

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    from starlette.types import Scope

    from mesh.api.api_keys import KeyRecord


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


RESERVATION: Final = "spanmesh.visit"
# Rounding must turn nobody away: far less than one token, and than one second.
_EPSILON: Final = 1e-6


class ConcurrencyLimit:
    """How many answers of a key may be under way at once, how many are, and how long they took lately.

    Attributes:
        num_taken: Answers under way.
    """

    def __init__(self) -> None:
        self.num_taken = 0
        self._most = 0
        self._hold_times = HoldTimes(1)

    def num_free(self, most: int) -> int:
        """How many more may be.

        Args:
            most: At once, as of now.
        """
        if most != self._most:
            self._most, self._hold_times = most, HoldTimes(most)
        return max(0, most - self.num_taken)

    def release(self, held_s: float) -> None:
        """One is over after so long."""
        self.num_taken -= 1
        self._hold_times.add(held_s)

    def retry_after_s(self) -> int:
        """Whole seconds until one of them is over."""
        return self._hold_times.retry_after_s(1)


class KeyLimits:
    """What one key has left: requests and tokens, each where it is limited, and answers at once.

    Attributes:
        requests: Of this minute, or None for no limit.
        tokens: Likewise.
    """

    def __init__(self) -> None:
        self.requests: TokenBucket | None = None
        self.tokens: TokenBucket | None = None
        self._limits: tuple[int | None, int | None] = (None, None)
        self._concurrency: dict[str | None, ConcurrencyLimit] = {}

    def update(self, record: KeyRecord, now_s: float) -> None:
        """Take the limits that the key has now; where they are others than before, buckets begin anew."""
        requests, tokens = limits = (record.requests_per_minute, record.tokens_per_minute)
        if limits != self._limits:
            self._limits = limits
            self.requests = None if requests is None else TokenBucket(requests, now_s)
            self.tokens = None if tokens is None else TokenBucket(tokens, now_s)

    def places(self, model_id: str | None) -> ConcurrencyLimit:
        """Those of the key at a model, or where one number counts for all models, by None."""
        return self._concurrency.setdefault(model_id, ConcurrencyLimit())


class TokenReservation:
    """One request on the account of its key.

    Tokens and places are reserved when it is admitted. Places are given back as its answers end, all that is
    left at its end.

    Args:
        record: Of the key.
        limits: Of the key.
        now_s: A steady clock, in seconds.
    """

    def __init__(self, record: KeyRecord, limits: KeyLimits, now_s: Callable[[], float]) -> None:
        self._name = record.name
        self._max_concurrent = record.max_concurrent
        self._limits = limits
        self._now_s = now_s
        self._num_reserved = 0
        self._num_spent = 0
        self._concurrency = ConcurrencyLimit()
        self._num_places = 0
        self._since_s = 0.0

    def begin(self) -> None:
        """Count the request.

        Raises:
            RateLimited: If the key has had its requests of this minute.
        """
        self._draw(self._limits.requests, 1, "requests")

    def acquire(self, num_wanted: int, model_id: str, num_slots: int | None) -> int:
        """Take places for answers that are to be made at once: one at least, fewer than wanted if need be.

        Args:
            num_wanted: Answers that could be made at once, at least 1.
            model_id: Who makes them.
            num_slots: How many the model makes at once, or None if that is not known.

        Returns:
            How many may be made at once.

        Raises:
            RateLimited: If the key has as many under way as it may have.
        """
        most = self._max_concurrent
        is_default = most is None
        if most is None:
            if num_slots is None:
                return num_wanted
            most = max(1, num_slots - 1)
        concurrency = self._limits.places(model_id if is_default else None)
        num_free = concurrency.num_free(most)
        if not num_free:
            seconds = concurrency.retry_after_s()
            whose = f" (every slot of {model_id} but one)" if is_default and most > 1 else ""
            raise RateLimited(
                f"the API key {self._name} may have {most} answers under way at once{whose} and has"
                f" {concurrency.num_taken}: try again in {seconds} s, or have it allowed more, by"
                " `concurrent=N` in its line of the key file, which `mesh keys add --concurrent N` writes",
                retry_after_s=seconds,
            )
        self._concurrency, self._num_places = concurrency, min(num_wanted, num_free)
        concurrency.num_taken += self._num_places
        self._since_s = self._now_s()
        return self._num_places

    def release(self, num_left: int) -> None:
        """Give back the places that answers still to come do not need.

        Args:
            num_left: Answers that are not over.
        """
        while self._num_places > num_left:
            self._num_places -= 1
            self._concurrency.release(self._now_s() - self._since_s)

    def reserve(self, num_tokens: int) -> None:
        """Set aside what the request may come to: its prompt, and the longest answer that it allows.

        Raises:
            RateLimited: If the key has too few tokens left for now.
        """
        self._draw(self._limits.tokens, num_tokens, "tokens")
        self._num_reserved += num_tokens

    def spend(self, num_tokens: int) -> None:
        """Note what was computed for it."""
        self._num_spent += num_tokens

    def settle(self) -> None:
        """Give back what was reserved and not spent, and all places."""
        self.release(0)
        if self._limits.tokens is not None:
            self._limits.tokens.draw(self._num_spent - self._num_reserved, self._now_s())
        self._num_reserved = self._num_spent = 0

    def headers(self) -> list[tuple[bytes, bytes]]:
        """What is left, under the names that OpenAI's clients read; nothing where nothing is limited."""
        now_s = self._now_s()
        found: list[tuple[bytes, bytes]] = []
        buckets = (("requests", self._limits.requests), ("tokens", self._limits.tokens))
        for what, bucket in buckets:
            if bucket is not None:
                values = {
                    "limit": str(bucket.per_minute),
                    "remaining": str(max(0, math.floor(bucket.level(now_s) + _EPSILON))),
                    "reset": _duration(bucket.full_in_s(now_s)),
                }
                found += [
                    (f"x-ratelimit-{name}-{what}".encode(), value.encode()) for name, value in values.items()
                ]
        return found

    def _draw(self, bucket: TokenBucket | None, amount: int, what: str) -> None:
        if bucket is None:
            return
        now_s = self._now_s()
        wait_s = bucket.wait_s(amount, now_s)
        if wait_s > _EPSILON:
            seconds = math.ceil(wait_s)
            raise RateLimited(
                f"the API key {self._name} may use {bucket.per_minute} {what} a minute, and this request may"
                f" use {amount}: try again in {seconds} s",
                retry_after_s=seconds,
            )
        bucket.draw(amount, now_s)


class RateLimits:
    """Every key's, kept from request to request.

    Args:
        now_s: A steady clock, in seconds.
    """

    def __init__(self, now_s: Callable[[], float]) -> None:
        self._now_s = now_s
        self._by_identity: dict[str, KeyLimits] = {}

    def reserve(self, record: KeyRecord) -> TokenReservation:
        """A new request of a key."""
        limits = self._by_identity.setdefault(record.identity, KeyLimits())
        limits.update(record, self._now_s())
        return TokenReservation(record, limits, self._now_s)

    def forget(self, identities: Collection[str]) -> None:
        """Let go of what keys had that were removed."""
        for identity in identities:
            self._by_identity.pop(identity, None)


def reservation_of(scope: Scope) -> TokenReservation | None:
    """The account of a request; None where the API is open."""
    found: TokenReservation | None = scope.get(RESERVATION)
    return found


def _duration(seconds: float) -> str:
    """`6m0s`, `59s`, as OpenAI writes them; rounded up."""
    minutes, rest = divmod(math.ceil(seconds), 60)
    return f"{minutes}m{rest}s" if minutes else f"{rest}s"
