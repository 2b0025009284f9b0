"""Random test of going back in models with recurrent layers.

    python -m tests.qualification.recurrent_windows models/d1 models/d2 --seed 21 --rounds 20

Each model with recurrent layers is cut, at single places and at all of them at once, and its stages compute
in exact mode and in one process what sessions send: random prompts, then windows of random widths, some of
them behind one another, whose proposed tokens are right as often as each round draws. Windows that become
void are computed by some stages and not by others. Prompts may continue an earlier session from a checkpoint.
The rules of sessions are the coordinator's own.

Wrong is a committed text that is not the one of the whole model, one row at a time; a row whose logits are
not those of that run; and rows after going back which differ, at any stage, from a second slot that computed
the same rows in the same batches and never went back. Logits and hidden states are compared bit by bit.

Exits with 1 if anything is wrong. A model that computes several rows at once unlike the same rows one by one
is not tried: it must not speculate in exact mode.
"""

from __future__ import annotations

import multiprocessing
import os
import tempfile
import zlib
from collections import deque
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Final

import click
import numpy as np

from mesh.coordinator.checkpoint_plan import CheckpointPlan
from mesh.coordinator.generation import Generation
from mesh.coordinator.prefix_cache import PrefixCache
from mesh.engine import GenerationRequest
from mesh.util.logs import set_up_logs
from spanmesh_proto.errors import MeshError
from speculative.proposer import EMPTY, Proposal
from stages.layers import LayerRange
from stages.runtime.numerics import EXACT_MAX_ROWS
from stages.runtime.spans import Span
from stages.runtime.stage_runtime import RuntimeOptions, StageRuntime
from stages.slicing.source_model import read_source
from stages.slicing.stage_writer import write_stage

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from numpy.typing import NDArray

    from mesh.coordinator.generation import Step, WindowPlan
    from stages.slicing.source_model import SourceModel

# The models' own context of 256 holds prompt and answer.
_CTX_SIZE: Final = 256
_MOST_PROMPT: Final = 120
_MOST_CONTINUED: Final = 190
_ANSWER: Final = 48
_MOST_WIDTH: Final = 16
_MOST_DEPTH: Final = 6
_LEAST_ROWS: Final = 24
_MOST_CHECKPOINTS: Final = 8
_MOST_LONE_CUTS: Final = 2
_SHARES_RIGHT: Final = (0.0, 0.3, 0.7, 0.95, 1.0)
# How often a prompt continues the session before it, and a window is compared, or without proposal, unasked.
_SHARE_CONTINUED: Final = 0.5
_SHARE_COMPARED: Final = 0.1
_SHARE_PLAIN: Final = 0.15
# Slots: the session's, and that of the session that never goes back.
_SLOT, _STEADY_SLOT = 0, 1
_WIDTHS_TRIED: Final = (2, 7, 16, EXACT_MAX_ROWS)


@dataclass(frozen=True)
class Findings:
    """What came of rounds."""

    num_rounds: int = 0
    """Sessions."""
    num_windows: int = 0
    """Windows judged, prefill chunks left out."""
    num_rejections: int = 0
    """Of these, those with a rejected token."""
    num_void: int = 0
    """Windows that became void in flight."""
    num_recomputed: int = 0
    """Rows of committed tokens that were computed again."""
    num_compared: int = 0
    """Windows whose rows were compared with a session that never went back."""
    num_continued: int = 0
    """Sessions that began with what an earlier one left."""
    wrong: tuple[str, ...] = ()
    """What was not as it must be, each with its round."""

    def __add__(self, other: Findings) -> Findings:
        return Findings(
            self.num_rounds + other.num_rounds,
            self.num_windows + other.num_windows,
            self.num_rejections + other.num_rejections,
            self.num_void + other.num_void,
            self.num_recomputed + other.num_recomputed,
            self.num_compared + other.num_compared,
            self.num_continued + other.num_continued,
            self.wrong + other.wrong,
        )

    def __str__(self) -> str:
        return (
            f"{self.num_rounds} rounds ({self.num_continued} continued), {self.num_windows} windows, "
            f"{self.num_rejections} rejections, {self.num_void} void, {self.num_recomputed} rows recomputed, "
            f"{self.num_compared} windows compared, wrong {len(self.wrong)}"
        )


@dataclass(frozen=True)
class Result:
    """What came of one model."""

    findings: Findings = Findings()
    """Of its rounds."""
    why_not_tried: str = ""
    """Why there were none; empty if there were."""


@dataclass(frozen=True)
class _Batch:
    """Rows that were computed together."""

    start: int
    tokens: tuple[int, ...]

    @property
    def stop(self) -> int:
        return self.start + len(self.tokens)


