"""Feature stream: features of a stage's windows on their way to the coordinator.

Windows never wait for them: what a slow link cannot carry is dropped, the oldest first. Each message costs
both hosts more time than its rows; while the drafter rests, features of several windows share one.
"""

from __future__ import annotations

import asyncio
from collections import deque
from typing import TYPE_CHECKING, Final

import structlog

from spanmesh_proto import windows_pb2 as wire

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterable, Sequence

MOST_QUEUED_BYTES: Final = 64 << 20
# Of one message; gRPC's limit is far above.
_MOST_BUNDLED_BYTES: Final = 1 << 20
# Rows that may wait are sent together, once they are as many.
_ROWS_TOGETHER: Final = 8

log = structlog.get_logger()


class FeatureStream:
    """Bounded queue of features for one coordinator. For the event loop.

    Args:
        most_queued_bytes: Rows beyond these are dropped, the oldest first.

    Attributes:
        num_dropped_rows: Rows dropped so far.
    """

    def __init__(self, most_queued_bytes: int = MOST_QUEUED_BYTES) -> None:
        self._layers: tuple[int, ...] | None = None
        self._most_queued_bytes = most_queued_bytes
        self._waiting: deque[wire.Features] = deque()
        self._num_bytes = self._num_rows = 0
        self._changed = asyncio.Event()
        self._is_closed = False
        self.num_dropped_rows = 0

    def open(self, layers: Sequence[int]) -> None:
        """Set the layers whose features it carries from now on."""
        self._layers = tuple(layers)

    def put(self, features: Iterable[wire.Features]) -> None:
        """Queue features of windows; before `open` they are of other layers, and dropped."""
        if self._layers is None:
            return
        is_urgent = False
        for each in features:
            self._waiting.append(each)
            self._num_bytes += _size_bytes(each)
            self._num_rows += each.num_rows
            is_urgent = is_urgent or not each.may_wait
        if self._num_bytes > self._most_queued_bytes and not self.num_dropped_rows:
            log.warning("features_dropped", reason="the link to the coordinator is too slow for them")
        while self._num_bytes > self._most_queued_bytes:
            self.num_dropped_rows += self._take().num_rows
        if is_urgent or self._num_rows >= _ROWS_TOGETHER:
            self._changed.set()

    def close(self) -> None:
        """End the stream at once."""
        self._is_closed = True
        self._changed.set()

    async def bundles(self) -> AsyncIterator[wire.FeatureBundle]:
        """Messages for the coordinator from `open` to `close`: the layers, then features as they come."""
        if self._is_closed:
            return
        yield wire.FeatureBundle(layers=self._layers)
        while True:
            await self._changed.wait()
            self._changed.clear()
            while self._waiting and not self._is_closed:
                yield wire.FeatureBundle(features=self._take_few())
            if self._is_closed:
                return

    def _take_few(self) -> list[wire.Features]:
        few = [self._take()]
        num_bytes = _size_bytes(few[0])
        while self._waiting and num_bytes + _size_bytes(self._waiting[0]) <= _MOST_BUNDLED_BYTES:
            num_bytes += _size_bytes(self._waiting[0])
            few.append(self._take())
        return few

    def _take(self) -> wire.Features:
        oldest = self._waiting.popleft()
        self._num_bytes -= _size_bytes(oldest)
        self._num_rows -= oldest.num_rows
        return oldest


def _size_bytes(features: wire.Features) -> int:
    return sum(len(rows) for rows in features.rows)
