"""`mesh top`: its display and the rates in it."""

from __future__ import annotations

import time
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Final

import click
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from mesh.cli.head_client import ask_head
from mesh.cli.shared_options import head_options, key_of
from mesh.cli.status import (
    features_text,
    holds_text,
    prompt_lines,
    recording_text,
    state_text,
    tail_drafts_text,
)
from mesh.status import EmbeddingModelStatus, SpeculationStatus, read_status
from spanmesh_proto.errors import ClusterError
from stages.units import format_size

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from mesh.status import ChatModelStatus, MeshStatus, StageStatus

# Links change slowly, and measuring them is not free.
_LINKS_EVERY_S: Final = 30.0
_LINKS_TIMEOUT_S: Final = 60.0
_NUM_PROBES: Final = 5
_BAR_CHARS: Final = 10


class _Watch:
    """Asks the head, and remembers what it said before.

    Args:
        url: Of the API.
        key: If the mesh wants one.
        has_links: Whether links are measured.
    """

    def __init__(self, url: str, key: str | None, *, has_links: bool) -> None:
        self._url = url
        self._key = key
        self._has_links = has_links
        self._before: MeshStatus | None = None
        self._before_s = 0.0
        self._hops_ms: dict[tuple[str, str], float] = {}
        self._head = ""
        self._linked_s: float | None = None

    def look(self) -> RenderableType:
        """The picture as it is now.

        Raises:
            MeshError: If the head does not answer the first time; later the picture says so.
        """
        try:
            status = read_status(ask_head(f"{self._url}/mesh/status", self._key))
        except ClusterError as error:
            if self._before is None:
                raise
            return Text(error.message)
        now_s = time.monotonic()
        pace = pace_between(self._before, status, now_s - self._before_s)
        self._before, self._before_s = status, now_s
        self._measure_links(now_s)
        return view(status, pace, self._hops_ms, self._head)

    def _measure_links(self, now_s: float) -> None:
        is_due = self._linked_s is None or now_s - self._linked_s >= _LINKS_EVERY_S
        if not self._has_links or not is_due:
            return
        self._linked_s = now_s
        try:
            found = ask_head(
                f"{self._url}/mesh/links?probes={_NUM_PROBES}&bulk_bytes=0",
                self._key,
                method="POST",
                timeout_s=_LINKS_TIMEOUT_S,
            )
        except ClusterError:
            # The head is still starting: what was measured before stays.
            return
        self._head = found["head"]
        self._hops_ms = {
            (link["from"], link["to"]): link["hop_ms"]
            for link in found["links"]
            if link["hop_ms"] is not None
        }


@dataclass(frozen=True)
class StagePace:
    """One stage."""

    compute_ms: float
    """Of a window, since the look before; since the start if there was none since then."""
    queue_ms: float
    """Likewise, waiting for the stage."""
    busy: float | None
    """Share of the time that it computed; None at the first look."""
    windows_per_s: float | None
    """None at the first look."""


@dataclass(frozen=True)
class MeshPace:
    """All of it."""

    stages: tuple[StagePace, ...]
    """In order."""
    tokens_per_s: float | None
    """Committed, of all sessions; None at the first look."""
    acceptance: float | None
    """Share of the proposed tokens; None if none were proposed."""
    wire_ms: float
    """Of a window on its way, all links together."""
    is_recent: bool
    """Whether this is of the time between the looks, not of all time."""


@click.command()
@head_options
@click.option(
    "--every",
    "interval_s",
    default=1.0,
    show_default=True,
    metavar="SECONDS",
    type=click.FloatRange(0.2, 60.0),
    help="Interval of updates.",
)
@click.option("--no-links", is_flag=True, help="Do not measure the links between hosts.")
@click.option(
    "--once", is_flag=True, help="Print one report over one interval and exit; for any terminal or file."
)
def top(url: str, api_key_file: Path | None, interval_s: float, *, no_links: bool, once: bool) -> None:
    """Show the load of a running mesh: times of each stage, links, acceptance, sessions, long prompts.

    Ctrl-C ends it, without effect on the mesh.
    """
    from rich.live import Live  # noqa: PLC0415

    from mesh.util.terminal import PrintableConsole  # noqa: PLC0415 - keeps --help quick

    watch = _Watch(url.rstrip("/"), key_of(api_key_file), has_links=not no_links)
    # Models and hosts may have any brackets in their names.
    console = PrintableConsole(markup=False)
    picture = watch.look()
    if once:
        time.sleep(interval_s)
        console.print(watch.look(), highlight=False)
        return
    if not console.is_terminal or console.is_dumb_terminal:
        raise click.UsageError("the terminal cannot show this view: use --once")
    try:
        with Live(picture, console=console, screen=True, auto_refresh=False) as live:
            while True:
                time.sleep(interval_s)
                live.update(watch.look(), refresh=True)
    except KeyboardInterrupt:
        return