@dataclass(frozen=True)
class _Answer:
    """A window that all stages have computed."""

    window: WindowPlan
    """The window."""
    outputs: tuple[NDArray[np.float32], ...]
    """By stage, float32: hidden states (rows, n_embd), and at the tail logits (last rows, n_vocab)."""


@dataclass(frozen=True)
class _OnItsWay:
    """A window before one of the stages."""

    window: WindowPlan
    num_outputs: int
    outputs: tuple[NDArray[np.float32], ...] = ()


class _Stages:
    """The stages of a cut model, and windows on their way through them.

    Args:
        runtimes: Of the stages, in order, with two slots each.
        draw: Decides which stage is next.
    """

    def __init__(self, runtimes: Sequence[StageRuntime], draw: np.random.Generator) -> None:
        self._runtimes = runtimes
        self._draw = draw
        self._queues: tuple[deque[_OnItsWay], ...] = tuple(deque() for _ in runtimes)
        self._answers: deque[_Answer] = deque()

    def send(self, window: WindowPlan, num_outputs: int) -> None:
        """Send a window; the tail returns logits of its last rows."""
        self._queues[0].append(_OnItsWay(window, num_outputs))

    def answer(self) -> _Answer:
        """The oldest window, once the tail has computed it; stages compute in random order."""
        while not self._answers:
            self._advance()
        return self._answers.popleft()

    def void(self) -> None:
        """Drop all windows, after a random part of them was computed by a random part of the stages."""
        num_left = sum((len(self._queues) - index) * len(queue) for index, queue in enumerate(self._queues))
        for _ in range(int(self._draw.integers(num_left + 1))):
            self._advance()
        for queue in self._queues:
            queue.clear()
        self._answers.clear()

    def compute_steadily(self, batch: _Batch, num_outputs: int) -> tuple[NDArray[np.float32], ...]:
        """Compute rows in the slot of the session that never goes back; results as `_Answer.outputs`."""
        outputs: list[NDArray[np.float32]] = []
        for runtime in self._runtimes:
            hidden = outputs[-1] if outputs else None
            outputs += runtime.decode(
                [Span(_STEADY_SLOT, batch.start, batch.tokens, hidden, num_outputs=num_outputs)]
            )
        return tuple(outputs)

    def _advance(self) -> None:
        index = int(self._draw.choice([index for index, queue in enumerate(self._queues) if queue]))
        passing = self._queues[index].popleft()
        window = passing.window
        hidden = passing.outputs[-1] if passing.outputs else None
        (output,) = self._runtimes[index].decode(
            [
                Span(
                    _SLOT,
                    window.start,
                    window.tokens,
                    hidden,
                    num_outputs=passing.num_outputs,
                    checkpoints=window.asks.get("checkpoints", ()),
                )
            ]
        )
        outputs = (*passing.outputs, output)
        if index + 1 < len(self._queues):
            self._queues[index + 1].append(_OnItsWay(window, passing.num_outputs, outputs))
        else:
            self._answers.append(_Answer(window, outputs))


class _SteadySession:
    """A session in a slot of its own that never goes back: it begins anew instead."""

    def __init__(self, stages: _Stages) -> None:
        self._stages = stages
        self._held: list[_Batch] = []

    def compute(
        self, before: Sequence[_Batch], batch: _Batch, num_outputs: int
    ) -> tuple[NDArray[np.float32], ...]:
        """Results of rows after others, as `_Answer.outputs`; each in the same batches as given."""
        if self._held != list(before[: len(self._held)]):
            self._held = []
        for earlier in before[len(self._held) :]:
            self._stages.compute_steadily(earlier, 0)
            self._held.append(earlier)
        self._held.append(batch)
        return self._stages.compute_steadily(batch, num_outputs)


@dataclass(frozen=True)
class _PlainRun:
    """An answer of the whole model, one row at a time."""

    tokens: tuple[int, ...]
    """Prompt and answer."""
    logits: NDArray[np.float32]
    """float32 (positions but the last, n_vocab)."""
    seed: int
    """Seed of the samples."""


def _sample(logits: NDArray[np.float32], seed: int, position: int) -> int:
    """The token behind a position: Gumbel noise is drawn by seed and position alone."""
    noise = np.random.default_rng((seed, position)).gumbel(size=logits.size)
    return int(np.argmax(logits + noise))


