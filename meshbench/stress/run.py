"""Run of `mesh bench stress` in the lab."""

from __future__ import annotations

import secrets
from contextlib import ExitStack, contextmanager
from itertools import accumulate
from typing import TYPE_CHECKING, Any, Final

from mesh.api.api_keys import KeyRecord, add_key, digest_of
from mesh.placement.memory_estimate import StageSizes, Workload
from mesh.text.tokenizer import Tokenizer
from meshbench.lab.link import LinkConditions
from meshbench.lab.llama_cpp_build import build_llama_rpc
from meshbench.lab.memory_watch import MemoryWatch
from meshbench.lab.network import Lab, require_lab
from meshbench.lab.systems import MeshSystem, RpcSystem
from meshbench.load_client.client import LoadClient
from meshbench.paired_systems import OWN, PEERS, environment_for, even_split
from meshbench.shared_options import logs_folder
from meshbench.stress import measurements
from meshbench.stress.harness import LoadTestBed
from meshbench.stress.lab_memory import LabMemory
from meshbench.stress.load_run import (
    CHAT_CTX_SIZE,
    NUM_CONCURRENT,
    SAMPLE_S,
    InsideView,
    LoadRun,
    Subject,
    warm_up,
)
from meshbench.stress.measurements import LimitOptions
from meshbench.under_test.mesh import LabMesh
from spanmesh_proto import SOFTWARE_VERSION
from spanmesh_proto.errors import MeshError
from stages.process_limits import num_usable, processor_name
from stages.slicing.model_facts import read_model_facts

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from meshbench.paired_systems import Kernels
    from meshbench.report_tools import Line, Report
    from meshbench.stress.options import StressOptions
    from stages.slicing.model_facts import ModelFacts

_RARE_S: Final = 10.0
_LONG_SOAK_MINUTES: Final = 5.0


def run_stress(options: StressOptions) -> Report:
    """Measure and write the report, of as much as could be measured, also when Ctrl-C ends it.

    Raises:
        MeshError: If no lab can be made here, or an input is wrong, or the mesh does not come up.
    """
    require_lab()
    facts = read_model_facts(options.model)
    programs = build_llama_rpc() if options.with_rpc else None
    with ExitStack() as stack:
        logs = stack.enter_context(logs_folder(options.logs))
        shared = [logs, options.model.resolve().parent]
        lab = stack.enter_context(
            Lab(options.num_stages + 1, shared=shared, is_pinned=options.is_pinned, seed=options.seed)
        )
        api_keys = tuple(secrets.token_hex(16) for _ in range(options.num_keys))
        load_client = stack.enter_context(LoadClient(lab))
        peer: RpcSystem | MeshSystem | None = None
        if options.against is not None:
            other = _mesh(options, facts, lab, logs, api_keys, kernels=OWN, checkout=options.against)
            stack.callback(other.kill)
            other.start()
            other.pause()
            peer = other
        if programs is not None:
            slots = max((NUM_CONCURRENT,) if options.preset == "acceptance" else options.concurrency)
            peer = RpcSystem(
                lab,
                programs,
                options.model,
                logs,
                num_threads=options.num_threads,
                ctx_size=options.ctx_size if _has_contexts(options) else min(CHAT_CTX_SIZE, options.ctx_size),
                num_slots=slots,
            )
            stack.callback(peer.stop)
            peer.start()
            peer.pause()

        def bed_of(mesh: MeshSystem) -> LoadTestBed:
            under_test = LabMesh(lab, mesh, api_keys or (None,))
            return LoadTestBed(load_client, under_test, options.ctx_size, processes=mesh, peer=peer)

        lines: list[Line] = []
        failures: list[str] = []
        limit = _limit(options, facts)
        if programs is not None and options.preset == "acceptance" and not options.exact:
            with _mesh_up(options, facts, lab, logs, api_keys, kernels=PEERS) as mesh:
                lines, failures = _peers_kernels(options, bed_of(mesh), limit)
        mesh = stack.enter_context(_mesh_up(options, facts, lab, logs, api_keys, kernels=OWN))
        interval_s = _RARE_S if options.soak_minutes > _LONG_SOAK_MINUTES else SAMPLE_S
        watch = stack.enter_context(MemoryWatch(lab, interval_s))
        run = LoadRun(
            options,
            bed_of(mesh),
            Subject(options.exact, options.num_slots, Tokenizer(options.model)),
            inside=_inside(options, facts, watch, limit),
            lines=lines,
            failures=failures,
        )
        run.work()
        report = run.report(_conditions(options))
        # Before a failure or an interruption can lose it.
        report.write(options.output)
    return report


