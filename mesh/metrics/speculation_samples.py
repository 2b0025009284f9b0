"""Samples of speculation: what was proposed, what of it held, and what it was worth."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

    from mesh.metrics.sheet import Sheet

_STEM = "mesh_spec_decode_num"


def add_speculation(sheet: Sheet, speculation: Mapping[str, Any] | None) -> None:
    """Add them.

    Args:
        sheet: What is scraped.
        speculation: `speculation` of the status; None while no ring was ever up.
    """
    if speculation is None:
        return
    sheet.counter("mesh_windows", "Windows judged, chunks of prompts left out.", speculation["windows"])
    sheet.counter("mesh_stale_rows", "Rows that a rejection voided on their way.", speculation["stale_rows"])
    sheet.counter(
        "mesh_stale_rows_computed",
        "Those of them that all stages computed all the same.",
        speculation["stale_rows_computed"],
    )
    for name, proposer in speculation["proposers"].items():
        sheet.counter(f"{_STEM}_drafts", "Windows that proposed tokens.", proposer["drafts"], proposer=name)
        sheet.counter(
            f"{_STEM}_draft_tokens", "Tokens proposed and verified.", proposer["drafted"], proposer=name
        )
        sheet.counter(
            f"{_STEM}_accepted_tokens", "Those that the model chose too.", proposer["accepted"], proposer=name
        )
        for position, count in enumerate(proposer["accepted_per_position"]):
            sheet.counter(
                f"{_STEM}_accepted_tokens_per_pos",
                "By their place in the window.",
                count,
                proposer=name,
                position=str(position),
            )
    for kind in ("measured", "plain"):
        if (rate := speculation.get(f"{kind}_tokens_per_s")) is not None:
            sheet.gauge(
                "mesh_spec_decode_tokens_per_second",
                "Of the latest session: while it speculated, and what plain windows would bring.",
                rate,
                mode=kind,
            )
