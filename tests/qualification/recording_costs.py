"""Command that measures what recording answers costs, in the lab.

Four hosts: a head without layers, which records, and three with a third of them each, one thread a stage,
greedy, one request at a time. One mesh answers the same prompts in turn, recorded and not (`"record":
false`), so that both rates of a pair come from the same processes within a few seconds. Which one begins goes
round: off, on, on, off, and the other way about.
"""

from __future__ import annotations

import time
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from statistics import fmean
from typing import TYPE_CHECKING, Any, Final

import click
import structlog

from mesh.cli.shared_options import Numbers, int_option
from mesh.serve.options import demo_model
from meshbench.datasets import BUILT_IN
from meshbench.experiment import lab_experiment
from meshbench.lab.network import Lab
from meshbench.lab.systems import MeshSystem, get_status
from meshbench.load_client.client import LoadClient
from meshbench.load_client.schedule import Request
from meshbench.paired_systems import even_split
from meshbench.report_tools import Line, PairedRatio, Report, table_section
from meshbench.shared_options import FILE, json_option, logs_option, model_argument
from spanmesh_proto.errors import MeshError
from stages.process_limits import num_usable
from stages.slicing.model_facts import read_model_facts
from tests.qualification.bounded_report import bounded_report

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from mesh.status import RecordingStatus

_NUM_STAGES: Final = 3
_DELAYS_MS: Final = (0.0, 5.0)
_OFF: Final[dict[str, Any]] = {"record": False}
_ON: Final[dict[str, Any]] = {}
_WRITE_PATIENCE_S: Final = 10.0

log = structlog.get_logger()


@dataclass(frozen=True)
class Settings:
    """Sizes of the measurement."""

    model: Path
    """A GGUF."""
    draft: Path | None
    """Its drafter; None for plain decoding without proposals."""
    delays_ms: tuple[float, ...]
    """One-way delays."""
    num_rounds: int
    """Prompts at each delay; each is answered twice in both ways."""
    num_tokens: int
    """Tokens of an answer."""
    num_threads: int
    """Threads of each stage."""


@dataclass(frozen=True)
class Round:
    """One prompt, recorded and not; means of two answers each."""

    delay_ms: float
    """One way."""
    off: float
    """Tokens per second without recording."""
    on: float
    """With it."""
    off_cpu_ms: float
    """Processor time of all processes of the mesh per token, prompt included."""
    on_cpu_ms: float
    """The same with recording."""


class Measurement:
    """Requests to a running mesh, in turn.

    Args:
        lab: Where.
        mesh: The mesh, which records.
        client: Client on the head's host.
        settings: Sizes.

    Attributes:
        num_recorded: Answers asked for so far that are to be recorded.
    """

    def __init__(self, lab: Lab, mesh: MeshSystem, client: LoadClient, settings: Settings) -> None:
        self._lab = lab
        self._mesh = mesh
        self._client = client
        self._settings = settings
        self.num_recorded = 0

    def rounds(self) -> Iterator[Round]:
        """Rates of the same prompts with and without recording, at all delays.

        Raises:
            MeshError: If an answer differs by recording.
        """
        for delay_ms in self._settings.delays_ms:
            self._lab.set_delay_ms(delay_ms)
            for is_on in (False, True):
                self._ask(BUILT_IN[-1], is_on=is_on)
            for number in range(self._settings.num_rounds):
                found = self._round(delay_ms, BUILT_IN[number % len(BUILT_IN)], begins_on=number % 2 == 1)
                log.info("recording_round", **asdict(found))
                yield found

    def recording(self) -> RecordingStatus:
        """What the mesh has recorded, once all of it is written.

        Raises:
            MeshError: If answers are missing.
        """
        deadline_s = time.monotonic() + _WRITE_PATIENCE_S
        while True:
            status = get_status(self._lab, self._mesh.port).recording
            if status is not None and status.written == self.num_recorded and not status.left_out:
                return status
            if time.monotonic() > deadline_s:
                raise MeshError(f"{self.num_recorded} answers were to be recorded: {status}")
            time.sleep(0.5)

    def _round(self, delay_ms: float, prompt: str, *, begins_on: bool) -> Round:
        rates: dict[bool, list[float]] = {False: [], True: []}
        cpu_ms: dict[bool, list[float]] = {False: [], True: []}
        texts = set()
        for is_on in (begins_on, not begins_on, not begins_on, begins_on):
            rate, each_cpu_ms, text = self._ask(prompt, is_on=is_on)
            rates[is_on].append(rate)
            cpu_ms[is_on].append(each_cpu_ms)
            texts.add(text)
        if len(texts) > 1:
            raise MeshError(f"answers differ by recording: {sorted(texts)}")
        return Round(delay_ms, *(fmean(each[is_on]) for each in (rates, cpu_ms) for is_on in (False, True)))

    def _ask(self, prompt: str, *, is_on: bool) -> tuple[float, float, str]:
        """Tokens per second, processor time per token in ms, and the text of an answer."""
        fields = {**self._mesh.fields, **(_ON if is_on else _OFF)}
        before_s = self._mesh.cpu_s()
        request = Request.chat(prompt, self._settings.num_tokens, fields)
        answer = self._client.answer(self._mesh.url, (request,)).answers[0]
        cpu_ms = 1e3 * (self._mesh.cpu_s() - before_s)
        self.num_recorded += is_on
        return answer.tokens_per_s, cpu_ms / answer.num_tokens, answer.text


