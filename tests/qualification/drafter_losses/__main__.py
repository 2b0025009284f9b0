"""Command that loses a stage while an answer drafts from hidden states, and checks what is drafted then.

Five hosts in the lab: a head without layers, three with a third of them each, and a spare one that has every
stage loaded ahead. Questions are answered undisturbed first. Then one answer at a time streams, the process
of its middle stage is killed at some moment of it, and the mesh is whole again before the next. Every answer
must be that of the undisturbed run, token by token; and some tokens after the repair the drafter, which then
reads features of another host, must be right as often as before the loss.

Width and depth are fixed, so that the acceptance is the drafter's, whether or not drafting pays on this
machine.

A finished answer tells totals only. So `/mesh/status`, whose counts include running answers, is read several
times a second. Acceptance depends on the text as well: of the undisturbed answers it is given over the same
stretches.
"""

from __future__ import annotations

import time
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click
import structlog

from mesh.cli.shared_options import float_option, int_option
from mesh.draft.drafter import read_drafter
from mesh.serve.options import demo_model
from meshbench import shared_options
from meshbench.chaos.fault_kinds import FaultKind
from meshbench.chaos.faults import Fault, FaultInjector
from meshbench.chaos.harness import FaultTestBed
from meshbench.chaos.options import ChaosOptions
from meshbench.chaos.questions import Question
from meshbench.experiment import lab_experiment
from meshbench.lab.network import Lab
from meshbench.lab.systems import MeshSystem
from meshbench.load_client.client import LoadClient
from meshbench.paired_systems import even_split
from meshbench.report_tools import Report, Section, list_section, number, table_section
from meshbench.stress.checks import Expected
from meshbench.stress.scripts import Turn
from spanmesh_proto.errors import InvalidModel, MeshError
from stages.process_limits import num_usable
from stages.slicing.model_facts import read_model_facts
from tests.qualification.bounded_report import bounded_report
from tests.qualification.drafter_losses.results import Sample, WatchedAnswer, result_lines

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from meshbench.chaos.faults import InjectedFault
    from meshbench.chaos.results import Tally
    from meshbench.load_client.client import MeshSnapshot

_NUM_STAGES: Final = 3
_NUM_SPARES: Final = 1
_NUM_SLOTS: Final = 2
_PROMPT_POSITIONS: Final = 256
# Their answers are long before they repeat themselves, which is easy to draft.
_STORY: Final = "Write a long and detailed story about {}."
_TOPICS: Final = (
    "a lighthouse keeper who finds a message in a bottle",
    "two sisters who inherit an old mill",
    "a clockmaker and a clock that runs backwards",
    "a village that wakes up without its river",
    "a young doctor on a ship in winter",
    "a teacher who follows a fox into the forest",
    "a cook who has to feed a travelling circus",
    "an engineer who repairs the last railway bridge",
    "a boy who learns to read the weather",
    "a painter who moves into a house without windows",
)
# Before those of the user, which win.
_FIXED: Final = ("--set", "spec-width=3", "--set", "spec-depth=3")
_POLL_S: Final = 0.1
_ANSWER_TIMEOUT_S: Final = 240.0
# Part of an answer in which losses happen: something has been drafted, and enough is left.
_EARLIEST: Final = 0.15
_LATEST: Final = 0.55
# Requests of the undisturbed run have numbers of their own.
_FIRST_UNDISTURBED: Final = 10_000

log = structlog.get_logger()


