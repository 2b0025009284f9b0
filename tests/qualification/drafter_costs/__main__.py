"""Command that measures the costs of drafters that read hidden states, beside what they win.

Four hosts in the lab: a head without layers and three with a third of them each, one thread a stage, greedy,
one request at a time. All ratios come from one run of one mesh, whose settings answer the same prompts in
turn:

- *features*: they are tapped, sent and received, but nothing is drafted, over plain decoding; no option of
  `mesh serve` does that, so `tests.qualification.drafter_costs.feature_listener` is the head of this mesh;
- *first token* of a long prompt that no cache holds, with the drafter over plain decoding;
- *absorbing*: rows that the drafter computes for its cache only, over rows with outputs, in one process; of
  a drafter of blocks, times of those by length, and of features that it reads;
- *bytes* of features that arrived, over the values in them, and for each position.

Features are sent for all rows of a window that wants them, except that the tail leaves out rejected ones. So
bytes are counted where windows go one at a time: there every row has a verdict. A second mesh, which always
drafts, has some of them rejected.
"""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Final

import click
import structlog

from mesh.cli.shared_options import Numbers, int_option
from mesh.draft.drafter import read_drafter
from mesh.options.model import ModelOptions
from mesh.serve.options import demo_model
from mesh.text.tokenizer import Tokenizer
from mesh.util.completion_stream import COMPLETION_PATH
from meshbench.datasets import BUILT_IN, made_up_prompts
from meshbench.experiment import lab_experiment
from meshbench.lab.network import Lab
from meshbench.lab.systems import MeshSystem, start_logged
from meshbench.load_client.client import LoadClient
from meshbench.load_client.schedule import Request
from meshbench.paired_systems import even_split
from meshbench.report_tools import Report, table_section
from meshbench.shared_options import FILE, json_option, logs_option, model_argument
from spanmesh_proto.errors import InvalidModel, MeshError
from speculative.draft import defaults
from stages.process_limits import num_usable
from stages.slicing.model_facts import read_model_facts
from tests.qualification.bounded_report import bounded_report
from tests.qualification.drafter_costs.feature_listener import LISTENING
from tests.qualification.drafter_costs.figures import (
    LONG_DELAY_MS,
    DecodeRound,
    Figures,
    FirstTokenRound,
    SentFeatures,
    time_lines,
)
from tests.qualification.drafter_costs.timing import time_drafter
from tests.qualification.programs import program_command

if TYPE_CHECKING:
    import subprocess
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from pathlib import Path

    from meshbench.load_client.answers import AnswerRecord

_NUM_STAGES: Final = 3
_OFF: Final[dict[str, Any]] = {"speculation": {"mode": "off"}}
_FEATURES: Final[dict[str, Any]] = {"speculation": {"mode": LISTENING}}
_DRAFT: Final[dict[str, Any]] = {"speculation": {"mode": "draft"}}
_DELAYS_MS: Final = (0.1, 5.0)
_ALWAYS: Final = ("--speculate", "draft", "--set", "spec-width=3", "--set", "spec-depth=1")
# Enough that drafting begins while the prompt is still on its way.
_FEW_TOKENS: Final = 16
_COUNTED_TOKENS: Final = 64
_SPARE_POSITIONS: Final = 32
_WARM_UP: Final = "Describe a house by the sea."

log = structlog.get_logger()


class ListeningMesh(MeshSystem):
    """A mesh whose head is that of `tests.qualification.drafter_costs.feature_listener`."""

    def _launch(self, host: int, arguments: list[str]) -> subprocess.Popen[bytes]:
        if host != 0:
            return super()._launch(host, arguments)
        argv = program_command("tests.qualification.drafter_costs.feature_listener", *arguments)
        self._processes[host] = process = start_logged(self._lab, host, argv, self.log(host))
        return process


@dataclass(frozen=True)
class Settings:
    """Sizes of the measurement."""

    model: Path
    """A GGUF."""
    draft: Path
    """Its drafter."""
    delays_ms: tuple[float, ...]
    """Delays at which decode rates are measured."""
    num_rounds: int
    """Prompts of each kind, at each delay."""
    num_tokens: int
    """Of each answer whose rate is measured."""
    prompt_tokens: int
    """Of a long prompt."""
    num_threads: int
    """Of each stage."""

    @property
    def ctx_size(self) -> int:
        """Positions of a session."""
        longest = max(self.prompt_tokens + _COUNTED_TOKENS, 8 * len(max(BUILT_IN, key=len)) + self.num_tokens)
        return longest + _SPARE_POSITIONS