def measure(settings: Settings, logs: Path) -> tuple[tuple[Round, ...], RecordingStatus]:
    """Measure everything: all rounds, and what the mesh recorded meanwhile.

    Raises:
        MeshError: If something does not run, or answers were not recorded.
    """
    shared = [logs, settings.model.resolve().parent]
    if settings.draft is not None:
        shared.append(settings.draft.resolve().parent)
    with (
        Lab(1 + _NUM_STAGES, shared=shared) as lab,
        LoadClient(lab) as client,
        _running(lab, settings, logs) as mesh,
    ):
        run = Measurement(lab, mesh, client, settings)
        return tuple(run.rounds()), run.recording()


@contextmanager
def _running(lab: Lab, settings: Settings, logs: Path) -> Iterator[MeshSystem]:
    lab.set_delay_ms(0.0)
    drafts = ["--speculate", "off"] if settings.draft is None else ["--draft", str(settings.draft)]
    mesh = MeshSystem(
        lab,
        settings.model,
        logs,
        num_threads=settings.num_threads,
        split=even_split(read_model_facts(settings.model).n_layers, _NUM_STAGES),
        options=["--parallel", "1", "--record", str(logs / "recording"), *drafts],
    )
    try:
        mesh.start()
        yield mesh
        mesh.stop()
    finally:
        mesh.kill()


def figures(rounds: tuple[Round, ...], recording: RecordingStatus) -> list[Line]:
    """Ratios with their bounds, and what a token takes."""
    lines = []
    for delay_ms in dict.fromkeys(each.delay_ms for each in rounds):
        found = [each for each in rounds if each.delay_ms == delay_ms]
        ratio = PairedRatio.of([(each.on, each.off) for each in found])
        lines += ratio.lines(f"decode rate at {delay_ms:g} ms, recorded", "not", f"{len(found)} rounds")
        more_us = 1e3 * fmean(each.on_cpu_ms - each.off_cpu_ms for each in found)
        note = f"of {fmean(each.off_cpu_ms for each in found):.2f} ms"
        lines.append(Line(f"further processor time a token at {delay_ms:g} ms, µs", more_us, None, note=note))
    note = f"{recording.bytes} bytes, {recording.tokens} tokens of {recording.conversations} answers"
    lines.append(
        Line("bytes recorded a token of an answer", recording.bytes / recording.tokens, None, note=note)
    )
    return lines


def report(settings: Settings, rounds: tuple[Round, ...], recording: RecordingStatus) -> Report:
    """All rounds, and the figures with their bounds."""
    conditions = {
        "model": settings.model.name,
        "drafter": "none" if settings.draft is None else settings.draft.name,
        "stage_hosts": _NUM_STAGES,
        "threads_per_stage": settings.num_threads,
        "tokens": settings.num_tokens,
        "cores": num_usable(),
    }
    rows = [
        (
            f"{each.delay_ms:g}",
            f"{each.off:.2f}",
            f"{each.on:.2f}",
            f"{each.off_cpu_ms:.2f}",
            f"{each.on_cpu_ms:.2f}",
        )
        for each in rounds
    ]
    heads = ("delay, ms", "off, tokens/s", "recorded", "off, processor ms a token", "recorded")
    lines = figures(rounds, recording)
    return bounded_report(
        "Costs of recording", conditions, lines, table_section("## Rounds", heads, rows), rounds=rounds
    )


@click.command()
@model_argument
@click.option(
    "--draft", type=FILE, metavar="FILE", help="Drafter that reads hidden states; none unless given."
)
@click.option(
    "--delay-ms",
    "delays_ms",
    type=Numbers(float, 0.0),
    default=_DELAYS_MS,
    metavar="A,B,…",
    help="One-way delays; 0 and 5 unless given.",
)
@int_option("--rounds", "num_rounds", default=12, help="Prompts at each delay.")
@int_option("--tokens", "num_tokens", least=16, default=128, help="Tokens of an answer.")
@int_option("--threads", "num_threads", default=1, help="Threads of each stage.")
@logs_option()
@json_option
@lab_experiment
def main(*, model: Path | None, logs: Path, **given: Any) -> Report:
    """Measure what recording answers of MODEL costs, in the lab; without MODEL, the demo's.

    Prints ratios with their bounds, and exits with 1 if one is missed. Needs root.
    """
    settings = Settings(model=model or demo_model(), **given)
    return report(settings, *measure(settings, logs))


if __name__ == "__main__":
    main()
