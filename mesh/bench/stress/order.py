"""What the asking process is told to do, and what it reports. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mesh.bench.stress.told import Told


@dataclass(frozen=True)
class Order:
    """A load for one server.

    Attributes:
        port: Of the server, on the asking host's loopback.
        ids: Of the chats.
        bodies: Of each chat, its requests as JSON.
        num_at_once: Requests under way in a closed loop.
        num_requests: After so many no more is sent; None sets no such end.
        duration_s: After so long no more is sent; None sets no such end.
        arrivals_s: Instead of a closed loop: when the first request of each chat is sent.
        timeout_s: A request that takes longer has failed.
    """

    port: int
    ids: tuple[str, ...]
    bodies: tuple[tuple[str, ...], ...]
    num_at_once: int = 1
    num_requests: int | None = None
    duration_s: float | None = None
    arrivals_s: tuple[float, ...] | None = None
    timeout_s: float = 300.0


@dataclass(frozen=True)
class Outcome:
    """What came of an order.

    Attributes:
        told: One for each request that was sent, in the order sent.
        duration_s: From the first request to the end of the last answer.
    """

    told: tuple[Told, ...]
    duration_s: float

    @property
    def tokens_per_s(self) -> float:
        """Answered tokens a second, of all requests together."""
        return sum(one.record.num_output_tokens for one in self.told) / self.duration_s