class Measurement:
    """Requests to a running mesh, in turn.

    Args:
        lab: Where.
        mesh: The mesh.
        client: Client on the head's host.
        settings: Sizes.
        tokenizer: Of the model.
    """

    def __init__(
        self, lab: Lab, mesh: MeshSystem, client: LoadClient, settings: Settings, tokenizer: Tokenizer
    ) -> None:
        self._lab = lab
        self._mesh = mesh
        self._client = client
        self._settings = settings
        self._tokenizer = tokenizer
        self._seeds = iter(range(1, 1 << 30))
        self.listened = SentFeatures()

    def decode_rounds(self) -> Iterator[DecodeRound]:
        """Rates of the same prompts, plain and with features."""
        for delay_ms in self._settings.delays_ms:
            self._settle(delay_ms, (_OFF, _FEATURES))
            for number in range(self._settings.num_rounds):
                prompt = BUILT_IN[number % len(BUILT_IN)]

                def ask(fields: Mapping[str, Any], prompt: str = prompt) -> AnswerRecord:
                    more = {**self._mesh.fields, **fields}
                    return self._ask(Request.chat(prompt, self._settings.num_tokens, more))

                off, features, again = _in_turn(number, (_OFF, _FEATURES, _OFF), ask)
                self.listened += SentFeatures.of(features.timings)
                counts = features.timings["speculation"]["features"]
                found = DecodeRound(
                    delay_ms,
                    off.tokens_per_s,
                    features.tokens_per_s,
                    again.tokens_per_s,
                    counts["received"] / counts["wanted"],
                )
                log.info("decode_round", **asdict(found))
                yield found

    def first_token_rounds(self) -> Iterator[FirstTokenRound]:
        """Times of long prompts, with the drafter and without."""
        self._settle(LONG_DELAY_MS, (_OFF, _DRAFT))
        for number in range(self._settings.num_rounds):
            prompt = self._long_prompt()

            def ask(fields: Mapping[str, Any], prompt: list[int] = prompt) -> AnswerRecord:
                return self._ask_long(prompt, _FEW_TOKENS, fields)

            off, draft = _in_turn(number, (_OFF, _DRAFT), ask)
            wanted = draft.timings["speculation"]["features"]["wanted"]
            found = FirstTokenRound(off.ttft_ms, draft.ttft_ms, wanted)
            log.info("first_token_round", **asdict(found))
            yield found

    def drafted(self) -> SentFeatures:
        """Features of long prompts and drafted answers; windows must go one at a time."""
        self._settle(LONG_DELAY_MS, (_OFF, _DRAFT))
        answers = (self._ask_long(self._long_prompt(), _COUNTED_TOKENS, _DRAFT) for _ in range(2))
        return sum((SentFeatures.of(answer.timings) for answer in answers), SentFeatures())

    def _settle(self, delay_ms: float, settings: Sequence[Mapping[str, Any]]) -> None:
        """Change the delay, and have each setting answer once at it."""
        self._lab.set_delay_ms(delay_ms)
        for fields in settings:
            self._ask(
                Request.chat(_WARM_UP, min(self._settings.num_tokens, 48), {**self._mesh.fields, **fields})
            )

    def _long_prompt(self) -> list[int]:
        """A new prompt of exactly the length."""
        wanted = self._settings.prompt_tokens
        text = made_up_prompts(1, wanted, next(self._seeds))[0].text
        tokens = self._tokenizer.encode(text, add_special=True, parse_special=False)
        return (tokens * (1 + wanted // len(tokens)))[:wanted]

    def _ask_long(self, prompt: list[int], num_tokens: int, fields: Mapping[str, Any]) -> AnswerRecord:
        wanted = {"max_tokens": num_tokens, "temperature": 0, "return_token_ids": True}
        answer = self._ask(
            Request.streamed({"prompt": prompt, **wanted, **self._mesh.fields, **fields}, COMPLETION_PATH)
        )
        if answer.timings["prompt_n"] != len(prompt):
            raise MeshError(f"{answer.timings['prompt_n']} of {len(prompt)} tokens of a prompt were computed")
        return answer

    def _ask(self, request: Request) -> AnswerRecord:
        return self._client.answer(self._mesh.url, (request,)).answers[0]


def _in_turn(
    number: int, settings: Sequence[Mapping[str, Any]], ask: Callable[[Mapping[str, Any]], AnswerRecord]
) -> list[AnswerRecord]:
    """Answers under each setting, in their order; which one begins goes round."""
    answers: dict[int, AnswerRecord] = {}
    for offset in range(len(settings)):
        index = (number + offset) % len(settings)
        answers[index] = ask(settings[index])
    return [answers[index] for index in range(len(settings))]


def measure(settings: Settings, logs: Path) -> Figures:
    """Measure everything.

    Raises:
        MeshError: If the drafter reads no features, or something does not run.
    """
    facts = read_model_facts(settings.model)
    drafter = read_drafter(settings.draft, facts)
    if not drafter.reads_features:
        raise InvalidModel(f"{settings.draft.name} is a small model, which reads no hidden states")
    # As `mesh serve` chooses it.
    feature_type = ModelOptions().feature_type(len(drafter.layers))
    tokenizer = Tokenizer(settings.model)
    times = time_drafter(drafter, settings.model, tokenizer.n_vocab)
    log.info("drafter_timed", figures=[(line.title, line.measured) for line in time_lines(times)])
    shared = [logs, settings.model.resolve().parent, settings.draft.resolve().parent]
    with Lab(1 + _NUM_STAGES, shared=shared) as lab, LoadClient(lab) as client:
        with _running(lab, settings, logs) as mesh:
            run = Measurement(lab, mesh, client, settings, tokenizer)
            decode, listened = tuple(run.decode_rounds()), run.listened
        # A drafter that wins nothing here would rest, and its features would not be wanted.
        with _running(lab, settings, logs, *_ALWAYS) as mesh:
            run = Measurement(lab, mesh, client, settings, tokenizer)
            first_token = tuple(run.first_token_rounds())
            drafted = run.drafted()
    return Figures(
        decode=decode,
        first_token=first_token,
        times=times,
        listened=listened,
        drafted=drafted,
        row_values=len(drafter.layers) * drafter.n_embd,
        row_bytes=len(drafter.layers) * feature_type.row_bytes(drafter.n_embd),
        num_read=min(settings.prompt_tokens, defaults.CONTEXT),
    )


@contextmanager
def _running(lab: Lab, settings: Settings, logs: Path, *more: str) -> Iterator[MeshSystem]:
    """A mesh for the block; more options of `mesh serve` may follow."""
    lab.set_delay_ms(0.0)
    folder = logs / ("always" if more else "mesh")
    folder.mkdir(exist_ok=True)
    options = ["--draft", str(settings.draft), "--parallel", "1", "--ctx-size", str(settings.ctx_size)]
    mesh = ListeningMesh(
        lab,
        settings.model,
        folder,
        num_threads=settings.num_threads,
        split=even_split(read_model_facts(settings.model).n_layers, _NUM_STAGES),
        options=[*options, *more],
    )
    try:
        mesh.start()
        yield mesh
        mesh.stop()
    finally:
        mesh.kill()


def report(settings: Settings, figures: Figures) -> Report:
    """All rounds, and the figures with their bounds."""
    conditions = {
        "model": settings.model.name,
        "drafter": settings.draft.name,
        "stage_hosts": _NUM_STAGES,
        "threads_per_stage": settings.num_threads,
        "rounds": settings.num_rounds,
        "tokens": settings.num_tokens,
        "long_prompt": f"{settings.prompt_tokens} tokens",
        "draft_context": defaults.CONTEXT,
        "cores": num_usable(),
    }
    decode = [
        (f"{each.delay_ms:g}", f"{each.off:.2f}", f"{each.features:.2f}", f"{each.again:.2f}")
        for each in figures.decode
    ]
    first = [(f"{each.off:.0f}", f"{each.draft:.0f}", f"{each.num_wanted}") for each in figures.first_token]
    heads = ("first token off, ms", "with drafter", "rows with features wanted")
    return bounded_report(
        "Costs of a drafter that reads hidden states",
        conditions,
        figures.lines(),
        table_section("## Decoding", ("delay, ms", "off, tokens/s", "features", "off again"), decode),
        table_section("## Long prompts", heads, first),
        figures=figures,
    )


@click.command()
@model_argument
@click.option("--draft", type=FILE, required=True, metavar="FILE", help="Drafter that reads hidden states.")
@click.option(
    "--delay-ms",
    "delays_ms",
    type=Numbers(float, 0.0),
    default=_DELAYS_MS,
    metavar="A,B,…",
    help="One-way delays at which decode rates are measured; 0.1 and 5 unless given.",
)
@int_option("--rounds", "num_rounds", default=6, help="Prompts, each answered under every setting.")
@int_option("--tokens", "num_tokens", least=16, default=128, help="Tokens of an answer.")
@int_option("--prompt-tokens", least=64, default=2048, help="Tokens of a long prompt.")
@int_option("--threads", "num_threads", default=1, help="Threads of each stage.")
@logs_option()
@json_option
@lab_experiment
def main(*, model: Path | None, logs: Path, **given: Any) -> Report:
    """Measure what a drafter that reads hidden states of MODEL costs, in the lab; without MODEL, the demo's.

    Prints ratios with their bounds, and exits with 1 if one is missed. Needs root.
    """
    settings = Settings(model=model or demo_model(), **given)
    return report(settings, measure(settings, logs))


if __name__ == "__main__":
    main()
