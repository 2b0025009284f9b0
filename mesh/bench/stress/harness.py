"""Test bed of `mesh bench stress`: a mesh and its peer, up and warm.

While one of the two is asked, all processes of the other are stopped: llama.cpp's threads may spin, and an
idle mesh takes processor time, too.
"""

from __future__ import annotations

import time
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final

import structlog

from mesh.bench.stress.answers import Order, Outcome
from mesh.lab.systems import get_json, get_text
from spanmesh_proto.errors import MeshError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from mesh.bench.stress.client_process import LoadClient
    from mesh.bench.stress.scripts import Script
    from mesh.lab.network import Lab
    from mesh.lab.systems import MeshSystem, RpcSystem

log = structlog.get_logger()

_SETTLE_S: Final = 5.0
_POLL_S: Final = 0.1


@dataclass(frozen=True)
class LoadTestBed:
    """Up and warm.

    Attributes:
        lab: Host 0 is the head, every other one a stage.
        load_client: On the head's host.
        mesh: Ours.
        peer: The other system, stopped while it is not measured; None without one.
        fields: Of every request to the mesh.
        api_keys: API keys of the mesh; empty for an open API.
    """

    lab: Lab
    load_client: LoadClient
    mesh: MeshSystem
    peer: RpcSystem | None
    fields: dict[str, Any]
    api_keys: tuple[str, ...] = ()

    def ask_mesh(self, scripts: Sequence[Script], **order: Any) -> Outcome:
        """Have chats answered by the mesh; see `order` for the rest."""
        return self.load_client.ask(order_for(self.mesh.port, scripts, self.fields, **order))

    def ask_peer(self, scripts: Sequence[Script], **order: Any) -> Outcome:
        """Have chats answered by the peer.

        Raises:
            MeshError: If a request failed: no figure of the peer's is to come from half of an answer.
        """
        peer = self.peer
        assert peer is not None  # noqa: S101 - whoever calls has looked
        with self._running(peer):
            outcome = self.load_client.ask(order_for(peer.port, scripts, peer.fields, **order))
        failures = [one.record.failure for one in outcome.answers if one.record.failure is not None]
        if failures:
            raise MeshError(f"{peer.name}: {failures[0].kind}: {failures[0].message}")
        return outcome

    @contextmanager
    def _running(self, peer: RpcSystem) -> Iterator[None]:
        self.mesh.pause()
        peer.resume()
        try:
            yield
        finally:
            peer.pause()
            self.mesh.resume()

    def status(self) -> dict[str, Any]:
        """Body of `/mesh/status`."""
        key = self.api_keys[0] if self.api_keys else None
        found: dict[str, Any] = get_json(self.lab, 0, self.mesh.port, "/mesh/status", api_key=key)
        return found

    def metrics(self) -> str:
        """Body of `/metrics`."""
        key = self.api_keys[0] if self.api_keys else None
        return get_text(self.lab, 0, self.mesh.port, "/metrics", api_key=key)

    def settled_status(self) -> dict[str, Any]:
        """Body of `/mesh/status` when no request is running, or after five seconds."""
        deadline_s = time.monotonic() + _SETTLE_S
        while True:
            status = self.status()
            if not open_sessions(status) or time.monotonic() > deadline_s:
                return status
            time.sleep(_POLL_S)


def order_for(port: int, scripts: Sequence[Script], fields: dict[str, Any], **order: Any) -> Order:
    """First turns only of chats whose later turns need answers; whole chats are ordered by `Reference`."""
    bodies = tuple((script.body(0, (), fields).decode(),) for script in scripts)
    plain = Order(port, tuple(script.id for script in scripts), bodies)
    return replace(plain, **{"num_requests": len(scripts), **order})


def open_sessions(status: dict[str, Any]) -> int:
    """Number of open sessions: running, waiting, or open at any stage."""
    sessions = status["sessions"]
    at_stages = sum(int(stage.get("open_sessions") or 0) for stage in status["stages"])
    return int(sessions["running"]) + int(sessions["waiting"]) + at_stages
