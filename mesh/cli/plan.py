"""`mesh plan` and its tables."""

from __future__ import annotations

import json
import socket
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast

import click
from rich.table import Table

from mesh.cli.head_client import ask_head
from mesh.cli.options import options_of
from mesh.cli.shared_options import int_option, key_of, local_model, picture_needs
from mesh.options.host import HostOptions
from mesh.options.model import ModelOptions
from mesh.util.child_environment import API_KEY
from mesh.util.printable import say
from mesh.util.terminal import PrintableConsole
from stages.units import format_size

if TYPE_CHECKING:
    from collections.abc import Mapping

    from mesh.forecast.cost_model import Forecast
    from mesh.forecast.dry_run import DryRun, PlanningContext
    from stages.runtime.process_memory import StageMemory


_FILE = click.Path(path_type=Path, dir_okay=False)


@click.command()
@click.argument("model", type=click.Path(path_type=Path))
@click.option("--url", help="Plan for the hosts of the mesh with this URL; run it on its head.")
@click.option(
    "--api-key-file", type=_FILE, help=f"File whose first key is sent to that API; or set {API_KEY}."
)
@click.option(
    "--host-spec",
    "host_specs",
    multiple=True,
    metavar="NAME:MEM[:GB/s[:THREADS]]",
    help="Plan for a host with these properties, the head first; may be given several times.",
)
@click.option("--hosts-file", type=_FILE, help="Plan for the hosts of this TOML file, tables [[host]].")
@click.option(
    "--rtt-ms",
    default=0.5,
    show_default=True,
    metavar="MS",
    type=click.FloatRange(0),
    help="Round trip between any two of the given hosts.",
)
@options_of(ModelOptions, "draft_path", "stages", "split")
@click.option("--topology", type=_FILE, help="TOML file that fixes the placement, tables [[stage]].")
@options_of(
    ModelOptions, "mmproj", "image_max_tokens", "ctx_size", "parallel", "kv_type", "checkpoints", "exact"
)
@options_of(HostOptions, "threads", "memory_bytes", "gpu_layers", "cpu_moe", "n_cpu_moe")
@int_option(
    "--prompt-tokens",
    most=4096,
    default=128,
    metavar="N",
    help="Length of the prompt for the predicted time to first token.",
)
@click.option("--no-timing", is_flag=True, help="Place layers only: no timing, no prediction.")
@click.option("--json", "is_json", is_flag=True, help="Print the plan as JSON.")
def plan(
    *,
    model: Path,
    url: str | None,
    api_key_file: Path | None,
    host_specs: tuple[str, ...],
    hosts_file: Path | None,
    rtt_ms: float,
    stages: int | None,
    split: tuple[int, ...] | None,
    draft_path: Path | None,
    topology: Path | None,
    mmproj: str,
    image_max_tokens: int,
    ctx_size: int | None,
    parallel: int,
    kv_type: str,
    checkpoints: int,
    exact: bool,
    threads: int | None,
    memory_bytes: int | None,
    gpu_layers: int | None,
    cpu_moe: bool,
    n_cpu_moe: int | None,
    prompt_tokens: int,
    no_timing: bool,
    is_json: bool,
) -> None:
    """Show how `mesh serve` would place MODEL, a GGUF file: a dry run.

    Prints the layers and the memory of each host, hosts that are left out and the reason, and the expected
    speed of one session without speculation. For this host alone, for hypothetical hosts, or with --url for
    those of a running mesh, as if it served nothing. No weights are loaded or sent: hosts compute shortly in
    stages with blank weights.
    """
    if len([each for each in (stages, split, topology) if each is not None]) > 1:
        raise click.UsageError("--stages, --split and --topology each give the cuts: leave out all but one")
    if len([each for each in (url, host_specs or None, hosts_file) if each is not None]) > 1:
        raise click.UsageError(
            "--url, --host-spec and --hosts-file each give the hosts: leave out all but one"
        )
    from mesh.draft.memory import bytes_beside, facts_with  # noqa: PLC0415 - keeps --help quick
    from mesh.forecast.dry_run import DryRunOptions, dry_run  # noqa: PLC0415
    from mesh.placement.gpu_layers import parse_cpu_moe  # noqa: PLC0415
    from mesh.placement.memory_estimate import Workload  # noqa: PLC0415
    from mesh.placement.topology import read_topology  # noqa: PLC0415
    from mesh.serve.options import ctx_size_for  # noqa: PLC0415
    from mesh.text.text_service import text_bytes_of, worker_bytes  # noqa: PLC0415
    from stages.runtime.kv_types import check_kv_type  # noqa: PLC0415
    from stages.slicing.source_model import read_source  # noqa: PLC0415

    draft = None if draft_path is None else local_model(draft_path).path
    facts, drafter = facts_with(model, draft, parallel)
    check_kv_type(kv_type, facts.name, facts.head_widths, option="--kv-type")
    pictures = picture_needs(mmproj, model, most_tokens=image_max_tokens, is_tried=not no_timing)
    workload = Workload(
        ctx_size_for(ctx_size, facts.n_ctx_train),
        parallel,
        kv_type,
        exact,
        num_checkpoints=0 if facts.can_trim else checkpoints,
        most_at_once=pictures.most_at_once,
    )
    options = DryRunOptions(
        workload=workload,
        worker_bytes=worker_bytes(),
        text_bytes=text_bytes_of(model),
        draft_bytes=bytes_beside(drafter, model, workload.ctx_size, parallel),
        picture_bytes=pictures.num_bytes,
        are_pictures_measured=pictures.is_measured,
        num_stages=stages,
        split=split,
        topology=None if topology is None else read_topology(topology),
        prompt_tokens=_prompt_tokens(prompt_tokens, ctx_size or facts.n_ctx_train),
        is_timed=not no_timing,
        chooses_context=ctx_size is None,
    )
    if url is not None:
        context = _running(url, key_of(api_key_file))
    else:
        this_host = {
            "memory_bytes": memory_bytes,
            "num_threads": threads,
            "gpu_layers": 0 if exact else gpu_layers,
            "cpu_moe_layers": parse_cpu_moe(n_cpu_moe, is_all=cpu_moe),
        }
        context = _without_a_mesh(host_specs, hosts_file, rtt_ms, this_host)
    found = dry_run(read_source(model), facts, context, options)
    if is_json:
        say(json.dumps(found.as_dict(), indent=2))
        return

    print_plan(found)