def _inside(options: StressOptions, facts: ModelFacts, watch: MemoryWatch, limit: LimitOptions) -> InsideView:
    workload = Workload(options.ctx_size, options.num_slots, kv_type=options.kv_type, is_exact=options.exact)
    return InsideView(LabMemory(watch, StageSizes(facts, workload)), limit)


def _limit(options: StressOptions, facts: ModelFacts) -> LimitOptions:
    edges = tuple(accumulate(even_split(facts.n_layers, options.num_stages), initial=0))
    return LimitOptions(options.model, edges, options.exact)


@contextmanager
def _mesh_up(
    options: StressOptions,
    facts: ModelFacts,
    lab: Lab,
    logs: Path,
    api_keys: Sequence[str],
    *,
    kernels: Kernels,
) -> Iterator[MeshSystem]:
    """A mesh with these kernels, from its start to its end."""
    mesh = _mesh(options, facts, lab, logs, api_keys, kernels=kernels)
    try:
        lab.set_link(LinkConditions())
        mesh.start()
        lab.set_link(options.link)
        yield mesh
        mesh.stop()
    finally:
        mesh.kill()


def _peers_kernels(
    options: StressOptions, bed: LoadTestBed, limit: LimitOptions
) -> tuple[list[Line], list[str]]:
    """Lines of a mesh with the peer's kernels, and why some are missing."""
    lines: list[Line] = []
    rounds, seed = options.rounds, options.seed
    try:
        warm_up(bed)
        if "crowd" in options.lines:
            lines += measurements.concurrency(
                bed, NUM_CONCURRENT, kernels=PEERS, limit=limit, rounds=rounds, seed=seed
            )
        if "context" in options.lines:
            lines += measurements.behind_contexts(
                bed, options.contexts, NUM_CONCURRENT, kernels=PEERS, rounds=rounds, seed=seed
            )
        if "prefill" in options.lines:
            lines += measurements.prefill(bed, kernels=PEERS, limit=limit, rounds=rounds, seed=seed)
    except MeshError as error:
        return lines, [f"mesh {PEERS}: {error.message}"]
    return lines, []


def _has_contexts(options: StressOptions) -> bool:
    return options.preset == "acceptance" and "context" in options.lines


def _conditions(options: StressOptions) -> dict[str, Any]:
    return {
        "model": options.model.name,
        "preset": options.preset,
        "stage_hosts": options.num_stages,
        "one_way_delay_ms": options.delay_ms,
        "links": str(options.link),
        "hosts": "pinned to processors" if options.is_pinned else "on all processors",
        "numeric_mode": "exact" if options.exact else "fast",
        "ctx_size": options.ctx_size,
        "slots": options.num_slots,
        "kv_type": options.kv_type,
        "threads_per_stage": options.num_threads,
        "speculate": options.speculate,
        "serve_options": " ".join(options.serve_options) or "none",
        "against": "nothing" if options.against is None else options.against.name,
        "api_keys": options.num_keys,
        "hang_ups": options.hang_up_share,
        "chats": options.num_scripts,
        "seed": options.seed,
        "goodput": ", ".join(f"{slo.name} {slo.limit_ms:g} ms" for slo in options.slos) or "no limits",
        "processor": processor_name(),
        "cores": num_usable(),
        "software": f"spanmesh {SOFTWARE_VERSION}",
    }


def _mesh(
    options: StressOptions,
    facts: ModelFacts,
    lab: Lab,
    logs: Path,
    api_keys: Sequence[str],
    *,
    kernels: Kernels,
    checkout: Path | None = None,
) -> MeshSystem:
    if checkout is not None:
        logs /= "against"
        logs.mkdir()
    serve = ["--speculate", options.speculate]
    serve += ["--parallel", str(options.num_slots), "--ctx-size", str(options.ctx_size)]
    serve += ["--kv-type", options.kv_type, *["--no-repack"] * (kernels == PEERS)]
    if api_keys:
        key_file = logs / "api-keys"
        key_file.unlink(missing_ok=True)
        for number, key in enumerate(api_keys):
            add_key(key_file, KeyRecord(f"bench-{number}", digest_of(key)))
        serve += ["--api-key-file", str(key_file)]
    return MeshSystem(
        lab,
        options.model,
        logs,
        num_threads=options.num_threads,
        split=even_split(facts.n_layers, options.num_stages),
        options=[*serve, *["--exact"] * options.exact, *options.serve_options],
        env=environment_for(kernels),
        checkout=checkout,
    )
