"""Notices those who connect and never get to make a call, for gRPC turns them away without a word.

A peer that speaks plain text, or whose certificate another authority signed, fails in the handshake. gRPC
tells a server that a handshake begins, since it asks which certificate to show, and whose each call is. Who
connected and is not among the callers a few seconds later is a stranger.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from typing import Final

import structlog

log = structlog.get_logger()

# Members call as soon as they are connected; so does a slow one, over a slow network, by then.
PATIENCE_S: Final = 3.0
# Connections with calls; a mesh has a few for each stage.
_MOST_REMEMBERED: Final = 4096


class Strangers:
    """Counts the connections to one server, and logs those on which nobody called in time.

    Lives in the event loop that made it.

    Args:
        patience_s: How long a peer may take from the beginning of its handshake to its first call.
    """

    def __init__(self, patience_s: float = PATIENCE_S) -> None:
        self._loop = asyncio.get_running_loop()
        self._patience_s = patience_s
        self._callers: OrderedDict[str, None] = OrderedDict()
        self._num_callers = 0
        self._num_judged = 0
        self._num_logged = 0

    def connected(self) -> None:
        """Somebody begins a handshake. May be called in any thread, as long as the loop is open."""
        self._loop.call_soon_threadsafe(self._loop.call_later, self._patience_s, self._judge)

    def called(self, peer: str) -> None:
        """A call came, whether it is answered or not.

        Args:
            peer: Address and port, as gRPC names them: one for each connection.
        """
        if peer not in self._callers:
            self._num_callers += 1
        self._callers[peer] = None
        self._callers.move_to_end(peer)
        if len(self._callers) > _MOST_REMEMBERED:
            self._callers.popitem(last=False)

    def _judge(self) -> None:
        self._num_judged += 1
        # Callers whose own time is not over yet only put this off until it is.
        if self._num_judged - self._num_logged > self._num_callers:
            self._num_logged += 1
            log.warning(
                "stranger_refused",
                within_s=self._patience_s,
                reason="no call came: it speaks plain text, has no certificate of this mesh, or hung up",
            )
