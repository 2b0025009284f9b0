"""The core names no feature: each is a plug, named in one composition module; the core serves without it."""

import asyncio
import re
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from mesh.coordinator import composition as of_coordinator
from mesh.coordinator.checkpoint_plan import CheckpointPlug
from mesh.coordinator.disk_prefixes import DiskPlug
from mesh.coordinator.feature_plug import FeaturePlug
from mesh.coordinator.feature_store import FeatureNeeds
from mesh.coordinator.image_plug import ImagePlug
from mesh.coordinator.options import CoordinatorOptions
from mesh.engine import GenerationRequest
from mesh.options.model import ModelOptions
from speculative.controller import ControllerOptions
from stages.sampling.sampler import Sampler, SamplingParams
from stages.serving import composition as of_stage
from stages.serving.feature_outlet import FeatureOutlet
from stages.serving.image_input import ImageInput
from stages.serving.kv_disk import KvDisk
from stages.serving.kv_replication import Replication
from tests.mesh.placement.test_planner import model as made_up_model
from tests.support.fake_recurrent import FakeRecurrentRuntime
from tests.support.fake_stage import FakeRuntime, plain_answer
from tests.support.proposers import Oracle
from tests.support.repairable_ring import NUM_STAGES, RepairableRing, serving
from tests.support.ring_harness import collect

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

ROOT = Path(__file__).parents[2]
CORE = (
    *("mesh/coordinator/coordinator.py", "mesh/coordinator/generation.py", "mesh/coordinator/ring.py"),
    *("mesh/coordinator/session.py", "stages/sampling/verifier.py"),
    *("stages/serving/scheduler.py", "stages/serving/server.py", "stages/serving/sessions.py"),
    *("stages/serving/slots.py", "stages/serving/stage_engine.py", "stages/serving/worker.py"),
)
FEATURES = re.compile(r"feature|disk|replica|checkpoint|eagle|mtp|image|picture", re.IGNORECASE)
PROMPT = tuple(range(3, 43))
NUM_TOKENS, NUM_CHECKPOINTS = 60, 3
WANTED = plain_answer(PROMPT, NUM_TOKENS, Sampler(SamplingParams()).sample)
OF_COORDINATOR, OF_STAGE = "mesh.coordinator.composition.plugs_of", "stages.serving.server.plugs_of"

PlugsOf = Callable[..., Iterable[Any]]


class Reader(Oracle):
    """Proposes the answer with errors, and reads hidden states."""

    def take_features(self, start: int, rows: "NDArray[np.float32]") -> None:
        pass


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    # Blocks on disk that a short prompt fills.
    monkeypatch.setattr(of_coordinator, "DiskPlug", partial(DiskPlug, block_positions=8))


@pytest.mark.parametrize("path", CORE)
def test_the_core_names_no_feature(path: str) -> None:
    lines = enumerate((ROOT / path).read_text().splitlines(), 1)
    assert [(number, line) for number, line in lines if FEATURES.search(line)] == []


async def answers(
    disk_root: Path, *, is_recurrent: bool = False, proposes: bool = True
) -> tuple[list[int], list[int]]:
    """An answer, and the same again while a stage is lost, of a ring that is asked for every feature."""
    options = CoordinatorOptions(
        128,
        4,
        FakeRuntime.max_rows,
        64,
        can_trim=not is_recurrent,
        controller=ControllerOptions(fixed_width=2, fixed_depth=2),
    )
    wanted = ModelOptions(checkpoints=NUM_CHECKPOINTS, mmproj="mmproj.gguf")
    model = replace(made_up_model(), can_trim=not is_recurrent)
    plugs = of_coordinator.plugs_of(wanted, model, FeatureNeeds((0,), NUM_STAGES, 1))

    def recurrent(index: int) -> FakeRuntime:
        return FakeRecurrentRuntime(index, NUM_STAGES, num_checkpoints=NUM_CHECKPOINTS, is_poisoned=True)

    ring = RepairableRing(make_runtime=recurrent if is_recurrent else None, news_s=0.001, disk_root=disk_root)
    request = GenerationRequest(PROMPT, NUM_TOKENS)

    def make_proposers(_request: GenerationRequest) -> list[Oracle]:
        return [Reader([*PROMPT, *WANTED], [False, False, False, True])] if proposes else []

    async with (
        serving(ring, options, plugs=plugs, make_proposers=make_proposers) as coordinator,
        asyncio.timeout(60),
    ):
        undisturbed, _ = await collect(coordinator, request)
        parts = coordinator.generate(request)
        tokens = list((await anext(parts)).tokens)
        await ring.kill(1)
        async for part in parts:
            tokens += part.tokens
        assert ring.num_repairs == 1
        assert coordinator.status().ready
    return undisturbed, tokens


def leave_out(place: str, plugs_of: PlugsOf, plug: type[object], monkeypatch: pytest.MonkeyPatch) -> None:
    def others(*arguments: Any) -> list[Any]:
        found = list(plugs_of(*arguments))
        left = [each for each in found if not isinstance(each, plug)]
        assert len(left) < len(found), "it is not there anyway"
        return left

    monkeypatch.setattr(place, others)


@pytest.mark.parametrize(
    ("place", "plugs_of", "plug"),
    [
        (OF_COORDINATOR, of_coordinator.plugs_of, DiskPlug),
        (OF_COORDINATOR, of_coordinator.plugs_of, FeaturePlug),
        (OF_COORDINATOR, of_coordinator.plugs_of, ImagePlug),
        (OF_COORDINATOR, of_coordinator.plugs_of, object),
        (OF_STAGE, of_stage.plugs_of, FeatureOutlet),
        (OF_STAGE, of_stage.plugs_of, Replication),
        (OF_STAGE, of_stage.plugs_of, KvDisk),
        (OF_STAGE, of_stage.plugs_of, ImageInput),
        (OF_STAGE, of_stage.plugs_of, object),
    ],
)
async def test_texts_are_the_same_without_a_plug(
    place: str, plugs_of: PlugsOf, plug: type[object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    leave_out(place, plugs_of, plug, monkeypatch)
    assert await answers(tmp_path) == (WANTED, WANTED)


@pytest.mark.parametrize("plug", [None, FeatureOutlet, Replication, KvDisk, object])
async def test_stages_with_recurrent_state_need_no_plug_either(
    plug: type[object] | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if plug is not None:
        leave_out(OF_STAGE, of_stage.plugs_of, plug, monkeypatch)
    assert await answers(tmp_path, is_recurrent=True) == (WANTED, WANTED)


async def test_a_session_that_proposes_nothing_needs_no_way_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    leave_out(OF_COORDINATOR, of_coordinator.plugs_of, CheckpointPlug, monkeypatch)
    assert await answers(tmp_path, is_recurrent=True, proposes=False) == (WANTED, WANTED)
