"""`mesh status` and its tables."""

from __future__ import annotations

import json
from datetime import datetime
from typing import TYPE_CHECKING, Final

import click
from rich.table import Table

from mesh.cli.head_client import ask_head
from mesh.cli.shared_options import head_options, key_of
from mesh.status import ChatModelStatus, EmbeddingModelStatus, read_status
from mesh.util.printable import say
from mesh.util.terminal import PrintableConsole
from stages.units import format_size

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from mesh.status import (
        EmbeddingStageStatus,
        FeatureStatus,
        HostStatus,
        KvDiskStatus,
        MeshStatus,
        ModelDescription,
        RecordingStatus,
        SessionsStatus,
        SpeculationStatus,
        StageStatus,
        TailDraftStatus,
        TuningStatus,
        WeightsStatus,
    )

_SHOWN_FAILURES: Final = 5
_MOST_PROMPTS: Final = 4


@click.command()
@head_options
@click.option("--json", "is_json", is_flag=True, help="Print the API's JSON answer.")
def status(url: str, api_key_file: Path | None, *, is_json: bool) -> None:
    """Show a running mesh: its hosts, its stages and their times."""
    answer = ask_head(url.rstrip("/") + "/mesh/status", key_of(api_key_file))
    if is_json:
        say(json.dumps(answer, indent=2))
        return

    print_status(read_status(answer))


def print_status(status: MeshStatus) -> None:
    """Model, hosts, stages, sessions, speculation."""
    # Models, devices and reasons may have any brackets in them.
    console = PrintableConsole(markup=False)
    model, state = status.model, "ready" if status.ready else status.phase or "not ready"
    num_layers = "?" if model.layers is None else model.layers
    console.print(
        f"{model.name}, {num_layers} layers, {model.numeric_mode}: {state}", highlight=False, soft_wrap=True
    )
    if status.plan:
        console.print(f"plan: {status.plan}", highlight=False, soft_wrap=True)
    if model.projector is not None:
        console.print(_pictures(model), highlight=False, soft_wrap=True)
    console.print(_hosts(status.hosts))
    if status.stages:
        console.print(_stages(status.stages))
    _print_counts(console, status)
    _print_incidents(console, status)
    # Of one model everything is said above.
    if len(status.models) > 1:
        console.print(_models(status.models))


def _pictures(model: ModelDescription) -> str:
    """The projector of a model, where it computes, and the memory that it takes there."""
    device = "" if model.projector_device is None else f"'s {model.projector_device}"
    where = f"on {model.projector_host}{device}" if model.projector_host is not None else "on the head"
    size = "" if model.projector_bytes is None else f", {format_size(model.projector_bytes)}"
    return f"pictures: {model.projector} {where}{size}"


def _hosts(hosts: Sequence[HostStatus]) -> Table:
    table = Table("host", "address", "layers", "weights", "memory", "threads", "GB/s", "GPUs", "platform")
    for host in hosts:
        table.add_row(
            host.name,
            host.address,
            holds_text(host),
            _brought(host.weights),
            format_size(host.memory_bytes),
            str(host.threads),
            f"{host.speed_gb_per_s:.1f}",
            _gpus(host),
            host.platform,
        )
    return table


def holds_text(host: HostStatus) -> str:
    """Layers in the ring, those that it could take over at once, and whether it is on its way in or out."""
    parts = [host.layers] if host.layers else []
    if host.copies:
        parts.append(f"replicas of {', '.join(host.copies)}")
    if not parts:
        parts.append("spare" if host.ready else "starting")
    if host.leaving:
        parts.append("leaving")
    return "; ".join(parts)


def _gpus(host: HostStatus) -> str:
    """Name, memory and speed of each, in the order in which llama.cpp knows them."""
    found = (f"{gpu.name}: {format_size(gpu.free_bytes)}, {gpu.speed_gb_per_s:.0f} GB/s" for gpu in host.gpus)
    return "; ".join(found) or "-"


def _brought(weights: WeightsStatus) -> str:
    """Bytes that were sent there, and bytes that it had already."""
    sent_bytes = weights.head_bytes + weights.hub_bytes
    parts = [f"{format_size(sent_bytes)} sent"] if sent_bytes else []
    if weights.reused_bytes:
        parts.append(f"{format_size(weights.reused_bytes)} there")
    return ", ".join(parts) or "-"


