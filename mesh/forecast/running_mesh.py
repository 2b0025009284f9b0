"""The hosts of a running mesh, by what its head says: who is there, how fast hosts and links are."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from mesh.forecast.surroundings import KnownHost, Rehearsed, Surroundings
from mesh.placement.host_capacity import HostCapacity
from mesh.placement.links import Link, Links
from stages.host.profile_request import StageTiming

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from stages.host.profile_request import RehearsalOrder

    # Path, body and seconds of patience to the answer; a path without a body is asked with GET.
    Ask = Callable[[str, Mapping[str, Any] | None, str, float], Mapping[str, Any]]

_NUM_PROBES: Final = 20
_PATIENCE_S: Final = 600.0


def running_mesh(ask: Ask) -> Surroundings:
    """Ask a head for its hosts and links; hosts rehearse when they are asked to.

    Args:
        ask: Asks it: path, body, method, seconds of patience.

    Raises:
        MeshError: If it does not answer.
    """
    status = ask("/mesh/status", None, "GET", _PATIENCE_S)
    found = ask(f"/mesh/links?probes={_NUM_PROBES}&bulk_bytes=0", None, "POST", _PATIENCE_S)

    def timer(wanted: Mapping[str, Sequence[RehearsalOrder]]) -> Mapping[str, Rehearsed]:
        body = {
            "hosts": [
                {"host": host, "orders": [order.as_dict() for order in orders]}
                for host, orders in wanted.items()
            ]
        }
        answer = ask("/mesh/rehearse", body, "POST", _PATIENCE_S)
        return {
            each["host"]: Rehearsed(
                tuple(StageTiming(**timing) for timing in each["timings"]), each["failure"] or ""
            )
            for each in answer["hosts"]
        }

    return Surroundings(
        hosts=tuple(map(_host, status["hosts"])),
        head=found["head"],
        links=Links(tuple(map(_link, found["links"]))),
        timer=timer,
        basis="computing was timed on every host, links were measured between them",
    )


def _host(fields: Mapping[str, Any]) -> KnownHost:
    absent = "it is leaving" if fields["leaving"] else "" if fields["ready"] else "it is still starting"
    return KnownHost(
        HostCapacity(fields["name"], fields["memory_bytes"], fields["speed_gb_per_s"]),
        fields["threads"],
        absent,
    )


def _link(fields: Mapping[str, Any]) -> Link:
    """Only what a hop takes is kept of it."""
    hop_ms = fields["hop_ms"]
    if hop_ms is None:
        return Link(fields["from"], fields["to"], failure=fields["failure"] or "not measured")
    return Link(fields["from"], fields["to"], small_ms=(2 * hop_ms,), hidden_ms=(2 * hop_ms,))
