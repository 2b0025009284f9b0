"""What an API key may use, and what one request of it has used. Pure but for the clock passed in."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Final

from mesh.api.token_bucket import TokenBucket
from spanmesh_proto.errors import RateLimited

if TYPE_CHECKING:
    from collections.abc import Callable

    from starlette.types import Scope

    from mesh.api.key_line import KeyRecord

VISIT: Final = "spanmesh.visit"
# Rounding must turn nobody away: far less than one token, and than one second.
_EPSILON: Final = 1e-6


class Allowance:
    """The buckets of one key: requests and tokens, each where it is limited."""

    def __init__(self, record: KeyRecord, now_s: float) -> None:
        requests, tokens = record.requests_per_minute, record.tokens_per_minute
        self.limits = (requests, tokens)
        self.requests = None if requests is None else TokenBucket(requests, now_s)
        self.tokens = None if tokens is None else TokenBucket(tokens, now_s)


class Visit:
    """One request on the account of its key. Tokens are reserved when it is admitted and settled at its end.

    Args:
        name: Of the key.
        allowance: Of the key.
        now_s: A steady clock, in seconds.
    """

    def __init__(self, name: str, allowance: Allowance, now_s: Callable[[], float]) -> None:
        self._name = name
        self._allowance = allowance
        self._now_s = now_s
        self._num_reserved = 0
        self._num_spent = 0

    def begin(self) -> None:
        """Count the request.

        Raises:
            RateLimited: If the key has had its requests of this minute.
        """
        self._draw(self._allowance.requests, 1, "requests")

    def reserve(self, num_tokens: int) -> None:
        """Set aside what the request may come to: its prompt, and the longest answer that it allows.

        Raises:
            RateLimited: If the key has too few tokens left for now.
        """
        self._draw(self._allowance.tokens, num_tokens, "tokens")
        self._num_reserved += num_tokens

    def spend(self, num_tokens: int) -> None:
        """Note what was computed for it."""
        self._num_spent += num_tokens

    def settle(self) -> None:
        """Give back what was reserved and not spent."""
        if self._allowance.tokens is not None:
            self._allowance.tokens.draw(self._num_spent - self._num_reserved, self._now_s())
        self._num_reserved = self._num_spent = 0

    def headers(self) -> list[tuple[bytes, bytes]]:
        """What is left, under the names that OpenAI's clients read; nothing where nothing is limited."""
        now_s = self._now_s()
        found: list[tuple[bytes, bytes]] = []
        buckets = (("requests", self._allowance.requests), ("tokens", self._allowance.tokens))
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


class Allowances:
    """Every key's, kept from request to request; one that is given other limits begins anew.

    Args:
        now_s: A steady clock, in seconds.
    """

    def __init__(self, now_s: Callable[[], float]) -> None:
        self._now_s = now_s
        self._by_name: dict[str, Allowance] = {}

    def visit(self, record: KeyRecord) -> Visit:
        """A new request of a key."""
        known = self._by_name.get(record.name)
        fresh = Allowance(record, self._now_s())
        if known is None or known.limits != fresh.limits:
            known = self._by_name[record.name] = fresh
        return Visit(record.name, known, self._now_s)


def visit_of(scope: Scope) -> Visit | None:
    """The account of a request; None where the API is open."""
    found: Visit | None = scope.get(VISIT)
    return found


def _duration(seconds: float) -> str:
    """`6m0s`, `59s`, as OpenAI writes them; rounded up."""
    minutes, rest = divmod(math.ceil(seconds), 60)
    return f"{minutes}m{rest}s" if minutes else f"{rest}s"
