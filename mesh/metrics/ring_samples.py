"""Samples of the ring: what stages compute, what waits, what the links carry."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from mesh.metrics.sheet import Sheet


def add_ring(
    sheet: Sheet, stages: Sequence[Mapping[str, Any]], round_trips: Mapping[str, Any] | None
) -> None:
    """Add them. A ring that was made anew counts from 0, as Prometheus expects of what was started again.

    Args:
        sheet: What is scraped.
        stages: `stages` of the status.
        round_trips: `round_trips` of the status; None while no ring was ever up.
    """
    for stage in stages:
        _add_stage(sheet, stage)
    if round_trips is not None:
        _add_links(sheet, stages, round_trips)


def _add_stage(sheet: Sheet, stage: Mapping[str, Any]) -> None:
    start, stop = stage["layers"]
    labels = {"stage": str(stage["index"]), "host": stage["host"], "layers": f"[{start}, {stop})"}
    sheet.counter(
        "mesh_stage_windows", "Windows computed, chunks of prompts too.", stage["windows"], **labels
    )
    for kind, help_ in (("compute", "Computing windows."), ("queue", "Windows waiting at the stage.")):
        sheet.counter(f"mesh_stage_{kind}_seconds", help_, stage[f"{kind}_ms"] / 1000, **labels)
    if stage["rtt_ms"] is not None:
        sheet.gauge(
            "mesh_stage_rtt_seconds",
            "From the coordinator to the stage and back, the shortest of late.",
            stage["rtt_ms"] / 1000,
            **labels,
        )
    if "rows" not in stage:
        return  # a stage that did not answer in time
    sheet.counter("mesh_stage_rows", "Rows computed.", stage["rows"], **labels)
    sheet.counter("mesh_stage_dropped_windows", "Void windows dropped.", stage["dropped_windows"], **labels)
    sheet.gauge("mesh_stage_queued_windows", "Windows that wait now.", stage["queued_windows"], **labels)
    sheet.gauge("mesh_stage_open_sessions", "Sessions that it knows.", stage["open_sessions"], **labels)
    sheet.gauge(
        "mesh_stage_resident_memory_bytes",
        "In memory, mapped files included.",
        stage["resident_bytes"],
        **labels,
    )


def _add_links(sheet: Sheet, stages: Sequence[Mapping[str, Any]], round_trips: Mapping[str, Any]) -> None:
    names = ["coordinator", *(f"stage {stage['index']}" for stage in stages), "coordinator"]
    sent_bytes = [round_trips["sent_bytes"], *(stage.get("sent_bytes") for stage in stages)]
    sent_bytes[-1] = round_trips["received_bytes"]
    for (source, target), wire_ms, num_bytes in zip(
        pairwise(names), round_trips["wire_ms"], sent_bytes, strict=True
    ):
        labels = {"source": source, "target": target}
        sheet.counter(
            "mesh_link_wire_seconds",
            "Windows that decode on their way over the link.",
            wire_ms / 1000,
            **labels,
        )
        sheet.counter("mesh_link_windows", "Those windows.", round_trips["windows"], **labels)
        if num_bytes is not None:
            sheet.counter("mesh_link_sent_bytes", "Sent over the link.", num_bytes, **labels)
