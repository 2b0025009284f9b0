"""Service of a process that one head uses, and the actor of it: the head's key, term and calls."""

from __future__ import annotations

import time
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

from spanmesh_proto.errors import ClusterError, Overloaded, ProtocolError
from stages.serving.actor import ModelActor
from stages.transport.channels import HandshakeMonitor, KeyCheck

if TYPE_CHECKING:
    from collections.abc import Iterator

    from stages.transport.hidden_codec import HiddenType


class HeadService:
    """Base of services that one head calls. Runs in the event loop that made it.

    Args:
        what: What it serves, for messages, such as `an embedding model`.
        mesh_key: Key that every call must carry.
        term: Term of the head; calls to `rejoin` with a lower one are refused.
        most_calls: Calls at the same time; more are refused.

    Attributes:
        key_check: Interceptor for its server.
        handshakes: Monitor for its server's connections.
    """

    def __init__(self, what: str, *, mesh_key: str, term: int, most_calls: int) -> None:
        self.handshakes = HandshakeMonitor()
        self.key_check = KeyCheck(mesh_key, self.handshakes.called)
        self._what = what
        self._term = term
        self._most_calls = most_calls
        self._num_calls = 0
        self._idle_since_s = time.monotonic()

    @property
    def idle_s(self) -> float:
        """Seconds since the last call ended; 0 during one."""
        return 0.0 if self._num_calls else time.monotonic() - self._idle_since_s

    def rejoin(self, mesh_key: str, term: int) -> None:
        """Serve another head from now on; what is loaded stays.

        Args:
            mesh_key: Its key.
            term: Its term.

        Raises:
            ProtocolError: If a head of a higher term took over meanwhile.
        """
        if term < self._term:
            raise ProtocolError(
                f"a head of term {term} asked for {self._what} that serves term {self._term}: another "
                "`mesh serve` has taken over the mesh; stop the older one"
            )
        self._term = term
        self.key_check.replace(mesh_key)

    @contextmanager
    def calling(self) -> Iterator[None]:
        """Context of one call.

        Raises:
            Overloaded: If there are too many.
        """
        if self._num_calls >= self._most_calls:
            raise Overloaded(f"{self._most_calls} calls wait here: send fewer at a time")
        self._num_calls += 1
        try:
            yield
        finally:
            self._num_calls -= 1
            self._idle_since_s = time.monotonic()


class HeadActor(ModelActor):
    """Base of actors whose service one head calls; see `ModelActor`."""

    async def rejoin(
        self,
        stage_index: int,  # noqa: ARG002 - there is one place only
        mesh_id: str,
        mesh_key: str,
        term: int,
        hidden_type: HiddenType | None = None,  # noqa: ARG002 - it sends no hidden states
    ) -> None:
        """Serve a head with a new key; the arguments are those of a stage.

        Raises:
            ClusterError: If it is not serving.
            ProtocolError: If a head of a higher term took over meanwhile.
        """
        self._last_call_s = time.monotonic()
        service = self._service
        if not isinstance(service, HeadService):
            raise ClusterError(f"a process on {self._config.host} got another key before it was started")
        service.rejoin(mesh_key, term)
        self._config = replace(self._config, mesh_id=mesh_id, mesh_key=mesh_key, term=term)
