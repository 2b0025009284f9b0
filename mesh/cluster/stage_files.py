"""Stage files: sends recipes and pieces of stage files to hosts."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING, Final, Protocol

from spanmesh_proto.errors import InvalidModel
from stages.cancellable_work import CancellableWork

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from spanmesh_proto import membership_pb2 as wire
    from stages.weights.fetch import RateLimit
    from stages.weights.virtual_stages import StageCache

_CHUNK_BYTES: Final = 1024 * 1024


class Reader(Protocol):
    """Open recipe or stage file; see `stages.weights.virtual_stages`."""

    size_bytes: int

    def read(self, at: int, count: int) -> bytes:
        """Up to `count` bytes from `at` on; empty at the end."""

    def close(self) -> None:
        """Close the file."""


class _Text:
    def __init__(self, data: bytes) -> None:
        self._data = data
        self.size_bytes = len(data)

    def read(self, at: int, count: int) -> bytes:
        return self._data[at : at + count]

    def close(self) -> None:
        """Does nothing."""


class StageSender:
    """Opens and sends what hosts request.

    Args:
        cache: Stage files.
        rate: Bandwidth of all transfers together.
    """

    def __init__(self, cache: StageCache, rate: RateLimit) -> None:
        self._cache = cache
        self._rate = rate

    def open(self, request: wire.FetchRequest) -> Reader:
        """Open what a request names.

        Raises:
            ModelError: If there is no such stage, or its model was changed or is not on this host.
        """
        if request.recipe:
            recipe = self._cache.recipe(request.sha256)
            if recipe is not None:
                return _Text(recipe.to_bytes())
        else:
            stage = self._cache.open(request.sha256)
            if stage is not None:
                return stage
        raise InvalidModel(f"the head has no stage {request.sha256[:12]}; start `mesh serve` again")

    async def send(self, request: wire.FetchRequest, reader: Reader) -> AsyncIterator[bytes]:
        """The requested bytes, within the bandwidth.

        Raises:
            InvalidModel: If the model cannot be read any more.
        """
        wanted = [(each.start, each.num_bytes) for each in request.ranges]
        with ThreadPoolExecutor(1, "send") as thread:
            reading = CancellableWork(thread)
            for start, count in wanted or [(request.offset, reader.size_bytes)]:
                at, stop = start, min(start + count, reader.size_bytes)
                while at < stop:
                    data = await reading.run(partial(reader.read, at, min(_CHUNK_BYTES, stop - at)))
                    await self._rate.take(len(data))
                    yield data
                    at += len(data)