class LossRun:
    """Answers on a running mesh, one at a time.

    Args:
        bed: The mesh; its `expected` is filled with the undisturbed answers.
        drafter: Name of the proposer.
    """

    def __init__(self, bed: FaultTestBed, drafter: str) -> None:
        self._bed = bed
        self._drafter = drafter
        self._expected: dict[str, Expected] = {}
        self.undisturbed: dict[str, WatchedAnswer] = {}
        self.lost: list[WatchedAnswer] = []

    def answer_undisturbed(self) -> None:
        """Have every question answered.

        Raises:
            MeshError: If an answer is not sound.
        """
        for request, question in enumerate(self._bed.questions, _FIRST_UNDISTURBED):
            found = self._watched(request, question)
            answer = found.answer
            if answer.record.failure is not None:
                raise MeshError(f"{question.id} failed undisturbed: {answer.record.failure.message}")
            self.undisturbed[question.id] = found
            self._expected[question.id] = Expected(question.turn, answer)
            log.info("answered", question=question.id, **asdict(found.from_token(0)))

    def lose(self, index: int, after_token: int) -> None:
        """Have a question answered, kill the middle stage meanwhile, and wait until the mesh is whole.

        Args:
            index: Number of the loss, from 0.
            after_token: Token of the answer after which it happens.

        Raises:
            MeshError: If the mesh does not become whole, before or after.
        """
        self._bed.wait_whole(time.perf_counter())
        question = self._bed.questions[index % len(self._bed.questions)]
        begin = self.undisturbed[question.id].num_prompt + after_token
        found = self._watched(index, question, kill_at=begin)
        self.lost.append(found)
        log.info(
            "lost",
            number=index,
            question=question.id,
            at_token=found.killed_tokens,
            repaired_after_s=found.repair_s,
            before=found.before.acceptance,
            after=found.after.acceptance,
            is_equal=self.tally([found]).num_unlike == 0,
        )

    def tally(self, answers: Sequence[WatchedAnswer]) -> Tally:
        """Comparison with the undisturbed run."""
        return replace(self._bed, expected=self._expected).tally(each.answer for each in answers)

    def _watched(self, request: int, question: Question, kill_at: int | None = None) -> WatchedAnswer:
        injected = None
        samples: list[Sample] = []
        self._sample(samples)
        load = self._bed.probe(question)
        deadline_s = time.monotonic() + _ANSWER_TIMEOUT_S
        while not load.is_over:
            snapshot = self._sample(samples)
            if injected is None and kill_at is not None and samples and samples[-1].positions >= kill_at:
                injected = self._kill(request, snapshot)
            if time.monotonic() > deadline_s:
                raise MeshError(f"{question.id} has no end after {_ANSWER_TIMEOUT_S:g} s")
            time.sleep(_POLL_S)
        self._sample(samples)
        if len(samples) < 2:
            raise MeshError(f"the head gave no state while it answered {question.id}")
        killed_s = None if injected is None else injected.at_s
        return WatchedAnswer(load.wait().answers[0], tuple(samples), killed_s)

    def _kill(self, request: int, snapshot: MeshSnapshot) -> InjectedFault:
        fault = Fault(request, FaultKind.MIDDLE, wait_s=0.0, hold_s=0.0, pick=0.0)
        return self._bed.injector.inject(fault, snapshot)

    def _sample(self, samples: list[Sample]) -> MeshSnapshot:
        snapshot = self._bed.snapshot()
        sample = Sample.of(snapshot, self._drafter)
        if sample is not None:
            samples.append(sample)
        return snapshot


def loss_tokens(count: int, num_tokens: int) -> tuple[int, ...]:
    """Tokens of an answer after which a stage is lost: evenly over the part where losses happen.

    Args:
        count: How many.
        num_tokens: Length of the answers.
    """
    share = (_LATEST - _EARLIEST) / count
    return tuple(round(num_tokens * (_EARLIEST + share * (number + 0.5))) for number in range(count))


def questions(count: int, num_tokens: int) -> tuple[Question, ...]:
    """Greedy questions, each computed anew.

    Args:
        count: How many; no more than there are.
        num_tokens: Length of the answers.
    """
    fields = {"temperature": 0, "cache_prompt": False}
    return tuple(
        Question(f"story {index}", Turn(_STORY.format(topic), num_tokens), fields)
        for index, topic in enumerate(_TOPICS[:count])
    )


def _serve_options(options: ChaosOptions) -> list[str]:
    sizes = ["--parallel", str(_NUM_SLOTS), "--ctx-size", str(options.ctx_size)]
    return ["--speculate", options.speculate, *sizes, *options.serve_options]


@contextmanager
def running_mesh(options: ChaosOptions) -> Iterator[FaultTestBed]:
    """A whole mesh in the lab for the block; afterwards nothing is left.

    Raises:
        MeshError: If it does not start.
    """
    with ExitStack() as stack:
        logs = stack.enter_context(shared_options.logs_folder(options.logs))
        folders = [Path(word).parent for word in options.serve_options if word.startswith("/")]
        shared = [logs, options.model.resolve().parent, *folders]
        lab = stack.enter_context(Lab(1 + options.num_stages + options.num_spares, shared=shared))
        mesh = MeshSystem(
            lab,
            options.model,
            logs,
            num_spares=options.num_spares,
            num_threads=options.num_threads,
            split=even_split(read_model_facts(options.model).n_layers, options.num_stages),
            options=["--exact", *_serve_options(options)],
        )
        stack.callback(mesh.kill)
        mesh.start()
        lab.set_delay_ms(options.delay_ms)
        client = stack.enter_context(LoadClient(lab))
        asked = questions(options.num_questions, options.answer_tokens[0])
        yield FaultTestBed(lab, mesh, client, FaultInjector(lab, mesh), options, asked, {})
        mesh.stop()


