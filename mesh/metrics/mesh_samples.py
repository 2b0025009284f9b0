"""Samples of the mesh: hosts, spares, losses and repairs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

    from mesh.metrics.sheet import Sheet


def add_model(sheet: Sheet, status: Mapping[str, Any]) -> None:
    """Add those of one model's ring.

    Args:
        sheet: What is scraped.
        status: What `/mesh/status` answers of the model.
    """
    if "ready" in status:
        sheet.gauge("mesh_ready", "Whether requests are answered at once.", int(status["ready"]))
    if "prefix_mismatches" in status:
        sheet.counter(
            "mesh_prefix_mismatches",
            "Sessions that began anew: a slot did not hold the tokens that it was believed to.",
            status["prefix_mismatches"],
        )
    if (repairs := status.get("repairs")) is not None:
        sheet.counter("mesh_stage_losses", "Stages that were lost.", repairs["losses"])
        sheet.counter("mesh_repairs", "Repairs of the ring.", repairs["count"])
        sheet.counter("mesh_moves", "Times that layers moved while all was well.", repairs["moves"])
        if repairs["last_s"] is not None:
            sheet.gauge("mesh_last_repair_seconds", "How long the latest repair took.", repairs["last_s"])


def add_mesh(sheet: Sheet, status: Mapping[str, Any]) -> None:
    """Add those of the mesh as a whole.

    Args:
        sheet: What is scraped.
        status: What `/mesh/status` answers.
    """
    if "version" in status:
        labels = {name: str(status[name]) for name in ("version", "protocol_version")}
        sheet.gauge("mesh_info", "What runs here.", 1, **labels)
    hosts = status.get("hosts", ())
    if isinstance(hosts, list):
        _add_hosts(sheet, hosts)


def _add_hosts(sheet: Sheet, hosts: list[Mapping[str, Any]]) -> None:
    states = [_state(host) for host in hosts]
    for state in ("serving", "spare", "joining", "leaving"):
        sheet.gauge("mesh_hosts", "Hosts by what they do.", states.count(state), state=state)
    num_copies = sum(len(host["copies"]) for host in hosts)
    sheet.gauge("mesh_spare_copies", "Copies of stages that could take over at once.", num_copies)
    for host in hosts:
        sheet.gauge("mesh_host_memory_bytes", "What it gives.", host["memory_bytes"], host=host["name"])


def _state(host: Mapping[str, Any]) -> str:
    if host["leaving"]:
        return "leaving"
    if not host["ready"]:
        return "joining"
    return "serving" if host["layers"] else "spare"
