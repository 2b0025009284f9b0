"""On a GPU: what a cut changes, and how far a GPU is from the processor. The figures are printed."""

from contextlib import ExitStack, closing
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from stages.certification.certify import cut_stage
from stages.layers import LayerRange
from stages.runtime.devices import Device
from stages.runtime.stage_runtime import RuntimeOptions, StageRuntime
from tests.qualification.device_parity import PROCESSOR, STAGES, Bounds, Parity, compare, follow
from tests.support.short_models import write_short

pytestmark = [pytest.mark.gpu, pytest.mark.model]
CTX_SIZE = 256
PROMPT = [int(token) for token in np.random.default_rng(4).integers(100, 40000, 48)]
NUM_LAYERS = 30
Logits = NDArray[np.float32]


@dataclass(frozen=True)
class Computed:
    """A model, and what it says on the GPU."""

    path: Path
    """Its file."""
    num_layers: int
    """Its layers."""
    tokens: list[int]
    """Greedy tokens behind the prompt."""
    logits: Logits
    """Their logits."""


def options(gpu_layers: tuple[tuple[str, int], ...] | None) -> RuntimeOptions:
    return RuntimeOptions(ctx_size=CTX_SIZE, gpu_layers=gpu_layers)


def on_gpu(path: Path, num_layers: int, gpu: Device, num_tokens: int) -> Computed:
    with closing(StageRuntime(path, options(((gpu.name, num_layers),)))) as runtime:
        return Computed(path, num_layers, *follow([runtime], PROMPT, num_tokens))


def require(what: str, found: Parity, bounds: Bounds) -> None:
    print(f"{what}: {found}")
    assert found.is_within(bounds), f"{what}: {found}"


@pytest.fixture(scope="module")
def whole(smollm2_path: Path, gpu: Device, num_tokens: int) -> Computed:
    return on_gpu(smollm2_path, NUM_LAYERS, gpu, 2 * num_tokens)


@pytest.fixture(scope="module")
def divided(
    smollm2_path: Path, gpu: Device, num_tokens: int, tmp_path_factory: pytest.TempPathFactory
) -> Computed:
    """What is computed in several ways: on Mesa's software device, which is slow, nine of the layers."""
    if not gpu.is_software:
        return on_gpu(smollm2_path, NUM_LAYERS, gpu, 2 * num_tokens)
    path = write_short(smollm2_path, 9, tmp_path_factory.mktemp("short") / "short.gguf")
    return on_gpu(path, 9, gpu, num_tokens)


def test_a_gpu_says_what_the_processor_says(gpu: Device, whole: Computed) -> None:
    with closing(StageRuntime(whole.path, options(()))) as runtime:
        _, ours = follow([runtime], PROMPT, len(whole.tokens), whole.tokens)
    require(f"{gpu.description} and the processor", compare(ours, whole.logits), PROCESSOR)


def test_a_cut_on_gpus_changes_no_more_than_rounding(tmp_path: Path, gpu: Device, divided: Computed) -> None:
    third = divided.num_layers // 3
    with ExitStack() as stack:
        stages = []
        for index, (start, stop) in enumerate(pairwise((0, third, 2 * third, divided.num_layers))):
            path = tmp_path / f"{index}.gguf"
            cut_stage(divided.path, LayerRange(start, stop), path)
            # Without numbers llama.cpp puts all of a file's layers there.
            stages.append(stack.enter_context(closing(StageRuntime(path, options(None)))))
        _, ours = follow(stages, PROMPT, len(divided.tokens), divided.tokens)
    require(f"{gpu.description}: three stages", compare(divided.logits, ours), STAGES)


@pytest.mark.parametrize("part", [0.0, 0.5, 1.0])
def test_some_layers_on_a_gpu_and_some_on_the_processor_say_the_same(
    part: float, gpu: Device, divided: Computed
) -> None:
    """From one layer on the GPU to all but one."""
    count = 1 + round(part * (divided.num_layers - 2))
    with closing(StageRuntime(divided.path, options(((gpu.name, count),)))) as runtime:
        _, ours = follow([runtime], PROMPT, len(divided.tokens), divided.tokens)
    require(f"{count} layers on {gpu.description}", compare(divided.logits, ours), PROCESSOR)