def _run_plainly(whole: StageRuntime, prompt: tuple[int, ...], seed: int) -> _PlainRun:
    tokens, rows = list(prompt), []
    for position in range(len(prompt) + _ANSWER - 1):
        (row,) = whole.decode([Span(_SLOT, position, (tokens[position],), num_outputs=1)])
        rows.append(row)
        if position + 1 >= len(prompt):
            tokens.append(_sample(row[0], seed, position))
    return _PlainRun(tuple(tokens), np.concatenate(rows), seed)


class _Left:
    """What earlier sessions left in the slot.

    Attributes:
        cache: What the next session may begin with.
        tokens: Prompt and answer of the latest session.
        history: Batches that made what the slot holds.
    """

    def __init__(self) -> None:
        self.cache = PrefixCache(1, can_trim=False)
        self.tokens: tuple[int, ...] = ()
        self.history: list[_Batch] = []


class _Round:
    """One session.

    Args:
        stages: The cut model.
        plain: What the whole model answers.
        left: What the slot holds.
        draw: Decides everything.
    """

    def __init__(self, stages: _Stages, plain: _PlainRun, left: _Left, draw: np.random.Generator) -> None:
        self._stages, self._plain, self._left, self._draw = stages, plain, left, draw
        self._steady = _SteadySession(stages)
        prompt = plain.tokens[: len(plain.tokens) - _ANSWER]
        match = left.cache.match(prompt, None, {_SLOT})
        capacity = int(draw.integers(1, _MOST_CHECKPOINTS + 1))
        self._generation = Generation(
            GenerationRequest(prompt, _ANSWER),
            context_length=_CTX_SIZE,
            max_rows=int(draw.integers(_LEAST_ROWS, EXACT_MAX_ROWS + 1)),
            num_cached=match.num_cached,
            rollback=CheckpointPlan(capacity, match.checkpoints),
        )
        self._history = _until(left.history, match.num_cached)
        self._depth = int(draw.integers(1, _MOST_DEPTH + 1))
        self._share_right = float(draw.choice(_SHARES_RIGHT))
        self._is_compared: deque[bool] = deque()
        self._has_gone_back = self._has_continued = match.num_cached > 0

    def run(self) -> Findings:
        """Answer, and leave in the cache what the next session may begin with."""
        found = Findings(num_rounds=1, num_continued=int(self._has_continued))
        while True:
            self._send_some()
            answer = self._stages.answer()
            found += self._checked(answer, is_compared=self._is_compared.popleft())
            step = self._generation.commit(self._sampled(answer))
            if step is None:
                continue
            found += _counted(step)
            if step.voided:
                self._stages.void()
                self._is_compared.clear()
            self._has_gone_back |= step.judgement.is_rejected or bool(step.voided)
            if step.finish is not None:
                self._leave()
                return found + self._checked_text()

    def _leave(self) -> None:
        generation, left = self._generation, self._left
        left.tokens, left.history = generation.tokens, self._history
        left.cache.keep(_SLOT, None, generation.computed, generation.return_points)

    def _send_some(self) -> None:
        generation, draw = self._generation, self._draw
        while not generation.is_prefilled:
            self._send(generation.prefill(int(draw.integers(1, EXACT_MAX_ROWS + 1))))
        while generation.num_in_flight < self._depth:
            width = min(generation.room, int(draw.integers(1, _MOST_WIDTH + 1)))
            if not generation.num_in_flight:
                is_plain = draw.random() < _SHARE_PLAIN
                self._send(generation.next_window(EMPTY if is_plain or width < 1 else self._guess(width)))
            elif width < 1:
                return
            else:
                self._send(generation.next_window(self._guess(width)))

    def _guess(self, width: int) -> Proposal:
        start = self._generation.position + len(self._generation.ahead)
        right = self._plain.tokens[start : start + width]
        drawn = self._draw.random(width) < self._share_right
        others = self._draw.integers(self._plain.logits.shape[1], size=width).tolist()
        tokens = [*right, *others[len(right) :]]
        chosen = (
            one if is_right else other for one, other, is_right in zip(tokens, others, drawn, strict=True)
        )
        return Proposal(tuple(chosen), (0.5,) * width, "random")

    def _send(self, window: WindowPlan) -> None:
        # Only the first window behind a rejection goes back.
        is_compared = self._has_gone_back or self._draw.random() < _SHARE_COMPARED
        self._has_gone_back = False
        self._is_compared.append(is_compared)
        self._stages.send(window, len(window.tokens) if is_compared else window.num_verified)

    def _sampled(self, answer: _Answer) -> tuple[int, ...]:
        """The tail's ids up to the first that was not proposed."""
        window, logits = answer.window, answer.outputs[-1]
        sampled: list[int] = []
        for place in range(window.stop - window.num_verified, window.stop):
            sampled.append(_sample(logits[place - window.stop], self._plain.seed, place))
            if place + 1 < window.stop and window.tokens[place + 1 - window.start] != sampled[-1]:
                break
        return tuple(sampled)

    def _checked(self, answer: _Answer, *, is_compared: bool) -> Findings:
        """Compare rows with the plain run, and with the session that never goes back."""
        window = answer.window
        batch = _Batch(window.start, window.tokens)
        before = _until(self._history, window.start)
        if (before[-1].stop if before else 0) != window.start:
            return Findings(wrong=(f"a window at {window.start} begins where no batch ended",))
        wrong = self._unlike_plain(answer)
        if is_compared:
            steady = self._steady.compute(before, batch, len(window.tokens))
            wrong += [
                f"stage {index} has other rows at {window.start} than without going back"
                for index, (ours, theirs) in enumerate(zip(answer.outputs, steady, strict=True))
                if not _same_bits(ours, theirs)
            ]
        self._history = [*before, batch]
        return Findings(num_compared=int(is_compared), wrong=tuple(wrong))

    def _unlike_plain(self, answer: _Answer) -> list[str]:
        window, logits, plain = answer.window, answer.outputs[-1], self._plain
        for place in range(window.start, window.stop):
            if place >= len(plain.logits) or window.tokens[place - window.start] != plain.tokens[place]:
                break
            row = place - window.stop
            if -row <= len(logits) and not _same_bits(logits[row], plain.logits[place]):
                return [f"the row at {place}, in a window at {window.start}, has other logits than plainly"]
        return []

    def _checked_text(self) -> Findings:
        is_equal = self._generation.tokens == self._plain.tokens
        return Findings(wrong=() if is_equal else ("another text than plainly",))