def view(
    status: MeshStatus, pace: MeshPace, hops_ms: Mapping[tuple[str, str], float], head: str
) -> RenderableType:
    """The whole picture.

    Args:
        status: The latest.
        pace: What it did lately.
        hops_ms: One way, by the hosts at both ends; those that were measured.
        head: The coordinator's host.
    """
    parts: list[RenderableType] = [Text(_title(status))]
    if status.stages:
        parts += [_stages(status, pace, hops_ms, head), Text(_speed(status, pace))]
        parts += [Text(line) for line in prompt_lines(status)]
        parts += [Text(line) for line in _speculation(status, pace)]
    if status.recording is not None:
        parts.append(Text(f"recording: {recording_text(status.recording)}"))
    if len(status.models) > 1:
        parts.append(_models(status.models))
    parts.append(_hosts(status))
    if status.lost is not None:
        parts.append(Text(f"broken: {status.lost}"))
    return Group(*parts)


def _title(status: MeshStatus) -> str:
    model, sessions, repairs = status.model, status.sessions, status.repairs
    state = "ready" if status.ready else status.phase
    shown = (
        ""
        if sessions is None
        else f"; sessions: {sessions.running} of {sessions.slots}, {sessions.waiting} waiting"
    )
    healed = f"; repairs: {repairs.count}" if repairs.count else ""
    return f"{model.name}, {model.numeric_mode}: {state}{shown}{healed}"


def _stages(status: MeshStatus, pace: MeshPace, hops_ms: Mapping[tuple[str, str], float], head: str) -> Table:
    table = Table(
        "stage", "host", "layers", "compute ms", "queue ms", "queued", "busy", "wire ms to", box=None
    )
    stages = status.stages
    ways = [*pairwise(stage.host for stage in stages), (stages[-1].host, head)]
    for stage, its_pace, way in zip(stages, pace.stages, ways, strict=True):
        start, stop = stage.layers
        hop_ms = 0.0 if way[0] == way[1] else hops_ms.get(way)
        table.add_row(
            str(stage.index),
            stage.host,
            f"[{start}, {stop})",
            f"{its_pace.compute_ms:.2f}",
            f"{its_pace.queue_ms:.2f}",
            "-" if stage.queued_windows is None else str(stage.queued_windows),
            _bar(its_pace.busy),
            f"{'-' if hop_ms is None else format(hop_ms, '.2f')} {way[1]}",
        )
    return table


def _bar(share: float | None) -> str:
    if share is None:
        return "-"
    filled = round(share * _BAR_CHARS)
    return f"{'#' * filled}{'.' * (_BAR_CHARS - filled)} {share:4.0%}"


def _speed(status: MeshStatus, pace: MeshPace) -> str:
    rate = "" if pace.tokens_per_s is None else f"{pace.tokens_per_s:.1f} tokens/s; "
    if status.speculation is None:
        return f"{rate}no requests yet"
    when = "lately" if pace.is_recent else "so far"
    return f"{rate}a window, {when}: {pace.wire_ms:.1f} ms on the network"


def _speculation(status: MeshStatus, pace: MeshPace) -> list[str]:
    speculation = status.speculation
    if speculation is None or speculation.mode == "off":
        return ["speculation: off"]
    share = "nothing proposed" if pace.acceptance is None else f"{pace.acceptance:.0%} accepted"
    lines = [f"speculation: {speculation.mode}, {share}, {speculation.tokens_per_window:.2f} tokens a window"]
    places = speculation.acceptance_per_position
    if places:
        lines.append("  by position: " + " ".join(f"{each:.2f}" for each in places[:_BAR_CHARS]))
    for name, proposer in speculation.proposers.items():
        if depths := proposer.conditional_acceptance_per_depth:
            shown = " ".join(f"{each:.2f}" for each in depths[:_BAR_CHARS])
            lines.append(f"  {name} by depth, all before accepted: {shown}")
    if speculation.features is not None:
        lines.append(f"  features: {features_text(speculation.features)}")
    if speculation.tail_drafts is not None:
        lines.append(f"  drafts: {tail_drafts_text(speculation.tail_drafts)}")
    return lines