def measure(options: ChaosOptions, drafter: str) -> LossRun:
    """Lose stages.

    Args:
        options: Options of the run.
        drafter: Name of the proposer.

    Raises:
        MeshError: If the mesh does not start or does not become whole again.
    """
    with running_mesh(options) as bed:
        run = LossRun(bed, drafter)
        bed.wait_whole(time.perf_counter())
        run.answer_undisturbed()
        for index, after_token in enumerate(loss_tokens(options.num_faults, options.answer_tokens[0])):
            run.lose(index, after_token)
    return run


def report(run: LossRun, options: ChaosOptions, draft: Path) -> Report:
    """All losses, and the figures with their bounds; for programs, with all samples."""
    conditions = {
        "model": options.model.name,
        "drafter": draft.name,
        "stage_hosts": options.num_stages,
        "spare_hosts": options.num_spares,
        "one_way_delay_ms": options.delay_ms,
        "threads_per_stage": options.num_threads,
        "answer_tokens": options.answer_tokens[0],
        "numeric_mode": "exact",
        "speculate": options.speculate,
        "serve_options": " ".join(Path(word).name for word in options.serve_options),
        "cores": num_usable(),
    }
    tally = run.tally(run.lost)
    wrong = [f"{each.request}: {each.kind}: {each.detail}" for each in tally.problems]
    return bounded_report(
        "Losses of a stage while a drafter reads hidden states",
        conditions,
        result_lines(run.lost, run.undisturbed, tally),
        _losses(run.lost),
        list_section("## Bad answers", "bad answer", wrong),
        undisturbed={name: _as_dict(answer) for name, answer in run.undisturbed.items()},
        losses=[_as_dict(answer) for answer in run.lost],
    )


def _losses(lost: Sequence[WatchedAnswer]) -> Section:
    """The losses one by one, with acceptance before and after."""
    heads = ("question", "lost at token", "another ring after, s", "before", "drafted", "after", "drafted")
    rows = [
        (
            each.answer.record.prompt_id,
            str(each.killed_tokens),
            number(each.repair_s),
            number(each.before.acceptance),
            str(each.before.drafted),
            number(each.after.acceptance),
            str(each.after.drafted),
        )
        for each in lost
    ]
    return table_section("## Losses", heads, rows)


def _as_dict(answer: WatchedAnswer) -> dict[str, Any]:
    return {
        "question": answer.answer.record.prompt_id,
        "num_prompt": answer.num_prompt,
        "killed_s": answer.killed_s,
        "samples": answer.samples,
    }


@click.command()
@shared_options.model_argument
@click.option(
    "--draft",
    type=shared_options.FILE,
    required=True,
    metavar="FILE",
    help="Drafter that reads hidden states.",
)
@int_option("--losses", "num_losses", default=10, help="Answers that lose a stage.")
@int_option("--tokens", "num_tokens", least=96, default=400, help="Tokens of an answer.")
@shared_options.delay_option
@shared_options.threads_option
@shared_options.serve_option
@float_option(
    "--whole-timeout-s",
    least=1.0,
    default=90.0,
    metavar="S",
    help="Time after a loss until all hosts must be back.",
)
@shared_options.logs_option()
@shared_options.json_option
@lab_experiment
def main(
    *,
    model: Path | None,
    draft: Path,
    num_losses: int,
    num_tokens: int,
    serve_options: tuple[str, ...],
    **given: Any,
) -> Report:
    """Kill a stage while answers draft from hidden states of MODEL, in the lab; without MODEL, the demo's.

    Prints the losses, and figures with their bounds. Exits with 1 if an answer is not the undisturbed one, or
    a bound is missed. Needs root.
    """
    model = model or demo_model()
    drafter = read_drafter(draft, read_model_facts(model))
    if not drafter.reads_features:
        raise InvalidModel(f"{draft.name} is a small model, which reads no hidden states")
    options = ChaosOptions(
        model=model,
        num_stages=_NUM_STAGES,
        num_spares=_NUM_SPARES,
        hang_up_share=0.0,
        is_short=False,
        seed=0,
        exact=True,
        ctx_size=num_tokens + _PROMPT_POSITIONS,
        speculate="draft",
        serve_options=("--draft", str(draft.resolve()), *_FIXED, *serve_options),
        output=Path(),
        scenarios=(),
        num_streams=1,
        num_faults=num_losses,
        kinds=(FaultKind.MIDDLE,),
        awaits_replicas=True,
        num_questions=min(num_losses, len(_TOPICS)),
        answer_tokens=(num_tokens,),
        **given,
    )
    return report(measure(options, drafter.kind.value), options, draft)


if __name__ == "__main__":
    main()
