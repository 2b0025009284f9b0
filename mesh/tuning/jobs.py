"""Work of the process that computes with torch: what is asked for, and what comes of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

    from mesh.tuning.acceptance import AnswerDrafts
    from mesh.tuning.answers import AnswerChoice

Progress = Callable[[str, float], None]
"""Called with what is being done, and the share of it that is done, 0 to 1."""


@dataclass(frozen=True)
class Device:
    """Where torch computes."""

    name: str = "cpu"
    """As torch names it: `cpu`, `cuda`, `cuda:1`."""
    num_threads: int = 1
    """Threads on a processor."""


@dataclass(frozen=True)
class Schedule:
    """How long and how a drafter learns."""

    passes: int = 3
    """How often each answer is learned."""
    num_steps: int = 3
    """Steps of a chain that are learned."""
    batch: int = 4
    """Answers of a step."""
    rate: float = 2e-4
    """Largest rate."""
    seed: int = 0
    """Of the order of answers."""
    minutes: float = 60.0
    """Longest time, of this process."""


@dataclass(frozen=True)
class TuneJob:
    """A drafter to be tuned."""

    folders: tuple[Path, ...]
    """Recordings of the model's answers."""
    target: Path
    """The model's file."""
    drafter: Path
    """The drafter to begin with."""
    output: Path
    """Where the new one is to lie; its run's folder is beside it."""
    schedule: Schedule
    device: Device
    vocabulary: int | None
    """Tokens that can be drafted: None for as many as before, 0 for the same ones."""
    is_resumed: bool
    """Whether an unfinished run goes on."""
    choice: AnswerChoice | None = None
    """Answers that count; None for all."""
    is_background: bool = False
    """Whether it gives way to all else on this host, and time counts while it computes only."""


@dataclass(frozen=True)
class MeasureJob:
    """Drafters to be measured on the same answers."""

    folders: tuple[Path, ...]
    target: Path
    drafters: tuple[Path, ...]
    device: Device


@dataclass(frozen=True, eq=False)
class Measured:
    """Drafts of one drafter on answers that none of those measured has learned from."""

    name: str
    """Of its file."""
    answers: tuple[AnswerDrafts, ...]


@dataclass(frozen=True, eq=False)
class MeasuredFolder:
    """Drafters on the answers of one recording, in the order of the job."""

    folder: Path
    drafters: tuple[Measured, ...]
    num_dropped: int
    """Conversations that are damaged."""
    num_learned: int
    """Conversations that are left out, since one of the drafters has learned from their prompts."""


@dataclass(frozen=True)
class TrainingProgress:
    """Where a training stands."""

    step: int
    num_steps: int
    loss: float
    tokens_per_s: float
    """Answer tokens a second of processor time."""
    watched: float
    """Latest accepted tokens of a window on watched answers."""


@dataclass(frozen=True)
class TrainingState:
    """What a checkpoint holds besides arrays."""

    step: int = 0
    best: float = -1.0
    """Most accepted tokens of a window on watched answers."""
    best_step: int = 0
    """Step whose weights are kept; 0 for those of the beginning."""
    watched: float = 0.0
    num_without_gain: int = 0
    share_of_rate: float = 1.0
    num_tokens: int = 0
    """Answer tokens that were learned, each time counted."""
    spent_s: float = 0.0
    """Processor time of learning."""
    stopped_by: str = ""
    """`passes`, `gain` or `minutes`; empty before the end."""


@dataclass(frozen=True, eq=False)
class TuneOutcome:
    """What a tuning has made."""

    candidate: Path
    """The new drafter's file, in the run's folder."""
    before: Measured
    """The drafter to begin with, on answers that were held out."""
    after: Measured
    """The new one, on the same."""
    num_learned: int
    """Tokens of the answers that were learned."""
    num_prompts: int
    """Their prompts."""
    num_dropped: int
    """Conversations that are damaged."""
    num_steps: int
    """Of all passes."""
    state: TrainingState
    """Where learning ended."""
    num_own_tokens: int
    """Tokens that can be drafted."""
    is_retrimmed: bool
    """Whether they were chosen anew."""
