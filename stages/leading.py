"""A stage's end of being followed: it tells its copies what its sessions have in the KV cache."""

from __future__ import annotations

import asyncio
import contextlib
import time
from typing import TYPE_CHECKING, Final

from spanmesh_proto.errors import ProtocolError
from stages.slot_tokens import Marks

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable

    from spanmesh_proto import windows_pb2 as wire
    from stages.window_path import WindowPath

# Two copies there are, and those that were told to follow anew before their old streams have ended.
_MOST_FOLLOWERS: Final = 8
_NEWS_S: Final = 0.5
# What it costs the stage, its host's processor and the link, of the time.
_SHARE: Final = 0.1


def pause_s(took_s: float) -> float:
    """How long a stage waits before it tells a copy more.

    Args:
        took_s: How long it took to tell the latest, until the copy had taken all but the last of it.
    """
    return max(_NEWS_S, took_s / _SHARE)


class Leading:
    """All who follow one stage.

    Args:
        path: The stage's sessions and slots.
        num_slots: That exist.
        pause_s: How long to wait between two rounds, given how long the one took, in seconds.
    """

    def __init__(self, path: WindowPath, num_slots: int, pause_s: Callable[[float], float] = pause_s) -> None:
        self._path = path
        self._num_slots = num_slots
        self._pause_s = pause_s
        self._leaving: set[asyncio.Event] = set()

    def refusal(self, request: wire.FollowRequest) -> ProtocolError | None:
        """Why a copy is not told anything; None if it is."""
        if len(self._leaving) >= _MOST_FOLLOWERS:
            return ProtocolError(f"{len(self._leaving)} copies follow this stage: no more may")
        if len(request.held) > self._num_slots:
            return ProtocolError(f"a copy tells of {len(request.held)} slots, {self._num_slots} exist")
        return None

    async def news(self, request: wire.FollowRequest) -> AsyncGenerator[wire.SlotRows, None]:
        """What the copy does not have, round by round, until `let_go`. Ask for a `refusal` first."""
        leaving = asyncio.Event()
        self._leaving.add(leaving)
        marks = Marks(self._num_slots)
        try:
            await self._path.follow(marks, request.held)
            while not leaving.is_set():
                started_s = time.monotonic()
                async for news in self._path.news(marks):
                    yield news
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(leaving.wait(), self._pause_s(time.monotonic() - started_s))
        finally:
            self._leaving.discard(leaving)
            self._path.unfollow(marks)

    def let_go(self) -> None:
        """End with everybody."""
        for leaving in self._leaving:
            leaving.set()
