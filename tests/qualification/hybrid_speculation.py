"""Command that measures what speculation is worth for a model with recurrent layers, beside one without.

Four hosts in the lab: a head without layers and three with a third of them each, one thread a stage, greedy,
one request at a time. The same prompts are answered in turn, by the demo's model and by a random one of
Qwen3.5's architecture (`tests.qualification.random_hybrid`); what is proposed are recorded answers, right
always, three times of four, or never. The second turn of a long chat goes on from a checkpoint: its first
token is held against the first turn's.
"""

from __future__ import annotations

import platform
from dataclasses import dataclass
from statistics import fmean
from typing import TYPE_CHECKING, Any, Final

import click
import structlog

from mesh.cli.shared_options import Numbers, int_option
from mesh.serve.options import demo_model
from mesh.text.tokenizer import Tokenizer
from mesh.util.completion_stream import COMPLETION_PATH
from meshbench.datasets import made_up_prompts
from meshbench.experiment import lab_experiment
from meshbench.lab.network import Lab
from meshbench.lab.systems import MeshSystem
from meshbench.load_client.client import LoadClient
from meshbench.load_client.schedule import Request
from meshbench.paired_systems import even_split
from meshbench.report_tools import Line, Report, table_section
from meshbench.shared_options import FILE, json_option, logs_option
from meshbench.speculation_plan import Phase, Trial
from meshbench.speculation_results import (
    IN_STEP,
    OFF_AGAIN,
    REPLAY,
    Results,
    RunConditions,
    Setting,
    pairs_with_off,
)
from meshbench.speculation_runner import ReplayFile, Runner, RunnerOptions, TrialRunner
from meshbench.speculation_workloads import Workload, all_workloads, choose
from spanmesh_proto import SOFTWARE_VERSION
from spanmesh_proto.errors import MeshError
from stages.process_limits import num_usable
from stages.slicing.model_facts import read_model_facts
from tests.qualification.bounded_report import bounded_report
from tests.qualification.random_hybrid import write_random_hybrid

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from meshbench.load_client.answers import AnswerRecord
    from meshbench.speculation_results import Sample

_NUM_STAGES: Final = 3
_WORKLOAD: Final = "built-in-raw"

log = structlog.get_logger()
_RIGHT, _OFTEN, _NEVER = "right always", "right three times of four", "right never"
# For each distance from the committed tokens.
_RATES: Final = {_OFTEN: ",".join(["0.75"] * 24), _NEVER: ",".join(["0"] * 8)}
_STEP_WIDTHS: Final = (1, 2, 4, 8)
_LEAST_SHARE: Final = 0.6
_LEAST_FACTORS: Final = {5.0: 3.0, 20.0: 6.0}
_MOST_SHARE_OF_TURN: Final = 0.25
_TURN_DELAY_MS: Final = 5.0
_TURN_FIELDS: Final[dict[str, Any]] = {
    "max_tokens": 64,
    "temperature": 0,
    "ignore_eos": True,
    "return_token_ids": True,
    "cache_prompt": True,
}


@dataclass(frozen=True)
class Settings:
    """Sizes of the measurement."""

    plain: Path
    """A model that can be trimmed."""
    hybrid: Path
    """A model with recurrent layers."""
    delays_ms: tuple[float, ...]
    """One-way delays."""
    num_prompts: int
    """Prompts at each delay."""
    num_tokens: int
    """Tokens of each answer."""
    turn_tokens: int
    """Tokens of the first turn's prompt."""
    num_threads: int
    """Threads of each stage."""


@dataclass(frozen=True)
class Turns:
    """Times to the first token of a chat's first two turns, in milliseconds."""

    first_ms: float
    """Of a prompt that no cache holds."""
    second_ms: float
    """Of the same prompt, the answer, and a little more."""
    num_cached: int
    """Tokens of the second prompt that were not computed again."""


def phases(settings: Settings, workload: Workload, *, is_hybrid: bool) -> tuple[Phase, ...]:
    """What is measured of one model."""
    serve = ("--speculate", "auto", "--parallel", "1")
    steps = tuple(Setting("replay", width, 1, f"{IN_STEP}/{width}") for width in _STEP_WIDTHS)
    found = [Phase(_RIGHT, serve, tuple(Trial(delay, workload, (REPLAY,)) for delay in settings.delays_ms))]
    if is_hybrid:
        slowest = max(settings.delays_ms)
        found += [
            Phase(
                _OFTEN,
                (*serve, "--set", f"replay-rates={_RATES[_OFTEN]}"),
                (Trial(slowest, workload, (*steps, REPLAY)),),
            ),
            Phase(
                _NEVER,
                (*serve, "--set", f"replay-rates={_RATES[_NEVER]}"),
                tuple(Trial(delay, workload, (OFF_AGAIN, REPLAY)) for delay in settings.delays_ms),
            ),
        ]
    return tuple(found)


