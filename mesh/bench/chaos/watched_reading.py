"""A checked reading that also keeps when each byte came."""

from __future__ import annotations

from mesh.bench.stress.answers import CheckedReading


class WatchedReading(CheckedReading):
    """See `CheckedReading`.

    Attributes:
        bytes_s: When anything came, comment pings included, by the client's clock.
    """

    def __init__(self) -> None:
        super().__init__()
        self.bytes_s: list[float] = []

    def on_body(self, data: bytes, now_s: float) -> None:
        """The next bytes of the body."""
        self.bytes_s.append(now_s)
        super().on_body(data, now_s)
