"""`mesh bench stress`: its options and output."""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING

import click

from mesh.bench.shared_options import (
    hang_ups_option,
    json_option,
    logs_option,
    model_argument,
    one_way_delay_option,
    output_option,
    report_on_sigterm,
    seed_option,
    serve_options_option,
    threads_option,
)
from mesh.cli.option_types import Names, Numbers
from stages.runtime.kv_types import KV_TYPES

if TYPE_CHECKING:
    from pathlib import Path

    from mesh.bench.stress.options import LineName, Preset

_RAMP = (1, 2, 4, 8, 16)
_QUICK_RAMP = (1, 4)
_QUICK_REQUESTS = 10
_CHATS = 24
_QUICK_CHATS = 6
_CTX_SIZE = 2560
# With keys: prompts of some hundred tokens at most.
_KEYS_CTX_SIZE = 1024
_KEYS_RAMP = (8,)
_KEYS_CHATS = 48
_QUICK_KEYS_CHATS = 10
# A 4k prompt beside a decoding session; SmolLM2's own limit.
_ACCEPTANCE_CTX_SIZE = 8192
_ACCEPTANCE_SLOTS = 16
_LINES: tuple[LineName, ...] = ("crowd", "limit", "prefill", "second-turn", "itl", "memory")


@click.command()
@model_argument
@click.option(
    "--preset",
    type=click.Choice(["ramp", "acceptance"]),
    default="ramp",
    show_default=True,
    help="A ramp of concurrent requests, or every line of the acceptance table.",
)
@click.option(
    "--lines",
    type=Names("line of the table", _LINES),
    default=_LINES,
    metavar="A,B,…",
    help="Lines of the acceptance table: crowd, limit, prefill, second-turn, itl, memory; all unless given.",
)
@click.option("--quick", is_flag=True, help="A run of about a minute: few and short chats, two steps.")
@click.option(
    "--hosts",
    "num_stages",
    type=click.IntRange(1),
    default=3,
    show_default=True,
    help="Hosts that hold layers.",
)
@one_way_delay_option
@click.option(
    "--concurrency",
    type=Numbers(int, 1, 256),
    metavar="A,B,…",
    help="Concurrent requests of each step; 1,2,4,8,16 unless given, 8 with --keys.",
)
@click.option(
    "--requests",
    "num_requests",
    type=click.IntRange(1),
    metavar="N",
    help="Requests of each step; 8 times its concurrency unless given.",
)
@click.option(
    "--duration-s",
    type=click.FloatRange(0.0, min_open=True),
    metavar="S",
    help="Duration of each step, instead of a number of requests.",
)
@click.option(
    "--keys",
    "num_keys",
    type=click.IntRange(1, 64),
    metavar="N",
    help="Instead of chats: clients with N API keys, whose requests share prefixes.",
)
@hang_ups_option(
    "Share of those requests whose client disconnects at a random moment; with one key unless --keys is"
    " given."
)
@click.option(
    "--soak",
    "soak_minutes",
    type=click.FloatRange(0.0),
    default=0.0,
    metavar="MINUTES",
    help="Duration of a steady load after all else.",
)
@click.option(
    "--soak-concurrency",
    type=click.IntRange(1),
    default=8,
    show_default=True,
    help="Concurrent requests of that load.",
)
@click.option(
    "--chats",
    "num_scripts",
    type=click.IntRange(1),
    help="Number of different chats; 24 unless given, 48 with --keys.",
)
@seed_option("chats, sampling and disconnects")
@click.option("--exact", is_flag=True, help="Exact mode: every text must equal the one generated alone.")
@click.option("--ctx-size", type=click.IntRange(256), metavar="N", help="Positions of one session.")
@click.option(
    "--parallel",
    "num_slots",
    type=click.IntRange(1, 64),
    metavar="N",
    help="Concurrent sessions; the highest concurrency unless given, more with --keys.",
)
@click.option(
    "--kv-type",
    type=click.Choice(list(KV_TYPES)),
    default="f16",
    show_default=True,
    help="Format of the mesh's KV caches; the peer's are f16.",
)
@threads_option
@click.option(
    "--speculate",
    type=click.Choice(["auto", "off", "ngram"]),
    help="Proposer: off unless given, auto with --keys; the peer has none.",
)
@serve_options_option
@click.option("--peer", type=click.Choice(["rpc"]), help="Also measure llama.cpp RPC on the same hosts.")
@click.option(
    "--rounds",
    type=click.IntRange(1),
    default=3,
    show_default=True,
    help="Repetitions of each measurement of the acceptance table, whose medians are reported.",
)
@output_option("bench-stress")
@logs_option
@json_option
def stress(
    *,
    model: Path | None,
    preset: Preset,
    lines: tuple[LineName, ...],
    quick: bool,
    num_stages: int,
    delay_ms: float,
    concurrency: tuple[int, ...] | None,
    num_requests: int | None,
    duration_s: float | None,
    num_keys: int | None,
    hang_up_share: float,
    soak_minutes: float,
    soak_concurrency: int,
    num_scripts: int | None,
    seed: int,
    exact: bool,
    ctx_size: int | None,
    num_slots: int | None,
    kv_type: str,
    num_threads: int,
    speculate: str | None,
    serve_options: str,
    peer: str | None,
    rounds: int,
    output: Path,
    logs: Path | None,
    is_json: bool,
) -> None:
    """Load a mesh over several lab hosts that serves MODEL, a GGUF file; without MODEL, the demo's.

    Every request is answered alone first. Then the number of concurrent users rises, step by step: chats of
    one to three turns, of mixed length, greedy and sampled. Every answer is checked, the memory of every
    process is recorded, and at the end no session may be open at any stage. With --keys the requests are
    single ones with common prefixes, streamed or in one piece, and a share of the clients disconnects: before
    the first token, during the answer or at its end. Writes report.md, report.json and plots. Exits with 1 if
    a check failed.
    """
    if duration_s is not None and num_requests is not None:
        raise click.UsageError("--duration-s and --requests both give the length of a step: leave one out")
    if quick and preset != "ramp":
        raise click.UsageError("--quick is itself a preset: leave out --preset")
    num_keys = num_keys or int(hang_up_share > 0)
    if num_keys and (preset != "ramp" or peer or soak_minutes or duration_s):
        raise click.UsageError(
            "--keys and --hang-ups are a load of their own, of as many requests as --requests says: leave out"
            " --preset, --peer, --soak and --duration-s"
        )
    from mesh.bench.stress.options import StressOptions  # noqa: PLC0415
    from mesh.bench.stress.report import as_json, as_text  # noqa: PLC0415 - keeps --help quick
    from mesh.bench.stress.run import run_stress  # noqa: PLC0415
    from mesh.bench.stress.scripts import num_slots_for  # noqa: PLC0415
    from mesh.serve.options import demo_model  # noqa: PLC0415

    steps = concurrency or (_QUICK_RAMP if quick else _KEYS_RAMP if num_keys else _RAMP)
    is_acceptance = preset == "acceptance"
    most = max(_ACCEPTANCE_SLOTS if is_acceptance else max(steps), soak_concurrency if soak_minutes else 1)
    if num_keys:
        most = num_slots_for(most, num_keys)
        num_chats, usual_ctx_size = _QUICK_KEYS_CHATS if quick else _KEYS_CHATS, _KEYS_CTX_SIZE
    else:
        num_chats = _QUICK_CHATS if quick else _CHATS
        usual_ctx_size = _ACCEPTANCE_CTX_SIZE if is_acceptance else _CTX_SIZE
    report_on_sigterm()
    report = run_stress(
        StressOptions(
            model=model or demo_model(),
            preset=preset,
            lines=lines,
            num_stages=num_stages,
            delay_ms=delay_ms,
            concurrency=steps,
            num_requests=num_requests or (_QUICK_REQUESTS if quick and duration_s is None else None),
            duration_s=duration_s,
            soak_minutes=soak_minutes,
            soak_concurrency=soak_concurrency,
            num_scripts=num_scripts or num_chats,
            is_short=quick,
            seed=seed,
            exact=exact,
            ctx_size=ctx_size or usual_ctx_size,
            num_slots=num_slots or min(most, 64),
            kv_type=kv_type,
            num_threads=num_threads,
            speculate=speculate or ("auto" if num_keys else "off"),
            serve_options=tuple(shlex.split(serve_options)),
            num_keys=num_keys,
            hang_up_share=hang_up_share,
            with_rpc=peer == "rpc",
            rounds=rounds,
            output=output,
            logs=logs,
        )
    )
    click.echo(as_json(report) if is_json else as_text(report))
    if not is_json:
        click.echo(f"report: {output / 'report.md'}")
    if not report.is_good:
        click.get_current_context().exit(1)
