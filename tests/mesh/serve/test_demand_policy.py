"""Which model is loaded, unloaded or refused next: a world of models, requests and memory, step by step."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from mesh.serve.on_demand.policy import (
    AskRoom,
    DemandRules,
    Load,
    ModelDemand,
    Refuse,
    Rest,
    Step,
    Unload,
    next_step,
)

MEMORY = 10
# One that needs all of it beside the pinned one, one that never fits, and some in between.
SIZES = {"pinned": 2, "a": 3, "b": 4, "c": 5, "d": 8, "huge": 9}
NAMES = tuple(name for name in SIZES if name != "pinned")
RULES = DemandRules(min_stay_s=60.0, idle_unload_s=600.0)
MOST_STEPS = 200


@dataclass
class Loaded:
    """A model that is loaded."""

    loaded_at_s: float
    used_at_s: float
    num_held: int = 0


@dataclass
class World:
    """Models on one host, and the requests for them."""

    now_s: float = 0.0
    """The moment."""
    loaded: dict[str, Loaded] = field(default_factory=dict)
    """Models that requests loaded."""
    waiting: dict[str, list[float]] = field(default_factory=dict)
    """Arrivals of requests, by model."""
    known: dict[tuple[str, frozenset[str]], bool] = field(default_factory=dict)
    """What the policy was told of the memory."""
    refused: list[str] = field(default_factory=list)
    """Models that were refused."""
    loads: list[tuple[float, str]] = field(default_factory=list)
    """When which model was loaded."""

    @property
    def taken(self) -> int:
        return sum(SIZES[name] for name in ("pinned", *self.loaded))

    def free_without(self, gone: frozenset[str]) -> int:
        return MEMORY - self.taken + sum(SIZES[name] for name in gone & self.loaded.keys())

    def demands(self) -> list[ModelDemand]:
        held = [
            ModelDemand(
                name,
                "loaded",
                num_held=model.num_held,
                loaded_at_s=model.loaded_at_s,
                used_at_s=model.used_at_s,
            )
            for name, model in self.loaded.items()
        ]
        waited = [
            ModelDemand(name, "unloaded", waiting_since_s=min(arrivals))
            for name, arrivals in self.waiting.items()
            if arrivals
        ]
        return [ModelDemand("pinned", "loaded", is_evictable=False), *held, *waited]

    def step(self) -> Step:
        return next_step(self.demands(), self.now_s, RULES, lambda name, gone: self.known.get((name, gone)))

    def act(self) -> Rest:
        """Take steps until there is none."""
        for _ in range(MOST_STEPS):
            step = self.step()
            if isinstance(step, Rest):
                return step
            self.take(step)
        pytest.fail("it never rests")

    def take(self, step: Step) -> None:
        match step:
            case AskRoom(name, gone):
                assert (name, gone) not in self.known
                self.known[name, gone] = SIZES[name] <= self.free_without(gone)
            case Load(name):
                self._load(name)
            case Unload(names, wanted_by):
                self._unload(names, wanted_by)
            case Refuse(name):
                # Whatever could go is gone: only what is pinned is in its way.
                assert SIZES[name] > MEMORY - SIZES["pinned"]
                assert self.waiting.pop(name)
                self.refused.append(name)

    def _load(self, name: str) -> None:
        arrivals = self.waiting.pop(name)
        assert arrivals
        assert name not in self.loaded
        self.loads.append((self.now_s, name))
        # Those that waited are answered first: none can be left behind.
        self.loaded[name] = Loaded(self.now_s, self.now_s, len(arrivals))
        self.known.clear()

    def _unload(self, names: tuple[str, ...], wanted_by: str | None) -> None:
        assert names
        for name in names:
            model = self.loaded[name]
            assert model.num_held == 0
            assert self.now_s >= model.loaded_at_s + RULES.min_stay_s
            if wanted_by is None:
                assert RULES.idle_unload_s is not None
                assert self.now_s >= model.used_at_s + RULES.idle_unload_s
        if wanted_by is not None:
            assert self.waiting[wanted_by]
            # It is the turn of whoever waits longest, and nobody goes in vain.
            assert min(self.waiting[wanted_by]) == min(
                each for some in self.waiting.values() for each in some
            )
            needed = SIZES[wanted_by]
            assert needed <= self.free_without(frozenset(names))
            for name in names:
                assert needed > self.free_without(frozenset(names) - {name})
        for name in names:
            del self.loaded[name]
        self.known.clear()


class DemandMachine(RuleBasedStateMachine):
    """Requests come, go, are answered and give up, at any time."""

    def __init__(self) -> None:
        super().__init__()
        self.world = World()
        self.rest = Rest(None)

    @rule(name=st.sampled_from(NAMES))
    def ask(self, name: str) -> None:
        world = self.world
        if name in world.loaded:
            world.loaded[name].num_held += 1
        else:
            # No two at the same moment.
            world.now_s += 1e-3
            world.waiting.setdefault(name, []).append(world.now_s)
        self.rest = world.act()

    @precondition(lambda self: any(model.num_held for model in self.world.loaded.values()))
    @rule(data=st.data())
    def answer(self, data: st.DataObject) -> None:
        busy = sorted(name for name, model in self.world.loaded.items() if model.num_held)
        model = self.world.loaded[data.draw(st.sampled_from(busy))]
        model.num_held -= 1
        model.used_at_s = self.world.now_s
        self.rest = self.world.act()

    @precondition(lambda self: any(self.world.waiting.values()))
    @rule(data=st.data())
    def give_up(self, data: st.DataObject) -> None:
        names = sorted(name for name, arrivals in self.world.waiting.items() if arrivals)
        self.world.waiting[data.draw(st.sampled_from(names))].pop()
        self.rest = self.world.act()

    @rule(seconds=st.floats(0.0, 700.0))
    def wait(self, seconds: float) -> None:
        self.world.now_s += seconds
        self.rest = self.world.act()

    @precondition(lambda self: self.rest.until_s is not None)
    @rule()
    def wake(self) -> None:
        """At the moment that it named there is something to do, and not before."""
        until_s, world = self.rest.until_s, self.world
        assert until_s is not None
        if until_s <= world.now_s:
            return
        between_s = (world.now_s + until_s) / 2
        # There is none between two neighbouring floats.
        if between_s < until_s:
            assert next_step(world.demands(), between_s, RULES, self._fits) == self.rest
        world.now_s = until_s
        self.rest = world.act()

    def _fits(self, name: str, gone: frozenset[str]) -> bool:
        return SIZES[name] <= self.world.free_without(gone)

    @invariant()
    def memory_is_enough(self) -> None:
        assert self.world.taken <= MEMORY

    @invariant()
    def nobody_waits_for_room_that_there_is(self) -> None:
        world = self.world
        waited = sorted((min(arrivals), name) for name, arrivals in world.waiting.items() if arrivals)
        if not waited:
            return
        free = frozenset(
            name
            for name, model in world.loaded.items()
            if not model.num_held and world.now_s >= model.loaded_at_s + RULES.min_stay_s
        )
        assert not self._fits(waited[0][1], free)

    @invariant()
    def loads_do_not_thrash(self) -> None:
        """The same model is not loaded again within the time that it stays."""
        last: dict[str, float] = {}
        for at_s, name in self.world.loads:
            assert at_s - last.get(name, -RULES.min_stay_s) >= RULES.min_stay_s
            last[name] = at_s

    def teardown(self) -> None:
        """Once requests end, everybody gets a turn."""
        world = self.world
        for _ in range(2 * len(NAMES)):
            for model in world.loaded.values():
                model.num_held, model.used_at_s = 0, world.now_s
            world.now_s += RULES.min_stay_s
            world.act()
        assert not any(world.waiting.values())


TestDemand = DemandMachine.TestCase
TestDemand.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)


def fits_in(memory: int, *loaded: str) -> Any:
    def fits(name: str, gone: frozenset[str]) -> bool:
        return SIZES[name] <= memory - sum(SIZES[each] for each in loaded if each not in gone)

    return fits


def loaded(name: str, at_s: float, used_at_s: float, num_held: int = 0) -> ModelDemand:
    return ModelDemand(name, "loaded", num_held=num_held, loaded_at_s=at_s, used_at_s=used_at_s)


def waits(name: str, since_s: float) -> ModelDemand:
    return ModelDemand(name, "unloaded", waiting_since_s=since_s)


def test_the_least_recently_used_goes_and_no_more_than_must() -> None:
    models = [loaded("a", 0, 100), loaded("c", 0, 200), waits("b", 300)]
    assert next_step(models, 300, RULES, fits_in(8, "a", "c")) == Unload(("c",), "b")
    assert next_step(models, 300, RULES, fits_in(9, "a", "c")) == Unload(("a",), "b")
    assert next_step(models, 300, RULES, fits_in(12, "a", "c")) == Load("b")


def test_alternating_requests_switch_once_a_stay() -> None:
    """The other model waits until the stay of this one is over, whoever asks meanwhile."""
    models = [loaded("d", 100, 105), waits("c", 106)]
    assert next_step(models, 106, RULES, fits_in(8, "d")) == Rest(160)
    assert next_step(models, 160, RULES, fits_in(8, "d")) == Unload(("d",), "c")
    # A request in the last moment keeps it.
    assert next_step([loaded("d", 100, 105, 1), waits("c", 106)], 160, RULES, fits_in(8, "d")) == Rest(None)


def test_a_younger_one_takes_free_memory_only_while_requests_block_the_older() -> None:
    younger = waits("a", 201)
    busy = [loaded("d", 0, 200, 1), waits("c", 200), younger]
    assert next_step(busy, 202, RULES, fits_in(11, "d")) == Load("a")
    # The stay of the one in its way ends soon: the younger would begin another.
    staying = [loaded("d", 150, 200), waits("c", 200), younger]
    assert next_step(staying, 202, RULES, fits_in(11, "d")) == Rest(210)


def test_what_never_fits_is_refused_behind_others_too() -> None:
    models = [loaded("d", 0, 200, 1), waits("c", 200), waits("huge", 201)]
    assert next_step(models, 202, RULES, fits_in(8, "d")) == Refuse("huge", frozenset({"d"}))
    # Memory that an operator frees may be enough.
    leaving = [*models, ModelDemand("b", "unloading", is_evictable=False)]
    assert isinstance(next_step(leaving, 202, RULES, fits_in(8, "d")), Rest)


def test_idle_models_go_after_their_time() -> None:
    models = [loaded("a", 0, 100), loaded("b", 0, 150), loaded("c", 0, 10, 1)]
    assert next_step(models, 650, RULES, fits_in(20)) == Rest(700)
    assert next_step(models, 700, RULES, fits_in(20)) == Unload(("a",), None)
    forever = DemandRules(60.0, None)
    assert next_step(models, 1e9, forever, fits_in(20)) == Rest(None)
    # A model stays for its time even if that is longer.
    assert next_step([loaded("a", 0, 0)], 30, DemandRules(60.0, 10.0), fits_in(20)) == Rest(60)


def test_nothing_is_decided_on_memory_that_is_not_known() -> None:
    asked: list[tuple[str, frozenset[str]]] = []

    def unknown(name: str, gone: frozenset[str]) -> None:
        asked.append((name, gone))

    models = [loaded("d", 0, 0), waits("c", 200)]
    assert next_step(models, 200, RULES, unknown) == AskRoom("c", frozenset())
    assert asked == [("c", frozenset())]
