"""Policy of models on demand: which model is loaded, unloaded or refused next.

Pure: the moment is handed in, and so is what is known of the hosts' memory.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Literal, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    # Whether a model fits once some others are unloaded; None while that is not known.
    Fits: TypeAlias = Callable[[str, frozenset[str]], bool | None]

_NOTHING: Final[frozenset[str]] = frozenset()

Phase: TypeAlias = Literal["unloaded", "loading", "loaded", "unloading"]


@dataclass(frozen=True)
class DemandRules:
    """Times that loaded models are kept."""

    min_stay_s: float = 60.0
    """A loaded model stays at least this long."""
    idle_unload_s: float | None = None
    """A model that no request used for this long is unloaded; None for never."""


@dataclass(frozen=True)
class ModelDemand:
    """One model, and the requests for it, at one moment."""

    name: str
    """Its name for clients."""
    phase: Phase
    """Whether it answers."""
    is_evictable: bool = True
    """Whether it may be unloaded without an operator."""
    num_held: int = 0
    """Requests that it answers, each from its arrival to its end."""
    waiting_since_s: float | None = None
    """Arrival of the request that has waited longest for it to be loaded; None if none waits."""
    loaded_at_s: float = 0.0
    """When it was loaded."""
    used_at_s: float = 0.0
    """When the latest request ended, or the model was loaded."""

    @property
    def is_idle(self) -> bool:
        """Whether it could be unloaded without a request noticing."""
        return self.phase == "loaded" and self.is_evictable and not self.num_held


@dataclass(frozen=True)
class AskRoom:
    """Find out whether a model fits once others are unloaded, then ask again."""

    name: str
    """The model."""
    gone: frozenset[str]
    """The others."""


@dataclass(frozen=True)
class Load:
    """Load a model, beside all that are loaded."""

    name: str
    """The model."""


@dataclass(frozen=True)
class Unload:
    """Unload models that idle."""

    names: tuple[str, ...]
    """The models."""
    wanted_by: str | None
    """The model that needs their memory; None if they were idle for too long."""


@dataclass(frozen=True)
class Refuse:
    """Refuse the requests that wait for a model: it does not fit beside those that stay."""

    name: str
    """The model."""
    gone: frozenset[str]
    """Models beside whose memory it would not fit either."""


@dataclass(frozen=True)
class Rest:
    """Nothing to do until something changes."""

    until_s: float | None
    """When to ask again in any case; None for never."""


Step: TypeAlias = AskRoom | Load | Unload | Refuse | Rest


class _UnknownError(Exception):
    def __init__(self, question: AskRoom) -> None:
        super().__init__()
        self.question = question


def next_step(models: Sequence[ModelDemand], now_s: float, rules: DemandRules, fits: Fits) -> Step:
    """The next step. One step is taken at a time, and its outcome is part of the next question.

    The model that has been waited for longest is next. It is loaded beside the others if it fits, otherwise
    instead of models that idle, the least recently used first and as few as possible. A model with a request
    is never unloaded, nor one that was loaded less than `min_stay_s` ago. Others may go before the longest
    waiting one only into free memory, and only while it waits for requests to end, which may take any time.

    Args:
        models: All models that are loaded or waited for.
        now_s: Monotonic, seconds.
        rules: Times that loaded models are kept.
        fits: Whether a model fits once some others are unloaded, None while that is not known; the more are
            unloaded, the more fits.
    """

    def known(name: str, gone: Iterable[str]) -> bool:
        asked = frozenset(gone)
        answer = fits(name, asked)
        if answer is None:
            raise _UnknownError(AskRoom(name, asked))
        return answer

    try:
        return _loading_step(models, now_s, rules, known) or _idle_step(models, now_s, rules)
    except _UnknownError as unknown:
        return unknown.question


def _loading_step(
    models: Sequence[ModelDemand],
    now_s: float,
    rules: DemandRules,
    fits: Callable[[str, Iterable[str]], bool],
) -> Step | None:
    """A step towards loading a model that is waited for; None if none is possible now."""
    evictable = frozenset(model.name for model in models if model.phase == "loaded" and model.is_evictable)
    idle = _idle(models)
    free = [model.name for model in idle if _stays_until_s(model, rules) <= now_s]
    # Memory that will be free, or may be taken, without anything being decided.
    is_in_motion = any(
        model.phase == "unloading" or (model.phase == "loading" and model.is_evictable) for model in models
    )
    may_overtake = True
    for place, name in enumerate(_wanted(models)):
        if (not place or may_overtake) and fits(name, _NOTHING):
            return Load(name)
        if not fits(name, evictable):
            if not is_in_motion:
                return Refuse(name, evictable)
        elif not place:
            if fits(name, free):
                return Unload(_fewest(name, free, fits), name)
            # It gets its turn when their stays are over, if only those are in its way.
            may_overtake = not fits(name, [model.name for model in idle])
    return None


def _idle_step(models: Sequence[ModelDemand], now_s: float, rules: DemandRules) -> Unload | Rest:
    """Unload a model that was idle for too long, or rest."""
    idle = _idle(models)
    until_s: list[float] = []
    if _wanted(models):
        until_s += [end_s for model in idle if (end_s := _stays_until_s(model, rules)) > now_s]
    if rules.idle_unload_s is not None:
        for model in idle:
            due_s = max(model.used_at_s + rules.idle_unload_s, _stays_until_s(model, rules))
            if due_s <= now_s:
                return Unload((model.name,), None)
            until_s.append(due_s)
    return Rest(min(until_s, default=None))


def _wanted(models: Iterable[ModelDemand]) -> list[str]:
    """Models to be loaded, the one first that has been waited for longest."""
    waited = [
        (model.waiting_since_s, model.name)
        for model in models
        if model.phase == "unloaded" and model.waiting_since_s is not None
    ]
    return [name for _, name in sorted(waited)]


def _idle(models: Iterable[ModelDemand]) -> list[ModelDemand]:
    """Models without requests, the least recently used first."""
    return sorted((model for model in models if model.is_idle), key=lambda each: (each.used_at_s, each.name))


def _stays_until_s(model: ModelDemand, rules: DemandRules) -> float:
    return model.loaded_at_s + rules.min_stay_s


def _fewest(name: str, free: Sequence[str], fits: Callable[[str, Iterable[str]], bool]) -> tuple[str, ...]:
    """Models to be unloaded: those that were used last stay if they need not go.

    Args:
        name: The model to be loaded.
        free: Models that may be unloaded, the least recently used first; it fits once all are.
        fits: Whether it fits once some are.
    """
    count = 1
    while not fits(name, free[:count]):
        count += 1
    going = list(free[:count])
    for each in reversed(free[: count - 1]):
        others = [other for other in going if other != each]
        if fits(name, others):
            going = others
    return tuple(going)
