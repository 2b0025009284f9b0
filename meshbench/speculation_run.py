"""Run of `mesh bench spec`, in the lab or on a mesh that runs already."""

from __future__ import annotations

import time
from contextlib import ExitStack
from dataclasses import dataclass
from importlib.metadata import version
from typing import TYPE_CHECKING, Final

import structlog

from mesh.requantize import requantise
from mesh.text.tokenizer import Tokenizer
from meshbench.datasets import made_up_prompts
from meshbench.lab.llama_cpp_build import build_llama_rpc
from meshbench.lab.network import Lab, require_lab
from meshbench.load_client.client import LoadClient
from meshbench.paired_systems import even_split
from meshbench.report_tools import INTERRUPTED
from meshbench.shared_options import logs_folder
from meshbench.speculation_plan import (
    AS_SERVED,
    ServeOptions,
    acceptance_plan,
    drafter_plan,
    narrowed,
    peer_settings,
    quick_plan,
    remote_plan,
    sweep_plan,
    without_replay,
)
from meshbench.speculation_report import speculation_report
from meshbench.speculation_results import DRAFT, REPLAY, DraftCounts, Results, RunConditions
from meshbench.speculation_runner import Peer, ReplayFile, Runner, RunnerOptions, TrialRunner
from meshbench.speculation_workloads import SPEC_BENCH, Workload, all_workloads, choose
from meshbench.stress.scripts import WORD_TOKENS
from meshbench.under_test.links import hop_ms, known_links
from meshbench.under_test.mesh import reach_mesh, tokenizer_of
from spanmesh_proto import SOFTWARE_VERSION
from spanmesh_proto.errors import InvalidRequest, MeshError
from stages.process_limits import num_usable, processor_name
from stages.slicing.model_facts import read_model_facts

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from mesh.engine import SpeculationMode
    from meshbench.report_tools import Report
    from meshbench.speculation_plan import Phase, Preset
    from meshbench.under_test.mesh import RemoteMesh, ServedModel
    from meshbench.under_test.options import RemoteTarget

_NUM_STAGES: Final = 3
_CTX_SIZE: Final = 2560
_SWEEP_DELAYS_MS: Final = (5.0, 20.0)
_PEER_DELAY_MS: Final = 20.0
# Three questions distinguish the settings: prose, code, and text to be copied from.
_PEER_WORKLOADS: Final = ("writing", "coding", "summarization", "built-in", "repository-edit", "tool-call")
_NUM_PEER_WORKLOADS: Final = 3
# Only measured of meshes that are started in the lab.
_REMOTE_OMITTED: Final = (
    "`replay`, the right answer proposed throughout: the server would need this run's answers",
    "other delays and other drafters than the mesh has, and the presets that start several meshes",
    "llama.cpp RPC on the same hosts",
)

log = structlog.get_logger()


@dataclass(frozen=True, kw_only=True)
class QuestionOptions:
    """Questions and settings of a run, whatever mesh it is for."""

    preset: Preset
    """Which plan."""
    spec_bench: Path | None
    """Spec-Bench's `question.jsonl`, or None for the project's own workloads alone."""
    workloads: tuple[str, ...]
    """Names; empty takes all."""
    modes: tuple[SpeculationMode, ...]
    """Proposers, for a sweep."""
    widths: tuple[int, ...]
    """Values of `--draft-max`, for a sweep."""
    per_workload: int
    """Questions of each workload."""
    num_tokens: int
    """Of each answer."""
    context_words: int
    """Of a text that each question follows."""
    seed: int
    """Of random prompts and of sampling."""
    output: Path
    """Folder for the report."""
    command: str
    """Command line with these options."""


@dataclass(frozen=True, kw_only=True)
class SpecOptions(QuestionOptions):
    """Options of `mesh bench spec` in the lab; see `QuestionOptions` for the other options."""

    model: Path
    """A GGUF."""
    draft_model: Path | None
    """A GGUF for the draft proposer; None makes one from the model."""
    other_draft: Path | None
    """A drafter that it is compared with, or None."""
    draft_type: str | None
    """Type of its weights, if it is made; None goes without a draft model."""
    delays_ms: tuple[float, ...]
    """One way; empty takes those of the plan, for a sweep 5 and 20."""
    replay_rates: tuple[float, ...]
    """Acceptance, by distance, of the drafter that recorded answers stand for; empty for those published."""
    num_threads: int
    """Of each stage."""
    exact: bool
    """Numeric mode."""
    with_rpc: bool
    """Whether llama.cpp RPC takes part."""
    against: Path | None
    """Another checkout, whose mesh is measured in turn with this one, without `replay`; None without."""
    logs: Path | None
    """Folder for what the servers write; None throws it away."""


