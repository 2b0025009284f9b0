"""Who may begin while the ring is whole, and how long the others wait while it is not."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING, Final

from spanmesh_proto.errors import StageFailed

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from spanmesh_proto.errors import MeshError

_RETRY_AFTER_S: Final = 5
# Once repairing was given up.
_RETRY_LATER_S: Final = 10


class Gate:
    """Lets requests in, holds them up for a while, or turns them away. Begins open.

    Args:
        patience_s: How long a request waits at most, in seconds, since it came or since the ring broke.
    """

    def __init__(self, patience_s: float) -> None:
        self._patience_s = patience_s
        self._refusal: MeshError | None = None
        self._opening = asyncio.Event()
        self._opening.set()
        self._waits: set[asyncio.Timeout] = set()

    @property
    def is_open(self) -> bool:
        """Whether requests begin at once."""
        return self._opening.is_set()

    @property
    def refusal(self) -> StageFailed | None:
        """Why requests are turned away at once, if they are; one to raise."""
        if self._refusal is None:
            return None
        return StageFailed(self._refusal.message, retry_after_s=self._refusal.retry_after_s or _RETRY_LATER_S)

    def open(self) -> None:
        """Let everybody in."""
        self._refusal = None
        self._opening.set()
        self._limit(None)

    def hold(self) -> None:
        """Let nobody in for now, and nobody wait longer than the patience allows. A shut gate stays so."""
        if self.is_open:
            self._opening.clear()
            self._limit(self._patience_s)

    def shut(self, refusal: MeshError) -> None:
        """Turn everybody away, those who wait as well."""
        self._refusal = refusal
        self._opening.clear()
        self._limit(0.0)

    async def opened(self) -> None:
        """Wait until the gate is open; within `patience` only."""
        while not self.is_open:
            await self._opening.wait()

    @contextlib.asynccontextmanager
    async def patience(self) -> AsyncIterator[None]:
        """A block in which a request waits: for the gate, and for whatever else stands before its beginning.

        Raises:
            StageFailed: If the gate is closed for too long meanwhile, or for good.
        """
        self._raise_refusal()
        try:
            async with asyncio.timeout(None if self.is_open else self._patience_s) as wait:
                self._waits.add(wait)
                try:
                    yield
                finally:
                    self._waits.discard(wait)
        except TimeoutError:
            self._raise_refusal()
            raise StageFailed(
                f"the mesh is being repaired and was not whole again within {self._patience_s:g} s: try "
                "again in a moment",
                retry_after_s=_RETRY_AFTER_S,
            ) from None

    def _limit(self, in_s: float | None) -> None:
        when = None if in_s is None else asyncio.get_running_loop().time() + in_s
        for wait in self._waits:
            if not wait.expired():
                wait.reschedule(when)

    def _raise_refusal(self) -> None:
        if (refusal := self.refusal) is not None:
            raise refusal