def _until(history: Sequence[_Batch], position: int) -> list[_Batch]:
    return [batch for batch in history if batch.stop <= position]


def _counted(step: Step) -> Findings:
    return Findings(
        num_windows=int(not step.window.is_prompt),
        num_rejections=int(step.judgement.is_rejected),
        num_void=len(step.voided),
        num_recomputed=step.window.num_recomputed,
    )


def _same_bits(left: NDArray[np.float32], right: NDArray[np.float32]) -> bool:
    return left.shape == right.shape and np.array_equal(left.view(np.uint32), right.view(np.uint32))


def examine(model: Path, seed: int, num_rounds: int) -> Result:
    """Try one model.

    Args:
        model: A whole model with recurrent layers, a GGUF file.
        seed: The same seed gives the same rounds.
        num_rounds: Sessions, spread over the cuts.

    Raises:
        MeshError: If the model cannot be loaded or cut.
    """
    source = read_source(model)
    seeds = (seed, zlib.crc32(model.name.encode()))
    draw = np.random.default_rng(seeds)
    findings = Findings()
    with closing(StageRuntime(model, RuntimeOptions(ctx_size=_CTX_SIZE, exact=True))) as whole:
        reason = _unlike_one_by_one(whole, draw)
        if reason:
            return Result(why_not_tried=reason)
        layouts = _layouts(source, draw)
        for index, cuts in enumerate(layouts):
            with ExitStack() as stack:
                runtimes = [stack.enter_context(closing(each)) for each in _runtimes(source, cuts)]
                findings += _try_cuts(
                    whole, runtimes, cuts, [(*seeds, each) for each in range(index, num_rounds, len(layouts))]
                )
    return Result(findings)


def _layouts(source: SourceModel, draw: np.random.Generator) -> list[tuple[int, ...]]:
    """Where to cut: some places alone, and all at once; nowhere in a model that is not cut."""
    places = source.lone_cuts
    if len(places) < 2:
        return [places]
    lone = draw.choice(places, size=min(_MOST_LONE_CUTS, len(places)), replace=False)
    return [*((int(cut),) for cut in sorted(lone)), places]


def _runtimes(source: SourceModel, cuts: tuple[int, ...]) -> Iterator[StageRuntime]:
    options = RuntimeOptions(num_slots=2, ctx_size=_CTX_SIZE, exact=True, num_checkpoints=_MOST_CHECKPOINTS)
    with tempfile.TemporaryDirectory(prefix="spanmesh-windows-") as folder:
        for start, stop in pairwise((0, *cuts, source.n_layers)):
            path = Path(folder) / f"{start}.gguf"
            write_stage(source, LayerRange(start, stop), path, lambda _num_bytes: None)
            yield StageRuntime(path, options)
            path.unlink()


