"""The core names no feature: each is a plug, named in one composition module; the core serves without it."""

import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from mesh.coordinator import composition
from mesh.coordinator.disk_plug import DiskPlug
from mesh.coordinator.feature_needs import FeatureNeeds
from mesh.coordinator.feature_plug import FeaturePlug
from mesh.coordinator.options import CoordinatorOptions
from mesh.coordinator.plugs import Plug
from mesh.engine import GenerationRequest
from stages.sampling.sampler import Sampler, SamplingParams
from stages.serving.feature_outlet import FeatureOutlet
from stages.serving.plugs import SlotListener, StagePlug
from stages.serving.slot_replication import SlotReplication
from tests.support.fake_stage import FakeRuntime, fake_ring, plain_answer
from tests.support.ring_harness import collect, running_coordinator, running_services

ROOT = Path(__file__).parents[2]
CORE = (
    *("mesh/coordinator/coordinator.py", "mesh/coordinator/generation.py", "mesh/coordinator/ring.py"),
    *("mesh/coordinator/session.py", "stages/sampling/verifier.py"),
    *("stages/serving/scheduler.py", "stages/serving/slots.py", "stages/serving/stage_engine.py"),
    "stages/serving/worker.py",
)
FEATURES = re.compile(r"feature|disk|replica|checkpoint|eagle|mtp", re.IGNORECASE)
PROMPT = tuple(range(3, 23))
NUM_TOKENS = 30
WANTED = plain_answer(PROMPT, NUM_TOKENS, Sampler(SamplingParams()).sample)


@pytest.mark.parametrize("path", CORE)
def test_the_core_names_no_feature(path: str) -> None:
    lines = enumerate((ROOT / path).read_text().splitlines(), 1)
    assert [(number, line) for number, line in lines if FEATURES.search(line)] == []


async def answered() -> list[int]:
    """An answer of a ring whose coordinator is asked for every feature."""
    async with (
        running_services(fake_ring()) as stages,
        running_coordinator(
            stages,
            context_length=128,
            num_slots=2,
            max_rows=FakeRuntime.max_rows,
            n_vocab=64,
            feature_needs=FeatureNeeds((0,), 3, 1),
        ) as coordinator,
    ):
        tokens, _ = await collect(coordinator, GenerationRequest(PROMPT, NUM_TOKENS))
        assert coordinator.status().ready
        return tokens


@pytest.mark.parametrize("plug", [DiskPlug, FeaturePlug])
async def test_a_coordinator_serves_without_a_plug(plug: type[Plug], monkeypatch: pytest.MonkeyPatch) -> None:
    def others(options: CoordinatorOptions, clock_ms: Callable[[], float]) -> Iterator[Plug]:
        return (each for each in composition.plugs_of(options, clock_ms) if not isinstance(each, plug))

    monkeypatch.setattr("mesh.coordinator.coordinator.plugs_of", others)
    assert await answered() == WANTED


@pytest.mark.parametrize(("plug", "seam"), [(FeatureOutlet, StagePlug), (SlotReplication, SlotListener)])
async def test_a_stage_serves_without_a_plug(
    plug: type[object], seam: type[object], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, does_nothing in vars(seam).items():
        if not name.startswith("_"):
            monkeypatch.setattr(plug, name, does_nothing)
    assert await answered() == WANTED
