"""A running mesh at a glance, as `mesh top` draws it again and again."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING, Any, Final

from rich.console import Group, RenderableType
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from stages.units import format_size

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from mesh.commands.mesh_pace import MeshPace

_BAR_CHARS: Final = 10


def view(
    status: Mapping[str, Any], pace: MeshPace, hops_ms: Mapping[tuple[str, str], float], head: str
) -> RenderableType:
    """The whole picture.

    Args:
        status: Answer of `/mesh/status`.
        pace: What it did lately.
        hops_ms: One way, by the hosts at both ends; those that were measured.
        head: The coordinator's host.
    """
    parts: list[RenderableType] = [Text(_title(status))]
    if status["stages"]:
        parts += [_stages(status, pace, hops_ms, head), Text(_speed(status, pace))]
        parts += [Text(line) for line in _speculation(status, pace)]
    if len(models := status.get("models", ())) > 1:
        parts.append(_models(models))
    parts.append(_hosts(status))
    if (lost := status.get("lost")) is not None:
        parts.append(Text(f"broken: {lost}"))
    return Group(*parts)


def _title(status: Mapping[str, Any]) -> str:
    model = status["model"]
    state = "ready" if status["ready"] else status["phase"]
    sessions = status.get("sessions")
    shown = (
        f"; sessions: {sessions['running']} of {sessions['slots']}, {sessions['waiting']} waiting"
        if sessions
        else ""
    )
    repairs = status.get("repairs") or {}
    healed = f"; repairs: {repairs['count']}" if repairs.get("count") else ""
    return f"{model['name']}, {model['numeric_mode']}: {state}{shown}{healed}"


def _stages(
    status: Mapping[str, Any], pace: MeshPace, hops_ms: Mapping[tuple[str, str], float], head: str
) -> Table:
    table = Table(
        "stage", "host", "layers", "compute ms", "queue ms", "queued", "busy", "wire ms to", box=None
    )
    stages = status["stages"]
    ways = [*pairwise(stage["host"] for stage in stages), (stages[-1]["host"], head)]
    for stage, its_pace, way in zip(stages, pace.stages, ways, strict=True):
        start, stop = stage["layers"]
        hop_ms = 0.0 if way[0] == way[1] else hops_ms.get(way)
        table.add_row(
            str(stage["index"]),
            stage["host"],
            escape(f"[{start}, {stop})"),
            f"{its_pace.compute_ms:.2f}",
            f"{its_pace.queue_ms:.2f}",
            str(stage.get("queued_windows", "-")),
            _bar(its_pace.busy),
            f"{'-' if hop_ms is None else format(hop_ms, '.2f')} {way[1]}",
        )
    return table


def _bar(share: float | None) -> str:
    if share is None:
        return "-"
    filled = round(share * _BAR_CHARS)
    return f"{'#' * filled}{'.' * (_BAR_CHARS - filled)} {share:4.0%}"


def _speed(status: Mapping[str, Any], pace: MeshPace) -> str:
    rate = "" if pace.tokens_per_s is None else f"{pace.tokens_per_s:.1f} tokens/s; "
    times = (status.get("speculation") or {}).get("mean_window_ms")
    if not times:
        return f"{rate}nothing was asked yet"
    when = "lately" if pace.is_recent else "so far"
    return f"{rate}a window, {when}: {pace.wire_ms:.1f} ms on the way"


def _speculation(status: Mapping[str, Any], pace: MeshPace) -> list[str]:
    speculation = status.get("speculation")
    if not speculation or speculation["mode"] == "off":
        return ["speculation: off"]
    share = "nothing proposed" if pace.acceptance is None else f"{pace.acceptance:.0%} accepted"
    lines = [
        f"speculation: {speculation['mode']}, {share}, {speculation['tokens_per_window']:.2f} tokens a window"
    ]
    places = speculation.get("acceptance_per_position") or []
    if places:
        lines.append("  by position: " + " ".join(f"{each:.2f}" for each in places[:_BAR_CHARS]))
    return lines


def _models(models: Sequence[Mapping[str, Any]]) -> Table:
    table = Table("model", "state", "sessions", "tokens", box=None)
    for model in models:
        sessions, tokens = model.get("sessions"), model.get("tokens") or {}
        state = "ready" if model.get("ready") else model.get("lost") or model.get("phase", "")
        running = f"{sessions['running']} of {sessions['slots']}" if sessions else "-"
        table.add_row(escape(model["name"]), escape(state), running, str(tokens.get("generated", 0)))
    return table


def _hosts(status: Mapping[str, Any]) -> Table:
    table = Table("host", "address", "holds", "memory", box=None)
    for host in status["hosts"]:
        copies = f"copies of {', '.join(host['copies'])}" if host["copies"] else ""
        holds = "; ".join(filter(None, (host["layers"], copies))) or (
            "spare" if host["ready"] else "starting"
        )
        if host["leaving"]:
            holds += "; leaving"
        table.add_row(host["name"], host["address"], escape(holds), format_size(host["memory_bytes"]))
    return table