def _stages(stages: Sequence[StageStatus]) -> Table:
    table = Table("stage", "host", "address", "layers", "wire", "windows", "compute ms", "queue ms")
    for stage in stages:
        start, stop = stage.layers
        table.add_row(
            str(stage.index),
            stage.host,
            stage.address,
            f"[{start}, {stop})",
            stage.wire or "-",
            str(stage.windows),
            f"{stage.mean_compute_ms:.2f}",
            f"{stage.mean_queue_ms:.2f}",
        )
    return table


def _models(models: Sequence[ChatModelStatus | EmbeddingModelStatus]) -> Table:
    table = Table("model", "state", "stages", "sessions", "context", "numbers", "repairs")
    for model in models:
        context = model.model.context
        table.add_row(
            model.name,
            state_text(model) or "not ready",
            " ".join(_place(stage) for stage in model.stages) or "-",
            _use(model),
            "-" if context is None else str(context),
            model.model.numeric_mode,
            str(model.repairs.count),
        )
    return table


def state_text(model: ChatModelStatus | EmbeddingModelStatus) -> str:
    """Whether a model is ready; otherwise why it is not, or its current step."""
    lost = model.lost if isinstance(model, ChatModelStatus) else None
    return "ready" if model.ready else lost or model.phase


def _use(model: ChatModelStatus | EmbeddingModelStatus) -> str:
    if isinstance(model, EmbeddingModelStatus):
        return f"embeddings, {model.embeddings.waiting} waiting"
    if (sessions := model.sessions) is None:
        return "-"
    return f"{sessions.running} of {sessions.slots}, {sessions.waiting} waiting"


def _place(stage: StageStatus | EmbeddingStageStatus) -> str:
    start, stop = stage.layers
    return f"{stage.host}[{start}, {stop})"


def _print_counts(console: PrintableConsole, status: MeshStatus) -> None:
    if (sessions := status.sessions) is not None:
        paused = f", {sessions.paused} paused, not read by their clients" if sessions.paused else ""
        console.print(
            f"sessions: {sessions.running} running of {sessions.slots}{paused},"
            f" {sessions.waiting} waiting{_groups(sessions)}",
            highlight=False,
            soft_wrap=True,
        )
    for line in prompt_lines(status):
        console.print(line, highlight=False, soft_wrap=True)
    if status.speculation is not None:
        _print_speculation(console, status.speculation)
    if status.kv_disk is not None:
        console.print(f"kv disk: {kv_disk_text(status.kv_disk)}", highlight=False, soft_wrap=True)
    if status.recording is not None:
        console.print(f"recording: {recording_text(status.recording)}", highlight=False, soft_wrap=True)
    if status.tuning is not None:
        console.print(f"tuning: {tuning_text(status.tuning)}", highlight=False, soft_wrap=True)


def prompt_lines(status: MeshStatus) -> list[str]:
    """Prompts that are being read, the longest first; with the model's name if there are several."""
    models = status.models or (status,)
    reading = [
        (f"{model.name} " if len(models) > 1 else "", prompt.read, prompt.prompt)
        for model in models
        if isinstance(model, ChatModelStatus) and model.sessions is not None
        for prompt in model.sessions.prefill
    ]
    longest = sorted(reading, key=lambda each: -each[2])
    shown = [
        f"{name}{read:,} of {total:,} tokens ({read / total:.0%})"
        for name, read, total in longest[:_MOST_PROMPTS]
    ]
    more = len(longest) - len(shown)
    return [f"reading prompts: {', '.join(shown)}{f' and {more} more' if more else ''}"] if shown else []


def kv_disk_text(kv_disk: KvDiskStatus) -> str:
    """Blocks on the stages' disks: what is there, what it was used for, and what went wrong."""
    stages = [stage for stage in kv_disk.stages if stage is not None]
    there = (
        f"{sum(stage.files for stage in stages)} files, {format_size(sum(stage.bytes for stage in stages))}"
    )
    used = f"{kv_disk.fetched_tokens} tokens of {kv_disk.fetched} requests restored"
    num_damaged = sum(stage.damaged for stage in stages)
    wrong = f"{kv_disk.failed} fetches failed, {num_damaged} files damaged"
    return f"{there}; {used}, {wrong}{'' if kv_disk.on else '; not used'}"