def _prompt_tokens(wanted: int, ctx_size: int) -> int:
    """A prompt that leaves room for an answer."""
    return max(1, min(wanted, ctx_size - 1))


def _running(url: str, key: str | None) -> PlanningContext:
    from mesh.forecast.hypothetical_hosts import running_mesh  # noqa: PLC0415 - keeps --help quick

    def ask(path: str, body: Mapping[str, Any] | None, method: str, timeout_s: float) -> dict[str, Any]:
        kind = cast("Literal['GET', 'POST']", method)
        return ask_head(url.rstrip("/") + path, key, method=kind, body=body, timeout_s=timeout_s)

    return running_mesh(ask)


def _without_a_mesh(
    host_specs: tuple[str, ...],
    hosts_file: Path | None,
    rtt_ms: float,
    wanted: Mapping[str, int | None],
) -> PlanningContext:
    """Hosts that the command names, or this one.

    Args:
        host_specs: Values of --host-spec.
        hosts_file: Value of --hosts-file.
        rtt_ms: Round trip between them.
        wanted: Arguments of `read_host_facts` for this host, where stages are timed.
    """
    from mesh.cluster.host_facts import read_host_facts  # noqa: PLC0415 - keeps --help quick
    from mesh.forecast.hypothetical_hosts import (  # noqa: PLC0415
        equal_links,
        hosts_on_paper,
        parse_host_spec,
        read_hosts_file,
        this_host,
    )

    facts = read_host_facts(**wanted)
    if hosts_file is not None:
        hosts = read_hosts_file(
            hosts_file, speed_gb_per_s=facts.speed_gb_per_s, num_threads=facts.num_threads
        )
    elif host_specs:
        hosts = tuple(
            parse_host_spec(spec, speed_gb_per_s=facts.speed_gb_per_s, num_threads=facts.num_threads)
            for spec in host_specs
        )
    else:
        return this_host(socket.gethostname(), facts)
    return hosts_on_paper(hosts, equal_links(hosts, rtt_ms), facts)


