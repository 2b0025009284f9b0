"""Test bed of `mesh bench stress`: a mesh and perhaps its peer, up and warm.

While one of the two is asked, all processes of the other are stopped: llama.cpp's threads may spin, and an
idle mesh takes processor time, too.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final

from meshbench.lab.systems import in_place_of
from meshbench.load_client.schedule import Schedule

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from mesh.status import MeshStatus
    from meshbench.lab.systems import MeshSystem, RpcSystem
    from meshbench.load_client.answers import Outcome
    from meshbench.load_client.client import LoadClient
    from meshbench.stress.scripts import Script
    from meshbench.under_test.mesh import MeshUnderTest

_SETTLE_S: Final = 5.0
_POLL_S: Final = 0.1


@dataclass(frozen=True)
class LoadTestBed:
    """Up and warm."""

    load_client: LoadClient
    """Sends the load."""
    mesh: MeshUnderTest
    """The mesh."""
    ctx_size: int
    """Positions of its sessions."""
    processes: MeshSystem | None = None
    """Its processes, if they are on this machine; what is measured of them is not measured of others."""
    peer: RpcSystem | MeshSystem | None = None
    """Another system on the same hosts, or the mesh of another checkout, stopped while it is not measured;
    None without one."""

    def ask_mesh(self, scripts: Sequence[Script] = (), **schedule: Any) -> Outcome:
        """Have chats answered by the mesh; see `_schedule` for the rest."""
        return self.load_client.run(self._schedule(self.mesh.url, scripts, self.mesh.fields, schedule))

    def measure_mesh(self, scripts: Sequence[Script] = (), **schedule: Any) -> Outcome:
        """Like `ask_mesh`, of answers from which a figure is to come.

        Raises:
            MeshError: If a request failed.
        """
        return self.ask_mesh(scripts, **schedule).complete("the mesh")

    def ask_peer(self, scripts: Sequence[Script] = (), **schedule: Any) -> Outcome:
        """Have chats answered by the peer.

        Raises:
            MeshError: If a request failed: no figure of the peer's is to come from half of an answer.
        """
        peer = self.peer
        assert peer is not None  # noqa: S101 - the caller has looked
        assert self.processes is not None  # noqa: S101 - a peer shares the hosts of the lab
        with in_place_of(self.processes, peer):
            outcome = self.load_client.run(self._schedule(peer.url, scripts, peer.fields, schedule))
        return outcome.complete(peer.name)

    def settled_status(self) -> MeshStatus:
        """Status of the mesh when no request is running, or after five seconds."""
        deadline_s = time.monotonic() + _SETTLE_S
        while True:
            status = self.mesh.status()
            if not open_sessions(status) or time.monotonic() > deadline_s:
                return status
            time.sleep(_POLL_S)

    def _schedule(
        self, url: str, scripts: Sequence[Script], fields: Mapping[str, Any], given: Mapping[str, Any]
    ) -> Schedule:
        """First turns, once each, unless other chats are given: later turns need answers.

        Args:
            url: Of the server.
            scripts: Of the first turns.
            fields: Of every request.
            given: Fields of the schedule that differ.
        """
        requests = (script.request(0, (), fields) for script in scripts)
        plain = Schedule.once(url, requests, api_keys=self.mesh.api_keys[:1])
        return replace(plain, **given)


def open_sessions(status: MeshStatus) -> int:
    """Number of open sessions: running, waiting, or open at any stage."""
    sessions = status.sessions
    at_stages = sum(stage.open_sessions or 0 for stage in status.stages)
    return at_stages if sessions is None else sessions.running + sessions.waiting + at_stages
