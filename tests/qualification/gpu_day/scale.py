"""Scales of the protocol, and its phases in their order."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Literal

if TYPE_CHECKING:
    from collections.abc import Mapping

    from tests.qualification.random_model import WeightType

Kind = Literal["device", "whole", "ring", "parity", "speculation", "experts", "stops", "exactness"]


@dataclass(frozen=True)
class Scale:
    """Sizes of one run of the protocol."""

    name: str
    """Name of the scale."""
    shapes: Mapping[str, str]
    """Shape of each model in `tests.qualification.random_model.SHAPES`, by its name in the report."""
    weight_type: WeightType
    """Format of all matrices."""
    num_sessions: tuple[int, ...]
    """Concurrent sessions, ascending."""
    stage_counts: tuple[int, ...]
    """Numbers of stages on the card."""
    num_prompt: int
    """Tokens of a prompt before decoding is timed."""
    num_tokens: int
    """Tokens of an answer."""
    num_prefill: int
    """Tokens of a prompt whose prefill is timed."""
    parity: str
    """Model whose stages and processor are compared with the whole model on the card."""
    speculation: str
    """Model that is timed with drawn acceptance."""
    experts: str
    """Model whose experts are left to the processor."""
    stops: str
    """Model for the ways to end a graph."""
    exactness: str
    """Shape whose rows are computed in different company."""
    stop_rows: tuple[int, ...]
    """Rows of the windows that are timed for that."""
    stop_rounds: int
    """Measurements of each, of which the median is taken."""
    most_settings: int | None = None
    """Most settings of the backend to try for that; None for all."""
    goal: str | None = None
    """Model and number of stages at one session for which there is a goal; None for none."""


DAY: Final = Scale(
    name="day",
    shapes={"1B": "1.2b", "8B": "8b", "32B": "32b", "30B-A3B": "30b-a3b"},
    weight_type="Q4_0",
    num_sessions=(1, 8, 32, 64),
    stage_counts=(1, 2, 4),
    num_prompt=128,
    num_tokens=128,
    num_prefill=2048,
    parity="1B",
    speculation="8B",
    experts="30B-A3B",
    stops="8B",
    exactness="small",
    stop_rows=(1, 8, 64),
    stop_rounds=20,
    goal="8B",
)
TINY: Final = Scale(
    name="tiny",
    shapes={"dense": "tiny", "experts": "tiny-moe"},
    weight_type="Q4_0",
    num_sessions=(1, 4),
    stage_counts=(1, 2),
    num_prompt=16,
    num_tokens=12,
    num_prefill=48,
    parity="dense",
    speculation="dense",
    experts="experts",
    stops="dense",
    exactness="tiny",
    stop_rows=(1, 8),
    stop_rounds=3,
    most_settings=1,
)
SCALES: Final = {scale.name: scale for scale in (DAY, TINY)}
"""Scales by name; the tiny one shows that all of it runs."""


@dataclass(frozen=True)
class Phase:
    """A part of the protocol that runs by itself."""

    kind: Kind
    """What it measures."""
    model: str = ""
    """Its model; empty for none."""
    num_stages: int = 0
    """Stages on the card; 0 where that does not matter."""

    @property
    def name(self) -> str:
        """Name for files and the command line, such as `ring-8B-2`."""
        return "-".join([self.kind, *([self.model] if self.model else []), *_number(self.num_stages)])


def _number(value: int) -> list[str]:
    return [str(value)] if value else []


def phases_of(scale: Scale) -> tuple[Phase, ...]:
    """All phases, those of one model after another: its file is needed no longer than that."""
    phases = [Phase("device"), Phase("exactness")]
    for model in scale.shapes:
        phases.append(Phase("whole", model))
        phases += [Phase("ring", model, count) for count in scale.stage_counts]
        of_one_model: dict[Kind, str] = {
            "parity": scale.parity,
            "speculation": scale.speculation,
            "experts": scale.experts,
            "stops": scale.stops,
        }
        phases += [Phase(kind, model) for kind, wanted in of_one_model.items() if wanted == model]
    return tuple(phases)


def even_cuts(n_layers: int, num_stages: int) -> tuple[int, ...]:
    """First layers of stages of nearly as many layers each, 0 left out."""
    return tuple(n_layers * index // num_stages for index in range(1, num_stages))
