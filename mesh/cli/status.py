"""`mesh status` and its tables."""

from __future__ import annotations

import json
from datetime import datetime
from typing import TYPE_CHECKING, Any, Final

import click
from rich.table import Table

from mesh.cli.head_client import ask_head
from mesh.cli.shared_options import head_options, key_of
from mesh.util.console import PrintableConsole
from mesh.util.printable import say
from stages.units import format_size

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

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

    print_status(answer)


def print_status(status: Mapping[str, Any]) -> None:
    """Model, hosts, stages, sessions, speculation."""
    # Models, devices and reasons may have any brackets in them.
    console = PrintableConsole(markup=False)
    model = status.get("model", {})
    state = "ready" if status.get("ready") else status.get("phase", "not ready")
    console.print(
        f"{model.get('name', '?')}, {model.get('layers', '?')} layers, {model.get('numeric_mode', '?')}: "
        f"{state}",
        highlight=False,
        soft_wrap=True,
    )
    if status.get("plan"):
        console.print(f"plan: {status['plan']}", highlight=False, soft_wrap=True)
    console.print(_hosts(status.get("hosts", [])))
    if status.get("stages"):
        console.print(_stages(status["stages"]))
    _print_counts(console, status)
    _print_incidents(console, status)
    # Of one model everything is said above.
    if len(models := status.get("models", ())) > 1:
        console.print(_models(models))


def _hosts(hosts: list[Mapping[str, Any]]) -> Table:
    table = Table("host", "address", "layers", "weights", "memory", "threads", "GB/s", "GPUs", "platform")
    for host in hosts:
        table.add_row(
            host["name"],
            host["address"],
            _holds(host),
            _brought(host["weights"]),
            format_size(host["memory_bytes"]),
            str(host["threads"]),
            f"{host['speed_gb_per_s']:.1f}",
            _gpus(host),
            host["platform"],
        )
    return table


def _holds(host: Mapping[str, Any]) -> str:
    """Layers in the ring, those that it could take over at once, and whether it is on its way in or out."""
    parts = [host["layers"]] if host["layers"] else []
    if host["copies"]:
        parts.append(f"replicas of {', '.join(host['copies'])}")
    if not parts:
        parts.append("spare" if host["ready"] else "starting")
    if host["leaving"]:
        parts.append("leaving")
    return "; ".join(parts)


def _gpus(host: Mapping[str, Any]) -> str:
    """Name, memory and speed of each, in the order in which llama.cpp knows them."""
    found = (
        f"{gpu['name']}: {format_size(gpu['free_bytes'])}, {gpu['speed_gb_per_s']:.0f} GB/s"
        for gpu in host.get("gpus", ())
    )
    return "; ".join(found) or "-"


def _brought(weights: Mapping[str, int]) -> str:
    """Bytes that were sent there, and bytes that it had already."""
    sent_bytes = weights["head_bytes"] + weights["hub_bytes"]
    parts = [f"{format_size(sent_bytes)} sent"] if sent_bytes else []
    if weights["reused_bytes"]:
        parts.append(f"{format_size(weights['reused_bytes'])} there")
    return ", ".join(parts) or "-"


def _stages(stages: list[Mapping[str, Any]]) -> Table:
    table = Table("stage", "host", "address", "layers", "wire", "windows", "compute ms", "queue ms")
    for stage in stages:
        start, stop = stage["layers"]
        table.add_row(
            str(stage["index"]),
            stage["host"],
            stage["address"],
            f"[{start}, {stop})",
            stage["wire"] or "-",
            str(stage["windows"]),
            f"{stage['mean_compute_ms']:.2f}",
            f"{stage['mean_queue_ms']:.2f}",
        )
    return table


def _models(models: Sequence[Mapping[str, Any]]) -> Table:
    table = Table("model", "state", "stages", "sessions", "context", "numbers", "repairs")
    for model in models:
        facts, sessions, running = model.get("model", {}), model.get("sessions"), "-"
        if model.get("kind") == "embeddings":
            running = f"embeddings, {model['embeddings']['waiting']} waiting"
        elif sessions:
            running = f"{sessions['running']} of {sessions['slots']}, {sessions['waiting']} waiting"
        table.add_row(
            model["name"],
            "ready" if model.get("ready") else model.get("lost") or model.get("phase", "not ready"),
            " ".join(_place(stage) for stage in model.get("stages", ())) or "-",
            running,
            str(facts.get("context", "-")),
            facts.get("numeric_mode", "-"),
            str((model.get("repairs") or {}).get("count", 0)),
        )
    return table


def _place(stage: Mapping[str, Any]) -> str:
    start, stop = stage["layers"]
    return f"{stage['host']}[{start}, {stop})"