def measure_model(settings: Settings, model: Path, logs: Path, *, is_hybrid: bool) -> tuple[Sample, ...]:
    """Answers of one model in its phases.

    Raises:
        MeshError: If something could not be measured.
    """
    workloads = all_workloads(Tokenizer(model), spec_bench=None, per_workload=settings.num_prompts, seed=1)
    (workload,) = choose(workloads, (_WORKLOAD,))
    workload = workload.first(settings.num_prompts)
    results = Results(
        RunConditions(
            command="",
            model=model.name,
            draft_model=None,
            num_stages=_NUM_STAGES,
            num_threads=settings.num_threads,
            num_tokens=settings.num_tokens,
            numeric_mode="fast",
            seed=1,
            processor=platform.processor(),
            num_cores=num_usable(),
            software=SOFTWARE_VERSION,
        )
    )
    options = RunnerOptions(
        model=model,
        split=even_split(read_model_facts(model).n_layers, _NUM_STAGES),
        num_threads=settings.num_threads,
        num_tokens=settings.num_tokens,
        ctx_size=1024,
    )
    folder = logs / model.stem
    folder.mkdir(exist_ok=True)
    with Lab(1 + _NUM_STAGES, shared=[logs, model.resolve().parent]) as lab, LoadClient(lab) as client:
        replay = ReplayFile(folder / "replay.jsonl")
        trials = TrialRunner(client, settings.num_tokens, results, lab=lab, replay=replay)
        runner = Runner(lab, trials, options, folder, results, replay=replay)
        for phase in phases(settings, workload, is_hybrid=is_hybrid):
            runner.run(phase)
    if results.failures:
        raise MeshError("; ".join(results.failures))
    return tuple(results.samples)