def recording_text(recording: RecordingStatus) -> str:
    """Recorded answers: what is there, and what was left out, with the reason."""
    there = f"{recording.conversations} answers of {recording.tokens:,} tokens"
    size = f"{format_size(recording.bytes)} of {format_size(recording.most_bytes)}"
    off = f"; off: {recording.off}" if recording.off else ""
    return f"{there}, {size}; {recording.left_out} left out, {recording.erased} erased{off}"


def tuning_text(tuning: TuningStatus) -> str:
    """The drafter of a group: what it is, what is learned next, and what became of the latest candidate."""
    served = "is served with the untuned drafter"
    if tuning.drafter is not None:
        learned = f"{tuning.learned_tokens:,} tokens of {tuning.learned_prompts} prompts"
        age = f"{(tuning.age_s or 0) / 3600:.1f} hours old"
        gained = f"{tuning.gain or 0.0:+.3f} accepted a window"
        served = f"is served with {tuning.drafter}, {age}, {gained}, learned from {learned}"
    step = f", {tuning.step}" if tuning.step else ""
    new = f"{tuning.new_tokens:,} new tokens, {tuning.new_prompts} new prompts"
    counts = f"{tuning.chosen} chosen, {tuning.refused} refused, {tuning.gone_back} gone back"
    latest = f"; latest: {tuning.latest}" if tuning.latest else ""
    return f"group {tuning.group} {served}; {tuning.state}{step}; {new}; {counts}{latest}"


def _groups(sessions: SessionsStatus) -> str:
    """Groups of decoding sessions, whose windows travel together."""
    if not (num_groups := sessions.groups):
        return ""
    return f", {num_groups} group{'s' * (num_groups > 1)} of at most {sessions.largest_group}"


def _print_incidents(console: PrintableConsole, status: MeshStatus) -> None:
    repairs = status.repairs
    if repairs.count or repairs.moves:
        last = f", the last in {repairs.last_s:.1f} s" if repairs.last_s is not None else ""
        console.print(
            f"repairs: {repairs.count}{last}; moves: {repairs.moves}", highlight=False, soft_wrap=True
        )
    for failure in status.failures[-_SHOWN_FAILURES:]:
        when = datetime.fromtimestamp(failure.at_s).astimezone().strftime("%Y-%m-%d %H:%M:%S")
        what = f"  {when} {failure.host} {failure.layers}: {failure.reason}"
        console.print(what, highlight=False, soft_wrap=True)


def features_text(features: FeatureStatus) -> str:
    """Features of a status: received of wanted, their size, and the reason if they do not come."""
    off = f"; off: {features.off}" if features.off else ""
    return f"{features.received} of {features.wanted} rows, {format_size(features.bytes)}{off}"


def tail_drafts_text(drafts: TailDraftStatus) -> str:
    """Drafts of a status, and the reason if none come."""
    off = f"; off: {drafts.off}" if drafts.off else ""
    return f"{drafts.drafts} of {drafts.tokens} tokens beside the last stage{off}"


def _print_speculation(console: PrintableConsole, speculation: SpeculationStatus) -> None:
    counts = f"{speculation.accepted} of {speculation.proposed} proposed tokens accepted"
    void = f"{speculation.stale_rows} rows void"
    lines = [f"speculation: {speculation.mode}, {counts} in {speculation.windows} windows, {void}"]
    for name, proposer in speculation.proposers.items():
        lines.append(f"  {name}: {proposer.accepted} of {proposer.drafted} in {proposer.drafts} drafts")
    if speculation.features is not None:
        lines.append(f"  features: {features_text(speculation.features)}")
    if speculation.tail_drafts is not None:
        lines.append(f"  drafts: {tail_drafts_text(speculation.tail_drafts)}")
    times = speculation.mean_window_ms
    at_stages = f"{times.verify:.2f} ms computing, {times.queue:.2f} ms waiting at stages"
    lines.append(f"  a window: {at_stages}, {times.network:.2f} ms on the network")
    for line in lines:
        console.print(line, highlight=False, soft_wrap=True)
