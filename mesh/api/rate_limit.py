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
RESERVATION: Final = "spanmesh.visit"
# Not a model's name, which is never empty.
_COUNTING: Final = ""
# Of keys without a limit.
_MOST_COUNTING: Final = 32
# Rounding errors must refuse nothing: far less than one token, and than one second.
_EPSILON: Final = 1e-6


class TokenBucket:
    """Token bucket for a limit per minute; fills evenly; see RFC 2697 for the idea.

    An amount above the limit is let through when the bucket is full, and the bucket is then negative: no
    request is refused for good, and the limit holds over time.

    Args:
        per_minute: The limit, at least 1.
        now_s: Monotonic clock, seconds.
    """

    def __init__(self, per_minute: int, now_s: float) -> None:
        self.per_minute = per_minute
        self._level = float(per_minute)
        self._at_s = now_s

    def level(self, now_s: float) -> float:
        """Its level; negative after a larger amount."""
        filled = self._level + max(0.0, now_s - self._at_s) * self.per_minute / _MINUTE_S
        return min(filled, self.per_minute)

    def wait_s(self, amount: float, now_s: float) -> float:
        """Seconds until `amount` may be drawn, without other draws; 0 if it may be drawn now."""
        return self._seconds_to(min(amount, self.per_minute), now_s)

    def full_in_s(self, now_s: float) -> float:
        """Seconds until it is full."""
        return self._seconds_to(self.per_minute, now_s)

    def draw(self, amount: float, now_s: float) -> None:
        """Draw `amount`, whether or not it is there; a negative one puts it back."""
        self._level = min(self.level(now_s) - amount, self.per_minute)
        self._at_s = max(self._at_s, now_s)

    def _seconds_to(self, level: float, now_s: float) -> float:
        return max(0.0, level - self.level(now_s)) * _MINUTE_S / self.per_minute


class ConcurrencyLimit:
    """Concurrent answers of a key, and how long they took recently.

    Attributes:
        num_taken: Answers in progress.
    """

    def __init__(self) -> None:
        self.num_taken = 0
        self._most = 0
        self._hold_times = HoldTimes(1)

    def num_free(self, most: int) -> int:
        """Number of requests that may still begin.

        Args:
            most: Current limit.
        """
        if most != self._most:
            self._most, self._hold_times = most, HoldTimes(most)
        return max(0, most - self.num_taken)

    def release(self, held_s: float) -> None:
        """Record the end of an answer, and its duration."""
        self.num_taken -= 1
        self._hold_times.add(held_s)

    def retry_after_s(self) -> int:
        """Estimated whole seconds until one of them ends."""
        return self._hold_times.retry_after_s([1])


class KeyLimits:
    """State of one key's limits: requests and tokens per minute, and concurrent answers.

    Attributes:
        requests: Requests per minute, or None for no limit.
        tokens: Tokens per minute, or None for no limit.
    """

    def __init__(self) -> None:
        self.requests: TokenBucket | None = None
        self.tokens: TokenBucket | None = None
        self._limits: tuple[int | None, int | None] = (None, None)
        self._concurrency: dict[str | None, ConcurrencyLimit] = {}

    def update(self, record: KeyRecord, now_s: float) -> None:
        """Apply the key's current limits; buckets of changed limits begin anew."""
        requests, tokens = limits = (record.requests_per_minute, record.tokens_per_minute)
        if limits != self._limits:
            self._limits = limits
            self.requests = None if requests is None else TokenBucket(requests, now_s)
            self.tokens = None if tokens is None else TokenBucket(tokens, now_s)

    def places(self, model_id: str | None) -> ConcurrencyLimit:
        """Concurrent answers of the key for a model, or for all models (None) under one limit."""
        return self._concurrency.setdefault(model_id, ConcurrencyLimit())


