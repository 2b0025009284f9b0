"""What a long wire does to packets: each comes out some time after it went in, in the same order."""

from __future__ import annotations

from collections import deque


class DelayQueue:
    """Packets under way. Pure: the caller says what time it is.

    Like a router's buffer it is bounded, and a packet that does not fit is dropped: senders that
    overrun the wire must notice it as they would on a real one. Packets never overtake one another,
    not even when the delay shrinks while some are under way.

    Args:
        delay_ns: How long a packet stays, in nanoseconds; may be changed, for the packets to come.
        capacity_bytes: Bound on the sum of the sizes of all packets under way.
    """

    def __init__(self, delay_ns: int, capacity_bytes: int) -> None:
        self.delay_ns = delay_ns
        self._capacity_bytes = capacity_bytes
        self._packets: deque[tuple[int, bytes]] = deque()
        self._queued_bytes = 0
        self._latest_due_ns = 0
        self._num_dropped = 0

    def __len__(self) -> int:
        """Packets under way."""
        return len(self._packets)

    @property
    def num_dropped(self) -> int:
        """Packets that found no room, so far."""
        return self._num_dropped

    @property
    def next_due_ns(self) -> int | None:
        """When the next packet comes out, or None when nothing is under way."""
        return self._packets[0][0] if self._packets else None

    def push(self, packet: bytes, now_ns: int) -> bool:
        """Send a packet on its way; False if it was dropped for want of room."""
        if self._queued_bytes + len(packet) > self._capacity_bytes:
            self._num_dropped += 1
            return False
        self._latest_due_ns = max(self._latest_due_ns, now_ns + self.delay_ns)
        self._packets.append((self._latest_due_ns, packet))
        self._queued_bytes += len(packet)
        return True

    def pop_due(self, now_ns: int) -> list[tuple[int, bytes]]:
        """Take out every packet whose time has come, with the time it was due, oldest first."""
        due: list[tuple[int, bytes]] = []
        while self._packets and self._packets[0][0] <= now_ns:
            entry = self._packets.popleft()
            self._queued_bytes -= len(entry[1])
            due.append(entry)
        return due
