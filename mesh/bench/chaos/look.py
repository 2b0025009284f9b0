"""How a mesh and its clients stand at one moment. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Running:
    """A request under way.

    Attributes:
        sent_s: When it was sent, of `time.perf_counter`.
        last_s: When its latest token came; None before the first.
    """

    sent_s: float
    last_s: float | None


@dataclass(frozen=True)
class Look:
    """One look.

    Attributes:
        at_s: When, of `time.perf_counter`.
        status: What `/mesh/status` says; None if the head does not answer.
        running: Of the clients' requests.
    """

    at_s: float
    status: dict[str, Any] | None
    running: tuple[Running, ...]

    @property
    def stage_hosts(self) -> tuple[str, ...]:
        """The host of each stage, in order; none while the ring is not known."""
        return tuple(stage["host"] for stage in (self.status or {}).get("stages", ()))

    @property
    def ready_hosts(self) -> tuple[str, ...]:
        """Hosts that take part or could."""
        return tuple(host["name"] for host in (self.status or {}).get("hosts", ()) if host["ready"])

    @property
    def layers_without_copy(self) -> tuple[str, ...]:
        """Layers of stages that no host has loaded ahead, such as `[0, 10)`."""
        status = self.status or {}
        copies = {layers for host in status.get("hosts", ()) for layers in host.get("copies", ())}
        layers = ("[{}, {})".format(*stage["layers"]) for stage in status.get("stages", ()))
        return tuple(each for each in layers if each not in copies)


def what_is_missing(look: Look, *, since_s: float, num_hosts: int, with_copies: bool) -> str | None:
    """Why a mesh is not yet what it was; None if it is.

    Args:
        look: At it.
        since_s: Every request sent before must have got a token since; of `time.perf_counter`.
        num_hosts: So many must be ready, spare ones included.
        with_copies: Whether spare hosts must have loaded every stage ahead.
    """
    status = look.status
    if status is None:
        return "the head does not answer"
    if not status["ready"]:
        return f"not ready: {status['phase']}"
    if len(look.ready_hosts) < num_hosts:
        return f"{len(look.ready_hosts)} of {num_hosts} hosts are ready"
    if with_copies and (cold := look.layers_without_copy):
        return f"layers {cold[0]} have no copy"
    waiting = [each for each in look.running if each.sent_s < since_s and (each.last_s or 0.0) < since_s]
    if waiting:
        return f"{len(waiting)} of {len(look.running)} streams have not gone on"
    return None
