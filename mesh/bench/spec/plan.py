"""What is measured, in which order. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from mesh.bench.spec.setting import REPLAY

if TYPE_CHECKING:
    from collections.abc import Collection

    from mesh.bench.spec.setting import Setting
    from mesh.bench.spec.workload import Workload


@dataclass(frozen=True)
class Trial:
    """Some questions at one delay.

    Each question is one turn: it is answered under `off` and under each setting, one right after the other.

    Attributes:
        delay_ms: One way.
        workload: What is asked.
        settings: Besides `off`.
        sampling: Fields of the request body that say how to draw.
        with_peer: Whether llama.cpp RPC takes part in each turn.
    """

    delay_ms: float
    workload: Workload
    settings: tuple[Setting, ...]
    sampling: dict[str, Any] = field(default_factory=lambda: {"temperature": 0})
    with_peer: bool = False

    @property
    def temperature(self) -> float:
        """Of sampling."""
        return float(self.sampling["temperature"])


@dataclass(frozen=True)
class CrowdTrial:
    """The questions of some workloads asked together.

    Attributes:
        delay_ms: One way.
        workload: Its questions are taken in turn until there are enough.
        setting: Against `off`.
        num_at_once: How many questions, all at once.
        num_rounds: How often `off` and the setting take turns.
    """

    delay_ms: float
    workload: Workload
    setting: Setting
    num_at_once: int
    num_rounds: int


@dataclass(frozen=True)
class Phase:
    """A mesh, started once, and what it is asked.

    Attributes:
        server: Name of this way to start it.
        options: Of `mesh serve`.
        trials: In order.
        crowds: After the trials.
    """

    server: str
    options: tuple[str, ...]
    trials: tuple[Trial, ...]
    crowds: tuple[CrowdTrial, ...] = ()

    @property
    def replays(self) -> bool:
        """Whether the server needs the file of recorded answers."""
        return any(REPLAY in trial.settings for trial in self.trials)


def narrowed(
    phases: tuple[Phase, ...], *, delays_ms: Collection[float], workloads: Collection[str]
) -> tuple[Phase, ...]:
    """The part of a plan at these delays, on these workloads; all of them where none is named.

    Requests at once keep their workload, which is a mixture.
    """

    def is_wanted(delay_ms: float, workload: str | None) -> bool:
        return (not delays_ms or delay_ms in delays_ms) and (
            not workloads or workload is None or workload in workloads
        )

    kept = (
        replace(
            phase,
            trials=tuple(trial for trial in phase.trials if is_wanted(trial.delay_ms, trial.workload.name)),
            crowds=tuple(crowd for crowd in phase.crowds if is_wanted(crowd.delay_ms, None)),
        )
        for phase in phases
    )
    return tuple(phase for phase in kept if phase.trials or phase.crowds)


def in_turn(settings: tuple[Setting, ...], turn: int) -> tuple[Setting, ...]:
    """The settings in their order on even turns and backwards on odd ones, `replay` at the end of either.

    So no setting always runs on what the one before it left behind, such as a warm processor; only `replay`
    needs what `off` answered.
    """
    others = tuple(setting for setting in settings if setting != REPLAY)
    return (others if turn % 2 == 0 else others[::-1]) + (REPLAY,) * (REPLAY in settings)