class TokenReservation:
    """Tokens and concurrent answers reserved for one request of a key.

    Reserved when the request is admitted; places are given back as its answers end, the rest at its end.

    Args:
        record: Record of the key.
        limits: Limits of the key.
        now_s: Monotonic clock, seconds.
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
        self._counting_since_s: float | None = None

    def begin(self) -> None:
        """Count the request.

        Raises:
            RateLimited: If the key has reached its requests per minute.
        """
        self._draw(self._limits.requests, 1, "requests")

    def acquire(self, num_wanted: int, model_id: str, num_slots: int | None) -> int:
        """Reserve places for concurrent answers: at least one, fewer than wanted if need be.

        Args:
            num_wanted: Answers that could run at once, at least 1.
            model_id: Model name.
            num_slots: Concurrent answers of the model, or None if unknown.

        Returns:
            Number of answers that may run at once.

        Raises:
            RateLimited: If the key has reached its concurrent answers.
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
                f"the API key {self._name} may have {most} concurrent answers{whose} and has"
                f" {concurrency.num_taken}: try again in {seconds} s, or have it allowed more, by"
                " `concurrent=N` in its line of the key file, which `mesh keys add --concurrent N` writes",
                retry_after_s=seconds,
            )
        self._concurrency, self._num_places = concurrency, min(num_wanted, num_free)
        concurrency.num_taken += self._num_places
        self._since_s = self._now_s()
        return self._num_places

    def begin_counting(self) -> None:
        """Take a place for a request that has texts tokenized, and no answer generated, until it is over.

        A key has as many of these as places for answers, beside them: an agent counts while it is answered.

        Raises:
            RateLimited: If the key has taken all.
        """
        most = self._max_concurrent or _MOST_COUNTING
        places = self._limits.places(_COUNTING)
        if not places.num_free(most):
            seconds = places.retry_after_s()
            raise RateLimited(
                f"the API key {self._name} may have {most} requests at once that count tokens or make"
                f" vectors, and has {places.num_taken}: try again in {seconds} s, or have it allowed more, by"
                " `concurrent=N` in its line of the key file",
                retry_after_s=seconds,
            )
        places.num_taken += 1
        self._counting_since_s = self._now_s()

    def release(self, num_left: int) -> None:
        """Give back places that further answers do not need.

        Args:
            num_left: Answers that are not over.
        """
        while self._num_places > num_left:
            self._num_places -= 1
            self._concurrency.release(self._now_s() - self._since_s)

    def reserve(self, num_tokens: int) -> None:
        """Reserve the most tokens that the request may use: its prompt, and the longest answer allowed.

        Raises:
            RateLimited: If the key has too few tokens left for now.
        """
        self._draw(self._limits.tokens, num_tokens, "tokens")
        self._num_reserved += num_tokens

    def spend(self, num_tokens: int) -> None:
        """Record tokens that were computed for it."""
        self._num_spent += num_tokens

    def settle(self) -> None:
        """Give back unused tokens, and all places."""
        self.release(0)
        if self._counting_since_s is not None:
            self._limits.places(_COUNTING).release(self._now_s() - self._counting_since_s)
            self._counting_since_s = None
        if self._limits.tokens is not None:
            self._limits.tokens.draw(self._num_spent - self._num_reserved, self._now_s())
        self._num_reserved = self._num_spent = 0

    def headers(self) -> list[tuple[bytes, bytes]]:
        """Rest of the limits, in OpenAI's headers; empty where nothing is limited."""
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
    """Limits of all keys, kept between requests.

    Args:
        now_s: Monotonic clock, seconds.
    """

    def __init__(self, now_s: Callable[[], float]) -> None:
        self._now_s = now_s
        self._by_identity: dict[str, KeyLimits] = {}

    def reserve(self, record: KeyRecord) -> TokenReservation:
        """Reservation for a new request of a key."""
        limits = self._by_identity.setdefault(record.identity, KeyLimits())
        limits.update(record, self._now_s())
        return TokenReservation(record, limits, self._now_s)

    def forget(self, identities: Collection[str]) -> None:
        """Drop the limits of removed keys."""
        for identity in identities:
            self._by_identity.pop(identity, None)


def reservation_of(scope: Scope) -> TokenReservation | None:
    """Reservation of a request; None where the API is open."""
    found: TokenReservation | None = scope.get(RESERVATION)
    return found


def _duration(seconds: float) -> str:
    """`6m0s`, `59s`, as OpenAI writes them; rounded up."""
    minutes, rest = divmod(math.ceil(seconds), 60)
    return f"{minutes}m{rest}s" if minutes else f"{rest}s"
