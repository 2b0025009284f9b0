"""`mesh bench stress`: its options and output."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import click

from mesh.cli.shared_options import Names, Numbers, choice_option, float_option, int_option
from meshbench import shared_options
from meshbench.experiment import experiment
from meshbench.under_test.options import remote_options, target_of
from stages.runtime.kv_types import KV_TYPES

if TYPE_CHECKING:
    from pathlib import Path

    from meshbench.http_client import Server
    from meshbench.report_tools import Report
    from meshbench.stress.options import LineName, Preset

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
_ACCEPTANCE_SLOTS = 32
_LINES: tuple[LineName, ...] = (
    *("crowd", "limit", "wider", "prefill", "second-turn", "itl", "context", "memory"),
)
# Parameters of the hosts and of the mesh that is started on them.
_LAB_ONLY: Final = (
    *("num_stages", "delay_ms", "jitter_ms", "loss", "mbit_per_s", "is_pinned", "peer", "against", "logs"),
    *("num_keys", "exact", "ctx_size", "num_slots", "kv_type", "num_threads", "serve_options"),
)


@click.command()
@shared_options.model_argument
@remote_options
@choice_option(
    "--preset",
    choices=("ramp", "acceptance"),
    default="ramp",
    help="A ramp of concurrent requests, or every line of the acceptance table.",
)
@click.option(
    "--lines",
    type=Names("line of the table", _LINES),
    default=_LINES,
    metavar="A,B,…",
    help="Lines of the acceptance table: crowd, limit, wider, prefill, second-turn, itl, context, memory; "
    "all unless given.",
)
@click.option(
    "--contexts",
    type=Numbers(int, 1),
    default=(200, 4000, 16000),
    metavar="A,B,…",
    help="Words of the prompts behind which the line context measures tokens; 200,4000,16000 unless given, "
    "of which those are left out that --ctx-size does not hold.",
)
@click.option("--quick", is_flag=True, help="A run of about a minute: few and short chats, two steps.")
@int_option("--hosts", "num_stages", default=3, help="Hosts that hold layers.")
@shared_options.network_options
@click.option(
    "--concurrency",
    type=Numbers(int, 1, 256),
    metavar="A,B,…",
    help="Concurrent requests of each step; 1,2,4,8,16 unless given, 8 with --keys.",
)
@int_option(
    "--requests",
    "num_requests",
    metavar="N",
    help="Requests of each step; 8 times its concurrency unless given.",
)
@click.option(
    "--duration-s",
    type=click.FloatRange(0.0, min_open=True),
    metavar="S",
    help="Duration of each step, instead of a number of requests.",
)
@int_option(
    "--keys",
    "num_keys",
    most=64,
    metavar="N",
    help="Instead of chats: clients with N API keys, whose requests share prefixes.",
)
@shared_options.hang_ups_option(
    "Share of those requests whose client disconnects at a random moment; with one key unless --keys is "
    "given."
)
@float_option(
    "--soak",
    "soak_minutes",
    default=0.0,
    show_default=False,
    metavar="MINUTES",
    help="Duration of a steady load after all else.",
)
@int_option("--soak-concurrency", default=8, help="Concurrent requests of that load.")
@int_option("--chats", "num_scripts", help="Number of different chats; 24 unless given, 48 with --keys.")
@shared_options.seed_option("Seed of chats, sampling and disconnects.")
@click.option("--exact", is_flag=True, help="Exact mode: every text must equal the one generated alone.")
@int_option("--ctx-size", least=256, metavar="N", help="Positions of one session.")
@int_option(
    "--parallel",
    "num_slots",
    most=64,
    metavar="N",
    help="Concurrent sessions; the highest concurrency unless given, more with --keys.",
)
@choice_option(
    "--kv-type", choices=KV_TYPES, default="f16", help="Format of the mesh's KV caches; the peer's are f16."
)
@shared_options.threads_option
@click.option(
    "--speculate",
    type=click.Choice(["auto", "off", "ngram"]),
    help="Proposer: off unless given, auto with --keys; the peer has none.",
)
@shared_options.serve_option
@click.option("--peer", type=click.Choice(["rpc"]), help="Also measure llama.cpp RPC on the same hosts.")
@shared_options.against_option
@int_option(
    "--rounds",
    default=3,
    help="Repetitions of each measurement of the acceptance table, whose medians are reported.",
)
@shared_options.goodput_option
@shared_options.output_option("bench-stress")
@shared_options.logs_option()
@shared_options.json_option
@click.pass_context
@experiment
def stress(
    context: click.Context,
    /,
    *,
    model: Path | None,
    server: Server | None,
    model_name: str | None,
    api_key_file: Path | None,
    links_file: Path | None,
    preset: Preset,
    quick: bool,
    concurrency: tuple[int, ...] | None,
    num_requests: int | None,
    duration_s: float | None,
    num_keys: int | None,
    hang_up_share: float,
    soak_minutes: float,
    soak_concurrency: int,
    num_scripts: int | None,
    ctx_size: int | None,
    num_slots: int | None,
    speculate: str | None,
    peer: str | None,
    against: Path | None,
    output: Path,
    **given: Any,
) -> Report:
    """Load a mesh over several lab hosts that serves MODEL, or the demo's; with --url, a running mesh.

    Of a running mesh, on any hosts, it measures what can be measured from outside, and the links.

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
    target = target_of(
        context,
        server=server,
        model=model,
        model_name=model_name,
        api_key_file=api_key_file,
        links_file=links_file,
        lab_only=_LAB_ONLY,
    )
    num_keys = num_keys or int(hang_up_share > 0)
    if peer and against:
        raise click.UsageError(
            "--peer and --against each name what is measured beside the mesh: leave one out"
        )
    if num_keys and (preset != "ramp" or peer or against or soak_minutes or duration_s):
        raise click.UsageError(
            "--keys and --hang-ups are a load of their own, of as many requests as --requests says: leave out"
            " --preset, --peer, --soak and --duration-s"
        )
    from mesh.serve.options import demo_model  # noqa: PLC0415
    from meshbench.stress.options import RemoteStressOptions, StressOptions  # noqa: PLC0415
    from meshbench.stress.remote_run import run_remote_stress  # noqa: PLC0415 - keeps --help quick
    from meshbench.stress.run import run_stress  # noqa: PLC0415
    from meshbench.stress.scripts import num_slots_for  # noqa: PLC0415

    steps = concurrency or (_QUICK_RAMP if quick else _KEYS_RAMP if num_keys else _RAMP)
    is_acceptance = preset == "acceptance"
    most = max(_ACCEPTANCE_SLOTS if is_acceptance else max(steps), soak_concurrency if soak_minutes else 1)
    if num_keys:
        most = num_slots_for(most, num_keys)
        num_chats, usual_ctx_size = _QUICK_KEYS_CHATS if quick else _KEYS_CHATS, _KEYS_CTX_SIZE
    else:
        num_chats = _QUICK_CHATS if quick else _CHATS
        usual_ctx_size = _ACCEPTANCE_CTX_SIZE if is_acceptance else _CTX_SIZE
    load: dict[str, Any] = {
        "preset": preset,
        "concurrency": steps,
        "num_requests": num_requests or (_QUICK_REQUESTS if quick and duration_s is None else None),
        "duration_s": duration_s,
        "soak_minutes": soak_minutes,
        "soak_concurrency": soak_concurrency,
        "num_scripts": num_scripts or num_chats,
        "with_clients": num_keys > 0,
        "is_short": quick,
        "hang_up_share": hang_up_share,
        "speculate": speculate or ("auto" if num_keys else "off"),
        "output": output,
    }
    if target is not None:
        load |= {name: given[name] for name in ("lines", "contexts", "rounds", "seed", "slos")}
        return run_remote_stress(RemoteStressOptions(target=target, fits_slots=concurrency is None, **load))
    return run_stress(
        StressOptions(
            model=model or demo_model(),
            ctx_size=ctx_size or usual_ctx_size,
            num_slots=num_slots or min(most, 64),
            num_keys=num_keys,
            with_rpc=peer == "rpc",
            against=against,
            **load,
            **given,
        )
    )