def _models(models: Sequence[ChatModelStatus | EmbeddingModelStatus]) -> Table:
    table = Table("model", "state", "sessions", "tokens", box=None)
    for model in models:
        if isinstance(model, EmbeddingModelStatus):
            running, num_tokens = f"{model.embeddings.waiting} waiting", model.embeddings.tokens
        else:
            sessions = model.sessions
            running = "-" if sessions is None else f"{sessions.running} of {sessions.slots}"
            num_tokens = 0 if model.tokens is None else model.tokens.generated
        table.add_row(model.name, state_text(model), running, str(num_tokens))
    return table


def _hosts(status: MeshStatus) -> Table:
    table = Table("host", "address", "holds", "memory", box=None)
    for host in status.hosts:
        table.add_row(host.name, host.address, holds_text(host), format_size(host.memory_bytes))
    return table


def pace_between(before: MeshStatus | None, now: MeshStatus, seconds: float) -> MeshPace:
    """Compare two statuses.

    A ring that was made anew in between, which counts from zero, is looked at as if for the first time.

    Args:
        before: The former one, if there is one.
        now: The latest.
        seconds: Between the two.
    """
    then = before if before is not None and is_same_ring(before, now) else None
    former: Sequence[StageStatus | None] = [None] * len(now.stages) if then is None else then.stages
    stages = tuple(_stage_pace(old, new, seconds) for old, new in zip(former, now.stages, strict=True))
    nothing = SpeculationStatus()
    new, old = now.speculation or nothing, (None if then is None else then.speculation) or nothing
    is_recent = then is not None and new.windows > old.windows
    if not is_recent:
        old = nothing
    # Sessions that end may be forgotten: nothing grows backwards.
    windows = max(0, new.windows - old.windows)
    proposed = max(0, new.proposed - old.proposed)
    accepted = max(0, new.accepted - old.accepted)
    tokens = _tokens(new) - _tokens(old)
    wire_ms = _wire_total_ms(new) - _wire_total_ms(old)
    return MeshPace(
        stages=stages,
        tokens_per_s=None if then is None else (tokens / seconds if is_recent and seconds > 0 else 0.0),
        acceptance=accepted / proposed if proposed else None,
        wire_ms=max(0.0, wire_ms / windows) if windows else 0.0,
        is_recent=is_recent,
    )


def is_same_ring(before: MeshStatus, now: MeshStatus) -> bool:
    """Whether the counters of two statuses are of one ring, not of one made anew between."""

    def ring(status: MeshStatus) -> list[tuple[str, tuple[int, int]]]:
        return [(stage.address, stage.layers) for stage in status.stages]

    return ring(before) == ring(now) and all(
        old.windows <= new.windows for old, new in zip(before.stages, now.stages, strict=True)
    )


def _stage_pace(old: StageStatus | None, new: StageStatus, seconds: float) -> StagePace:
    windows = new.windows - (0 if old is None else old.windows)
    if old is None or windows == 0:
        idle = None if old is None else 0.0
        return StagePace(new.mean_compute_ms, new.mean_queue_ms, idle, idle)
    compute_ms = new.windows * new.mean_compute_ms - old.windows * old.mean_compute_ms
    queue_ms = new.windows * new.mean_queue_ms - old.windows * old.mean_queue_ms
    return StagePace(
        compute_ms=max(0.0, compute_ms / windows),
        queue_ms=max(0.0, queue_ms / windows),
        busy=max(0.0, min(1.0, compute_ms / (seconds * 1e3))),
        windows_per_s=windows / seconds,
    )


def _tokens(speculation: SpeculationStatus) -> float:
    return speculation.windows * speculation.tokens_per_window


def _wire_total_ms(speculation: SpeculationStatus) -> float:
    return speculation.windows * speculation.mean_window_ms.network
