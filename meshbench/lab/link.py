"""Link of the lab: delay, jitter, loss and bandwidth of one direction between two hosts.

Lost packets are really lost: the hosts' kernels notice and send them again, as between real hosts, and what
follows them in a stream waits meanwhile.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Callable

# One router process serves every link of the lab; 64 MiB is 20 ms at 25 Gbit/s, more than it can forward.
CAPACITY_BYTES: Final = 64 << 20
# Of a link with limited bandwidth: what routers hold for as long at most; and for a few of the lab's packets.
_MOST_QUEUED_S: Final = 0.2
_LEAST_CAPACITY_BYTES: Final = 512 << 10


@dataclass(frozen=True)
class LinkConditions:
    """Conditions of a link, in both directions alike.

    Raises:
        ValueError: If a value is out of its range.
    """

    delay_ms: float = 0.0
    """One-way delay."""
    jitter_ms: float = 0.0
    """Longest further delay; each packet's is between 0 and this, all as likely. Packets keep their order."""
    loss: float = 0.0
    """Share of packets that are lost, 0 to 1."""
    mbit_per_s: float | None = None
    """Bandwidth, in 10^6 bits a second; None for no limit."""

    def __post_init__(self) -> None:
        if self.delay_ms < 0.0 or self.jitter_ms < 0.0:
            raise ValueError(f"delay {self.delay_ms} ms and jitter {self.jitter_ms} ms must be 0 or more")
        if not 0.0 <= self.loss < 1.0:
            raise ValueError(f"a loss of {self.loss} must be 0 or more and less than 1")
        if self.mbit_per_s is not None and self.mbit_per_s <= 0.0:
            raise ValueError(f"a bandwidth of {self.mbit_per_s} Mbit/s must be more than 0")

    @property
    def is_ideal(self) -> bool:
        """Whether there is a delay at most."""
        return self.jitter_ms == 0.0 and self.loss == 0.0 and self.mbit_per_s is None

    def __str__(self) -> str:
        """For reports: `5 ms, 2 ms jitter, 0.1 % loss, 100 Mbit/s`."""
        parts = [f"{self.delay_ms:g} ms"]
        if self.jitter_ms:
            parts.append(f"{self.jitter_ms:g} ms jitter")
        if self.loss:
            parts.append(f"{self.loss:.2%} loss".replace("%", " %"))
        if self.mbit_per_s is not None:
            parts.append(f"{self.mbit_per_s:g} Mbit/s")
        return ", ".join(parts)


class Link:
    """Packets in flight in one direction. The caller passes the time.

    Like a router's buffer it is bounded, and a packet that does not fit is dropped, as senders expect of a
    real link. Packets never overtake one another, not even when the delay shrinks while some are in flight.

    Args:
        conditions: Conditions; may be changed for later packets.
        draw: Random numbers, from 0 up to 1.
        capacity_bytes: Bound on the size of all packets in flight.
    """

    def __init__(
        self, conditions: LinkConditions, draw: Callable[[], float], capacity_bytes: int = CAPACITY_BYTES
    ) -> None:
        self.conditions = conditions
        self._draw = draw
        self._capacity_bytes = capacity_bytes
        self._packets: deque[tuple[int, bytes]] = deque()
        self._queued_bytes = 0
        self._latest_due_ns = 0
        # When the sender has sent all packets before.
        self._free_ns = 0.0
        self._num_dropped = 0

    def __len__(self) -> int:
        """Number of packets in flight."""
        return len(self._packets)

    @property
    def num_dropped(self) -> int:
        """Number of packets lost or dropped so far."""
        return self._num_dropped

    @property
    def next_due_ns(self) -> int | None:
        """When the next packet is due, or None without packets."""
        return self._packets[0][0] if self._packets else None

    def push(self, packet: bytes, now_ns: int) -> bool:
        """Add a packet; False if it was dropped or is lost."""
        conditions = self.conditions
        if self._queued_bytes + len(packet) > self._room_bytes(conditions):
            self._num_dropped += 1
            return False
        sent_ns: float = now_ns
        if conditions.mbit_per_s is not None:
            sent_ns = max(now_ns, self._free_ns) + 8e3 * len(packet) / conditions.mbit_per_s
            self._free_ns = sent_ns
        if conditions.loss and self._draw() < conditions.loss:
            self._num_dropped += 1
            return False
        delay_ms = conditions.delay_ms
        if conditions.jitter_ms:
            delay_ms += conditions.jitter_ms * self._draw()
        self._latest_due_ns = max(self._latest_due_ns, round(sent_ns + 1e6 * delay_ms))
        self._packets.append((self._latest_due_ns, packet))
        self._queued_bytes += len(packet)
        return True

    def pop_due(self, now_ns: int) -> list[tuple[int, bytes]]:
        """Remove every packet that is due, with its due time, oldest first."""
        due: list[tuple[int, bytes]] = []
        while self._packets and self._packets[0][0] <= now_ns:
            entry = self._packets.popleft()
            self._queued_bytes -= len(entry[1])
            due.append(entry)
        return due

    def _room_bytes(self, conditions: LinkConditions) -> int:
        if conditions.mbit_per_s is None:
            return self._capacity_bytes
        # Packets under way count as well: those are of the delay.
        held_s = _MOST_QUEUED_S + (conditions.delay_ms + conditions.jitter_ms) / 1e3
        bound = max(_LEAST_CAPACITY_BYTES, round(1e6 / 8 * conditions.mbit_per_s * held_s))
        return min(self._capacity_bytes, bound)