@dataclass(frozen=True, kw_only=True)
class RemoteSpecOptions(QuestionOptions):
    """Options of `mesh bench spec --url`; see `QuestionOptions` for the other options."""

    target: RemoteTarget
    """The running mesh."""


def run_spec(options: SpecOptions) -> Report:
    """Measure and write the report, of as much as could be measured, also when Ctrl-C ends it.

    Raises:
        MeshError: If no lab can be made here, or an input is wrong.
    """
    require_lab()
    started_s = time.monotonic()
    tokenizer = Tokenizer(options.model)
    workloads = _workloads(options, tokenizer)
    chosen = choose(workloads, options.workloads or tuple(workloads))
    with ExitStack() as stack:
        logs = stack.enter_context(logs_folder(options.logs))
        draft_model = _draft_model(options, logs)
        serve = ServeOptions(draft_model, options.exact, other_draft=options.other_draft)
        phases = _plan(options, workloads, chosen, serve)
        if options.against is not None:
            phases = without_replay(phases)
        results = Results(_conditions(options, draft_model))
        runner_options = RunnerOptions(
            model=options.model,
            split=even_split(read_model_facts(options.model).n_layers, _NUM_STAGES),
            num_threads=options.num_threads,
            num_tokens=options.num_tokens,
            ctx_size=_CTX_SIZE + round(WORD_TOKENS * options.context_words),
            against=options.against,
        )
        files = [path for path in (options.model, draft_model, options.other_draft) if path is not None]
        shared = [logs, *(path.resolve().parent for path in files)]
        programs = build_llama_rpc() if options.with_rpc else None
        lab = stack.enter_context(Lab(_NUM_STAGES + 1, shared=shared))
        client = stack.enter_context(LoadClient(lab))
        peer = None
        if programs is not None:
            peer = Peer(lab, client, programs, runner_options, logs)
            stack.callback(peer.stop)
            results.peer_delay_ms = _PEER_DELAY_MS
            results.peer_rates = peer.choose(
                peer_settings(draft_model), _peer_workloads(workloads), _PEER_DELAY_MS
            )
        replay = ReplayFile(logs / "replay.jsonl")
        trials = TrialRunner(client, options.num_tokens, results, lab=lab, replay=replay, peer=peer)
        runner = Runner(lab, trials, runner_options, logs, results, replay=replay)
        try:
            for phase in phases:
                runner.run(phase)
        except KeyboardInterrupt:
            results.failures.append(INTERRUPTED)
        return _reported(results, workloads, options, started_s)


def run_remote_spec(options: RemoteSpecOptions) -> Report:
    """Measure a mesh that runs already, and write the report, also when Ctrl-C ends it.

    Raises:
        MeshError: If no mesh answers, or it is not ready, or an input is wrong.
    """
    started_s = time.monotonic()
    target = options.target
    mesh, served = reach_mesh(target)
    tokenizer = tokenizer_of(target, mesh)
    workloads = _workloads(options, tokenizer)
    links = known_links(target)
    # Samples are filed under a delay; without links it is unknown.
    delay_ms = round(hop_ms(links.found) or 0.0, 2)
    results = Results(_remote_conditions(options, mesh, served), links=links)
    results.servers[AS_SERVED] = (
        *("--speculate", served.speculation or "auto"),
        *("--exact",) * served.is_exact,
    )
    if delay_ms:
        results.hops_ms[delay_ms] = delay_ms
    results.omitted += (*_REMOTE_OMITTED, *links.missing)
    if tokenizer is None:
        results.omitted.append("random prompts: name the model's file as MODEL")
    with LoadClient(None) as client:
        trials = TrialRunner(client, options.num_tokens, results)
        try:
            phase = remote_plan(
                workloads,
                options.workloads,
                modes=_allowed(options, trials, mesh, served, results),
                widths=options.widths,
                delay_ms=delay_ms,
                num_places=served.num_places(has_key=target.api_key is not None),
                is_quick=options.preset == "quick",
            )
            trials.run(mesh, phase)
        except KeyboardInterrupt:
            results.failures.append(INTERRUPTED)
        except MeshError as error:
            if not results.samples:
                raise
            results.failures.append(f"{AS_SERVED}: {error.message}")
    return _reported(results, workloads, options, started_s)