def _print_counts(console: PrintableConsole, status: Mapping[str, Any]) -> None:
    sessions, speculation = status.get("sessions"), status.get("speculation")
    if sessions:
        paused = f", {sessions['paused']} paused, not read by their clients" if sessions["paused"] else ""
        console.print(
            f"sessions: {sessions['running']} running of {sessions['slots']}{paused},"
            f" {sessions['waiting']} waiting{_groups(sessions)}",
            highlight=False,
            soft_wrap=True,
        )
    for line in prompt_lines(status):
        console.print(line, highlight=False, soft_wrap=True)
    if speculation:
        _print_speculation(console, speculation)
    if kv_disk := status.get("kv_disk"):
        console.print(f"kv disk: {kv_disk_text(kv_disk)}", highlight=False, soft_wrap=True)


def prompt_lines(status: Mapping[str, Any]) -> list[str]:
    """Prompts that are being read, the longest first; with the model's name if there are several."""
    models = status.get("models") or [status]
    reading = [
        (f"{model['name']} " if len(models) > 1 else "", prompt["read"], prompt["prompt"])
        for model in models
        for prompt in (model.get("sessions") or {}).get("prefill") or ()
    ]
    longest = sorted(reading, key=lambda each: -each[2])
    shown = [
        f"{name}{read:,} of {total:,} tokens ({read / total:.0%})"
        for name, read, total in longest[:_MOST_PROMPTS]
    ]
    more = len(longest) - len(shown)
    return [f"reading prompts: {', '.join(shown)}{f' and {more} more' if more else ''}"] if shown else []


def kv_disk_text(kv_disk: Mapping[str, Any]) -> str:
    """Blocks on the stages' disks: what is there, what it was used for, and what went wrong.

    Args:
        kv_disk: `kv_disk` of the status.
    """
    stages = [stage for stage in kv_disk["stages"] if stage is not None]
    files, size, damaged = (sum(stage[name] for stage in stages) for name in ("files", "bytes", "damaged"))
    off = "" if kv_disk["on"] else "; not used"
    used = f"{kv_disk['fetched_tokens']} tokens of {kv_disk['fetched']} requests restored"
    wrong = f"{kv_disk['failed']} fetches failed, {damaged} files damaged"
    return f"{files} files, {format_size(size)}; {used}, {wrong}{off}"


def _groups(sessions: Mapping[str, Any]) -> str:
    """Groups of decoding sessions, whose windows travel together."""
    if not (num_groups := sessions.get("groups", 0)):
        return ""
    return f", {num_groups} group{'s' * (num_groups > 1)} of at most {sessions['largest_group']}"


def _print_incidents(console: PrintableConsole, status: Mapping[str, Any]) -> None:
    repairs, failures = status.get("repairs"), status.get("failures", ())
    if repairs and (repairs["count"] or repairs["moves"]):
        last = f", the last in {repairs['last_s']:.1f} s" if repairs["last_s"] is not None else ""
        console.print(
            f"repairs: {repairs['count']}{last}; moves: {repairs['moves']}", highlight=False, soft_wrap=True
        )
    for failure in failures[-_SHOWN_FAILURES:]:
        when = datetime.fromtimestamp(failure["at_s"]).astimezone().strftime("%Y-%m-%d %H:%M:%S")
        what = f"  {when} {failure['host']} {failure['layers']}: {failure['reason']}"
        console.print(what, highlight=False, soft_wrap=True)


def features_text(features: Mapping[str, Any]) -> str:
    """Features of a status: received of wanted, their size, and the reason if they do not come.

    Args:
        features: `speculation.features` of the status.
    """
    off = f"; off: {features['off']}" if features.get("off") else ""
    return f"{features['received']} of {features['wanted']} rows, {format_size(features['bytes'])}{off}"


def _print_speculation(console: PrintableConsole, speculation: Mapping[str, Any]) -> None:
    counts = f"{speculation['accepted']} of {speculation['proposed']} proposed tokens accepted"
    void = f"{speculation['stale_rows']} rows void"
    lines = [f"speculation: {speculation['mode']}, {counts} in {speculation['windows']} windows, {void}"]
    for name, proposer in speculation["proposers"].items():
        lines.append(
            f"  {name}: {proposer['accepted']} of {proposer['drafted']} in {proposer['drafts']} drafts"
        )
    if features := speculation.get("features"):
        lines.append(f"  features: {features_text(features)}")
    times = speculation["mean_window_ms"]
    at_stages = f"{times['verify']:.2f} ms computing, {times['queue']:.2f} ms waiting at stages"
    lines.append(f"  a window: {at_stages}, {times['network']:.2f} ms on the network")
    for line in lines:
        console.print(line, highlight=False, soft_wrap=True)