def measure_turns(settings: Settings, logs: Path) -> Turns:
    """Two turns of a chat with the hybrid model."""
    model = settings.hybrid
    tokenizer = Tokenizer(model)
    text = made_up_prompts(1, settings.turn_tokens, 1)[0].text
    tokens = tokenizer.encode(text, add_special=True, parse_special=False)
    prompt = (tokens * (1 + settings.turn_tokens // len(tokens)))[: settings.turn_tokens]
    with Lab(1 + _NUM_STAGES, shared=[logs, model.resolve().parent]) as lab, LoadClient(lab) as client:
        folder = logs / "turns"
        folder.mkdir(exist_ok=True)
        mesh = MeshSystem(
            lab,
            model,
            folder,
            num_threads=settings.num_threads,
            split=even_split(read_model_facts(model).n_layers, _NUM_STAGES),
            options=["--parallel", "2", "--ctx-size", str(settings.turn_tokens + 512)],
        )
        try:
            mesh.start()
            lab.set_delay_ms(_TURN_DELAY_MS)

            def ask(tokens: Sequence[int]) -> AnswerRecord:
                request = Request.streamed({**_TURN_FIELDS, "prompt": [*tokens]}, COMPLETION_PATH)
                return client.answer(mesh.url, (request,)).answers[0]

            ask(prompt[-64:])
            first = ask(prompt)
            second = ask([*prompt, *first.token_ids, *prompt[:32]])
            mesh.stop()
        finally:
            mesh.kill()
    return Turns(first.ttft_ms, second.ttft_ms, second.timings["cache_n"])


def lines(settings: Settings, plain: Sequence[Sample], hybrid: Sequence[Sample], turns: Turns) -> list[Line]:
    """The figures with their bounds."""
    found: list[Line] = []
    for delay in settings.delays_ms:
        ours, theirs = (_factor(samples, _RIGHT, REPLAY.name, delay) for samples in (hybrid, plain))
        found += [
            Line(f"{_RIGHT}, over off, {delay:g} ms, without recurrent layers", theirs, None),
            Line(f"{_RIGHT}, over off, {delay:g} ms", ours, _LEAST_FACTORS.get(delay)),
            Line(
                f"share of the factor without recurrent layers, {delay:g} ms",
                None if ours is None or theirs is None else ours / theirs,
                _LEAST_SHARE,
            ),
        ]
    slowest = max(settings.delays_ms)
    flight = _factor(hybrid, _OFTEN, REPLAY.name, slowest)
    steps = {
        width: factor
        for width in _STEP_WIDTHS
        if (factor := _factor(hybrid, _OFTEN, f"{IN_STEP}/{width}", slowest)) is not None
    }
    best = max(steps.values(), default=None)
    found += [
        Line(f"{_OFTEN}, over off, {slowest:g} ms", flight, 2.0),
        Line(
            f"{_OFTEN}, over one window in flight, {slowest:g} ms",
            None if flight is None or best is None else flight / best,
            1.15,
            note=", ".join(f"{width}: {factor:.2f}" for width, factor in steps.items()),
        ),
    ]
    for delay in settings.delays_ms:
        again = _factor(hybrid, _NEVER, OFF_AGAIN.name, delay)
        note = "" if again is None else f"off again: {again:.2f}"
        never = _factor(hybrid, _NEVER, REPLAY.name, delay)
        found.append(Line(f"{_NEVER}, over off, {delay:g} ms", never, 0.95, note=note))
    share = turns.second_ms / turns.first_ms
    note = f"{turns.first_ms:.0f} and {turns.second_ms:.0f} ms, {turns.num_cached} tokens not computed again"
    title = "first token of the second turn over the first's"
    found.append(Line(title, share, _MOST_SHARE_OF_TURN, is_ceiling=True, note=note))
    return found


def _factor(samples: Sequence[Sample], server: str, setting: str, delay_ms: float) -> float | None:
    """Mean rate over that of plain decoding."""
    pairs = [
        pair
        for pair in pairs_with_off(samples)
        if (pair.other.server, pair.other.setting, pair.other.delay_ms) == (server, setting, delay_ms)
    ]
    return fmean(pair.speed_up for pair in pairs) if pairs else None


def conditions(settings: Settings) -> dict[str, Any]:
    """How a run was made."""
    facts = read_model_facts(settings.hybrid)
    return {
        "model": settings.plain.name,
        "hybrid": f"{facts.architecture}, {facts.n_layers} layers, {facts.n_embd} wide",
        "stage_hosts": _NUM_STAGES,
        "threads_per_stage": settings.num_threads,
        "prompts": settings.num_prompts,
        "tokens": settings.num_tokens,
        "cores": num_usable(),
    }


@click.command()
@click.option(
    "--model", "plain", type=FILE, help="A model without recurrent layers; the demo's unless given."
)
@click.option("--hybrid", type=FILE, help="A model with recurrent layers; a random one unless given.")
@click.option(
    "--delay-ms",
    "delays_ms",
    type=Numbers(float, 0.0),
    default=(5.0, 20.0),
    metavar="A,B,…",
    help="One-way delays; 5 and 20 unless given.",
)
@int_option("--prompts", "num_prompts", default=3, help="Prompts at each delay.")
@int_option("--tokens", "num_tokens", least=16, default=96, help="Tokens of an answer.")
@int_option("--turn-tokens", least=64, default=2600, help="Tokens of the first turn: 2,000 words.")
@int_option("--threads", "num_threads", default=1, help="Threads of each stage.")
@logs_option()
@json_option
@lab_experiment
def main(*, plain: Path | None, hybrid: Path | None, logs: Path, **given: Any) -> Report:
    """Measure what speculation is worth for a model with recurrent layers, in the lab.

    Prints ratios with their bounds, and exits with 1 if one is missed. Needs root.
    """
    if hybrid is None:
        hybrid = logs / "hybrid.gguf"
        write_random_hybrid(hybrid)
    settings = Settings(plain=plain or demo_model(), hybrid=hybrid, **given)
    turns = measure_turns(settings, logs)
    log.info("turns", first_ms=turns.first_ms, second_ms=turns.second_ms, num_cached=turns.num_cached)
    ours = measure_model(settings, settings.hybrid, logs, is_hybrid=True)
    theirs = measure_model(settings, settings.plain, logs, is_hybrid=False)
    rows = [
        (f"{each.delay_ms:g}", each.server, each.setting, each.question, f"{each.tokens_per_s:.2f}")
        for each in (*theirs, *ours)
    ]
    answers = table_section("## Answers", ("delay, ms", "proposals", "setting", "prompt", "tokens/s"), rows)
    found = lines(settings, theirs, ours, turns)
    return bounded_report("Speculation with recurrent layers", conditions(settings), found, answers)


if __name__ == "__main__":
    main()