def _unlike_one_by_one(whole: StageRuntime, draw: np.random.Generator) -> str:
    """Why rows at once are not the same rows one by one; empty if they are."""
    tokens = tuple(draw.integers(whole.info.n_vocab, size=sum(_WIDTHS_TRIED)).tolist())
    one_by_one = [
        whole.decode([Span(_SLOT, position, (token,), num_outputs=1)])[0]
        for position, token in enumerate(tokens)
    ]
    start = 0
    for width in _WIDTHS_TRIED:
        stop = start + width
        (at_once,) = whole.decode([Span(_SLOT, start, tokens[start:stop], num_outputs=width)])
        rows = np.concatenate(one_by_one[start:stop])
        if not _same_bits(at_once, rows):
            worst = float(np.max(np.abs(at_once - rows)))
            return f"{width} rows at once differ by up to {worst:.2g} from the same rows one by one"
        start = stop
    return ""


def _try_cuts(
    whole: StageRuntime,
    runtimes: Sequence[StageRuntime],
    cuts: tuple[int, ...],
    seeds: Sequence[tuple[int, ...]],
) -> Findings:
    """Rounds with a model that is cut at some places; each has its seed."""
    findings, left = Findings(), _Left()
    for round_seed in seeds:
        draw = np.random.default_rng(round_seed)
        prompt = _prompt(left.tokens, whole.info.n_vocab, draw)
        plain = _run_plainly(whole, prompt, int(draw.integers(2**31)))
        try:
            found = _Round(_Stages(runtimes, draw), plain, left, draw).run()
        except (MeshError, ValueError) as error:
            found = Findings(num_rounds=1, wrong=(f"{type(error).__name__}: {error}",))
            left = _Left()
        where = f"cut at {cuts or 'no place'}, round {round_seed[-1]}"
        findings += replace(found, wrong=tuple(f"{where}: {each}" for each in found.wrong))
    return findings


def _prompt(before: tuple[int, ...], n_vocab: int, draw: np.random.Generator) -> tuple[int, ...]:
    """A new prompt, or one that continues the session before, or most of it."""
    if before and draw.random() < _SHARE_CONTINUED:
        shared = before[: int(draw.integers(len(before) // 2, len(before) + 1))]
        more = draw.integers(n_vocab, size=int(draw.integers(1, 20))).tolist()
        return (*shared, *more)[:_MOST_CONTINUED]
    return tuple(draw.integers(n_vocab, size=int(draw.integers(1, _MOST_PROMPT + 1))).tolist())


def _quiet() -> None:
    set_up_logs()
    os.environ["GGML_NO_BACKTRACE"] = "1"  # or an abort starts a debugger


def examine_apart(model: Path, seed: int, num_rounds: int) -> Result:
    """`examine` in a process of its own, which llama.cpp may abort; what fails there is wrong."""
    spawning = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=spawning, initializer=_quiet) as pool:
        try:
            return pool.submit(examine, model, seed, num_rounds).result()
        except MeshError as error:
            return Result(Findings(wrong=(error.message,)))
        except BrokenProcessPool:
            return Result(Findings(wrong=("llama.cpp aborts",)))


def recurrent_models(paths: Sequence[Path]) -> list[Path]:
    """Of files and folders of files, the models with recurrent layers."""
    models = [model for path in paths for model in (sorted(path.glob("*.gguf")) if path.is_dir() else [path])]
    return [model for model in models if _is_recurrent(model)]


def _is_recurrent(model: Path) -> bool:
    try:
        return read_source(model).family.has_recurrent_state
    except MeshError:
        return False


@click.command()
@click.argument("models", type=click.Path(exists=True, path_type=Path), nargs=-1, required=True)
@click.option("--seed", type=int, default=21, show_default=True, help="Seed of all rounds.")
@click.option(
    "--rounds", type=click.IntRange(min=1), default=20, show_default=True, help="Sessions of each model."
)
def main(models: tuple[Path, ...], seed: int, rounds: int) -> None:
    """Try each of MODELS, files or folders of files, that has recurrent layers."""
    set_up_logs()
    found = Findings()
    num_tried = 0
    for model in recurrent_models(models):
        result = examine_apart(model, seed, rounds)
        name = f"{model.parent.name}/{model.name}"
        click.echo(
            f"{name}: {f'not tried: {result.why_not_tried}' if result.why_not_tried else result.findings}"
        )
        for each in result.findings.wrong:
            click.echo(f"  {each}", err=True)
        found += result.findings
        num_tried += not result.why_not_tried
    click.echo(f"{num_tried} models: {found}")
    if found.wrong or not num_tried:
        click.get_current_context().exit(1)


if __name__ == "__main__":
    main()
