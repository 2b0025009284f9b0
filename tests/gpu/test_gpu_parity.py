"""On a GPU: what a cut changes, and how far a GPU is from the processor. The figures are printed."""

from contextlib import ExitStack, closing
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from mesh.qualification.device_parity import PROCESSOR, STAGES, Bounds, Parity, compare, follow
from stages.certification.isolated import cut_stage
from stages.layers import LayerRange
from stages.runtime.devices import Device
from stages.runtime.stage_runtime import RuntimeOptions, StageRuntime

pytestmark = [pytest.mark.gpu, pytest.mark.model]
CTX_SIZE = 256
PROMPT = [int(token) for token in np.random.default_rng(4).integers(100, 40000, 48)]
CUTS = (10, 20)
Logits = NDArray[np.float32]


def options(gpu_layers: tuple[tuple[str, int], ...] | None) -> RuntimeOptions:
    return RuntimeOptions(ctx_size=CTX_SIZE, gpu_layers=gpu_layers)


def require(what: str, found: Parity, bounds: Bounds) -> None:
    print(f"{what}: {found}")
    assert found.is_within(bounds), f"{what}: {found}"


@pytest.fixture(scope="module")
def whole_on_gpu(smollm2_path: Path, gpu: Device, num_tokens: int) -> tuple[list[int], Logits]:
    with closing(StageRuntime(smollm2_path, options(((gpu.name, 30),)))) as runtime:
        return follow([runtime], PROMPT, num_tokens)


def test_a_cut_on_gpus_changes_no_more_than_rounding(
    smollm2_path: Path, tmp_path: Path, gpu: Device, whole_on_gpu: tuple[list[int], Logits]
) -> None:
    tokens, logits = whole_on_gpu
    with ExitStack() as stack:
        stages = []
        for index, (start, stop) in enumerate(pairwise((0, *CUTS, 30))):
            path = tmp_path / f"{index}.gguf"
            cut_stage(smollm2_path, LayerRange(start, stop), path)
            # Without numbers llama.cpp puts all of a file's layers there.
            stages.append(stack.enter_context(closing(StageRuntime(path, options(None)))))
        _, ours = follow(stages, PROMPT, len(tokens), tokens)
    require(f"{gpu.description}: cut at {CUTS}", compare(logits, ours), STAGES)


def test_a_gpu_says_what_the_processor_says(
    smollm2_path: Path, gpu: Device, whole_on_gpu: tuple[list[int], Logits]
) -> None:
    tokens, logits = whole_on_gpu
    with closing(StageRuntime(smollm2_path, options(()))) as runtime:
        _, ours = follow([runtime], PROMPT, len(tokens), tokens)
    require(f"{gpu.description} and the processor", compare(ours, logits), PROCESSOR)


@pytest.mark.parametrize("count", [1, 15, 29])
def test_some_layers_on_a_gpu_and_some_on_the_processor_say_the_same(
    count: int, smollm2_path: Path, gpu: Device, whole_on_gpu: tuple[list[int], Logits]
) -> None:
    tokens, logits = whole_on_gpu
    with closing(StageRuntime(smollm2_path, options(((gpu.name, count),)))) as runtime:
        _, ours = follow([runtime], PROMPT, len(tokens), tokens)
    require(f"{count} layers on {gpu.description}", compare(logits, ours), PROCESSOR)