def _allowed(
    options: RemoteSpecOptions,
    trials: TrialRunner,
    mesh: RemoteMesh,
    served: ServedModel,
    results: Results,
) -> tuple[SpeculationMode, ...]:
    """Proposers among the wanted ones that the mesh has; what is left out is told in the results.

    Raises:
        InvalidRequest: If none is left.
        MeshError: If the mesh does not answer.
    """
    server = served.speculation or "auto"
    modes = [
        mode
        for mode in options.modes
        if mode != REPLAY.mode and (server == "auto" or (server != "off" and mode in {"auto", server}))
    ]
    left_out = [mode for mode in options.modes if mode not in modes and mode != REPLAY.mode]
    if left_out:
        results.omitted.append(f"{', '.join(left_out)}: the mesh is served with --speculate {server}")
    if DRAFT.mode in modes:
        # Whether there is a drafter is not told: it shows in an answer.
        answer = trials.warm_up(mesh, DRAFT)
        if not DraftCounts.from_timings(answer.timings).num_drafted:
            modes.remove(DRAFT.mode)
            results.omitted.append(
                "draft: under it alone the mesh proposed nothing, so it has no drafter or does not use it"
            )
    if not modes:
        raise InvalidRequest(
            f"the mesh at {mesh.url} has none of these proposers: {', '.join(options.modes)}; it is served"
            f" with --speculate {server}",
            param="--proposers",
        )
    return tuple(modes)


def _reported(
    results: Results, workloads: Mapping[str, Workload], options: QuestionOptions, started_s: float
) -> Report:
    """The report, which is written as well."""
    results.took_s = time.monotonic() - started_s
    categories = {workload.name for workload in workloads.values() if workload.source == SPEC_BENCH}
    report = speculation_report(results, categories=categories, preset=options.preset)
    report.write(options.output)
    return report


def _plan(
    options: SpecOptions,
    workloads: dict[str, Workload],
    chosen: Sequence[Workload],
    serve: ServeOptions,
) -> tuple[Phase, ...]:
    if options.preset == "acceptance":
        return narrowed(
            acceptance_plan(workloads, serve, options.seed),
            delays_ms=options.delays_ms,
            workloads=options.workloads,
        )
    if options.preset == "features":
        return drafter_plan(
            workloads,
            serve,
            options.replay_rates,
            target=options.model,
            delays_ms=options.delays_ms,
            names=options.workloads,
        )
    if options.preset == "quick":
        return narrowed(quick_plan(workloads, serve), delays_ms=(), workloads=options.workloads)
    return sweep_plan(
        chosen,
        serve,
        modes=options.modes,
        widths=options.widths,
        delays_ms=options.delays_ms or _SWEEP_DELAYS_MS,
        with_peer=options.with_rpc,
    )


def _draft_model(options: SpecOptions, logs: Path) -> Path | None:
    if options.draft_model is not None:
        return options.draft_model.resolve()
    if options.draft_type is None:
        return None
    made = logs / f"draft-{options.draft_type}.gguf"
    log.info("making_draft", type=options.draft_type)
    requantise(options.model, options.draft_type, made)
    return made


def _peer_workloads(workloads: dict[str, Workload]) -> list[Workload]:
    return [workloads[name] for name in _PEER_WORKLOADS if name in workloads][:_NUM_PEER_WORKLOADS]


def _workloads(options: QuestionOptions, tokenizer: Tokenizer | None) -> dict[str, Workload]:
    found = all_workloads(
        tokenizer, spec_bench=options.spec_bench, per_workload=options.per_workload, seed=options.seed
    )
    if not options.context_words:
        return found
    (ahead,) = made_up_prompts(1, options.context_words, options.seed)
    return {name: each.behind(ahead.text) if each.is_text else each for name, each in found.items()}


def _conditions(options: SpecOptions, draft_model: Path | None) -> RunConditions:
    return RunConditions(
        command=options.command,
        model=options.model.name,
        draft_model=None if draft_model is None else draft_model.name,
        num_stages=_NUM_STAGES,
        num_threads=options.num_threads,
        num_tokens=options.num_tokens,
        numeric_mode="exact" if options.exact else "fast",
        seed=options.seed,
        processor=processor_name(),
        num_cores=num_usable(),
        software=f"spanmesh {SOFTWARE_VERSION}, llama-cpp-python {version('llama-cpp-python')}",
        other_draft=None if options.other_draft is None else options.other_draft.name,
    )


def _remote_conditions(options: RemoteSpecOptions, mesh: RemoteMesh, served: ServedModel) -> RunConditions:
    return RunConditions(
        command=options.command,
        model=served.name,
        draft_model=None,
        num_stages=len(served.stages),
        num_threads=None,
        num_tokens=options.num_tokens,
        numeric_mode=served.numeric_mode,
        seed=options.seed,
        processor=processor_name(),
        num_cores=num_usable(),
        software=f"spanmesh {served.software}; the client is of {SOFTWARE_VERSION}",
        url=mesh.url,
        placement=served.stages,
    )