def _for_pictures(found: DryRun) -> str:
    if not found.picture_bytes:
        return ""
    how = "measured" if found.are_pictures_measured else "estimated: --no-timing"
    return f", and {format_size(found.picture_bytes)} for pictures ({how})"


def print_plan(found: DryRun) -> None:
    """Print stages, hosts without stages, and the forecast."""
    # A model's name may contain brackets.
    console = PrintableConsole(markup=False)
    model = found.model
    console.print(
        f"{model.name} ({model.architecture}), {model.layer_count}, {format_size(model.file_bytes)}",
        highlight=False,
        soft_wrap=True,
    )
    console.print(f"plan: {found.plan.reason}", highlight=False, soft_wrap=True)
    if found.context is not None:
        console.print(str(found.context), highlight=False, soft_wrap=True)
    console.print(_stages(found))
    for index, stage in enumerate(found.plan.stages):
        if stage.memory.gpus:
            console.print(f"stage {index}: {_on_gpus(stage.memory)}", highlight=False, soft_wrap=True)
    console.print(
        f"{found.head}, the head: {format_size(found.worker_bytes + found.text_bytes)} for processes that "
        f"read texts and bodies, {format_size(found.text_bytes)} of it for the vocabulary"
        + (f", and {format_size(found.draft_bytes)} for the drafter" if found.draft_bytes else "")
        + _for_pictures(found),
        highlight=False,
        soft_wrap=True,
    )
    for host, reason in found.left_out.items():
        console.print(f"{host} is left out: {reason}", highlight=False, soft_wrap=True)
    if found.forecast is not None:
        _print_forecast(console, found.forecast)
    if found.q8_0_cache_bytes is not None:
        held = sum(stage.memory.cache_bytes for stage in found.plan.stages)
        console.print(
            f"--kv-type q8_0 would need {format_size(found.q8_0_cache_bytes)} for the KV caches instead of "
            f"{format_size(held)}, in about the same time; answers may differ a little",
            highlight=False,
            soft_wrap=True,
        )
    console.print(found.basis, highlight=False, soft_wrap=True)


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


def _on_gpus(memory: StageMemory) -> str:
    """Parts of a stage on GPUs, and parts of those layers elsewhere."""
    shares = ", ".join(
        f"{share.num_layers} layers and {format_size(share.total_bytes)} on {share.device}"
        for share in memory.gpus
    )
    experts = f"; the processor keeps the experts of its first {memory.cpu_moe_layers} layers"
    return shares + (experts if memory.cpu_moe_layers else "")


def _print_forecast(console: PrintableConsole, expected: Forecast) -> None:
    parts = (
        f"{expected.compute_ms:.1f} ms computing, {expected.wire_ms:.1f} ms on the wire, "
        f"{expected.handling_ms:.1f} ms handling"
    )
    console.print(
        f"one session, no speculation: {expected.tokens_per_s:.1f} tokens/s ({parts} a token), "
        f"{1e3 / expected.last_token_ms:.1f} behind {expected.most_positions:,} positions; first token of a "
        f"{expected.prompt_tokens}-token prompt after {expected.ttft_ms / 1e3:.2f} s",
        highlight=False,
        soft_wrap=True,
    )
