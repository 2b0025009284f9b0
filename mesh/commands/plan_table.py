"""What `mesh plan` found, as tables for a person."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

from stages.units import format_size

if TYPE_CHECKING:
    from mesh.forecast.cost_model import Forecast
    from mesh.forecast.dry_run import DryRun


def print_plan(found: DryRun) -> None:
    """Stages, hosts left out, and what a session could expect."""
    # A model may have any brackets in its name.
    console = Console(markup=False)
    model = found.model
    console.print(
        f"{model.name} ({model.architecture}), {model.n_layers} layers, {format_size(model.file_bytes)}",
        highlight=False,
    )
    console.print(f"plan: {found.plan.reason}", highlight=False)
    console.print(_stages(found))
    for host, reason in found.left_out.items():
        console.print(f"{host} is left out: {reason}", highlight=False)
    if found.forecast is not None:
        _print_forecast(console, found.forecast)
    console.print(found.basis, highlight=False)


def _stages(found: DryRun) -> Table:
    table = Table("stage", "host", "layers", "weights", "KV", "buffers", "in all", "free after", "ms a token")
    for index, stage in enumerate(found.plan.stages):
        memory = stage.memory
        table.add_row(
            str(index),
            stage.host,
            str(stage.layers),
            *map(format_size, (memory.weight_bytes, memory.cache_bytes, memory.buffer_bytes)),
            format_size(memory.total_bytes),
            format_size(found.free_after_bytes(stage.host)),
            "-" if found.timings is None else f"{found.timings[index].row_ms:.2f}",
        )
    return table


def _print_forecast(console: Console, expected: Forecast) -> None:
    parts = (
        f"{expected.compute_ms:.1f} ms computing, {expected.wire_ms:.1f} ms on the wire, "
        f"{expected.handling_ms:.1f} ms handling"
    )
    console.print(
        f"one session, no speculation: {expected.tokens_per_s:.1f} tokens/s ({parts} a token); first token "
        f"of a {expected.prompt_tokens}-token prompt after {expected.ttft_ms / 1e3:.2f} s",
        highlight=False,
    )
