"""On a GPU: what a cut changes, and how far a GPU is from the processor. The figures are printed."""

from contextlib import ExitStack, closing
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from stages.certification.isolated import cut_stage
from stages.layers import LayerRange
from stages.runtime.devices import layer_devices
from stages.runtime.stage_runtime import RuntimeOptions, Span, StageRuntime

GPUS = layer_devices()
pytestmark = [
    pytest.mark.model,
    pytest.mark.skipif(not GPUS, reason="llama.cpp finds no GPU here, or was built without one"),
]
CTX_SIZE = 256
PROMPT = [int(token) for token in np.random.default_rng(4).integers(100, 40000, 48)]
CUTS = (10, 20)
NUM_TOKENS = 96
Logits = NDArray[np.float32]


def options(gpu_layers: tuple[tuple[str, int], ...] | None) -> RuntimeOptions:
    return RuntimeOptions(ctx_size=CTX_SIZE, gpu_layers=gpu_layers)


def follow(stages: list[StageRuntime], tokens: list[int] | None = None) -> tuple[list[int], Logits]:
    """Greedy tokens after the prompt, or those given, and the logits that each was chosen by."""
    rows: list[Logits] = []
    chosen: list[int] = []
    position, fed = 0, PROMPT
    for step in range(NUM_TOKENS):
        hidden = None
        for stage in stages:
            outputs = 1 if stage.info.is_tail else 0
            (hidden,) = stage.decode([Span(0, position, fed, hidden, outputs)])
        assert hidden is not None
        rows.append(hidden[-1])
        chosen.append(int(hidden[-1].argmax()))
        position += len(fed)
        fed = [chosen[-1] if tokens is None else tokens[step]]
    return chosen, np.array(rows)


def divergence(ours: Logits, theirs: Logits) -> float:
    """Mean KL divergence of the second from the first, nats a token."""

    def log_softmax(rows: Logits) -> NDArray[np.float64]:
        shifted = rows.astype(np.float64) - rows.max(axis=1, keepdims=True)
        return np.asarray(shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True)))

    p, q = log_softmax(ours), log_softmax(theirs)
    return float((np.exp(p) * (p - q)).sum(axis=1).mean())


@pytest.fixture(scope="module")
def whole_on_gpu(smollm2_path: Path) -> tuple[list[int], Logits]:
    with closing(StageRuntime(smollm2_path, options(None))) as runtime:
        return follow([runtime])


def test_a_cut_on_gpus_changes_no_more_than_rounding(
    smollm2_path: Path, tmp_path: Path, whole_on_gpu: tuple[list[int], Logits]
) -> None:
    tokens, logits = whole_on_gpu
    with ExitStack() as stack:
        stages = []
        for index, (start, stop) in enumerate(zip((0, *CUTS), (*CUTS, 30), strict=True)):
            path = tmp_path / f"{index}.gguf"
            cut_stage(smollm2_path, LayerRange(start, stop), path)
            stages.append(stack.enter_context(closing(StageRuntime(path, options(None)))))
        chosen, ours = follow(stages, tokens)
    agreed = sum(mine == theirs for mine, theirs in zip(chosen, tokens, strict=True))
    nats = divergence(logits, ours)
    is_equal = np.array_equal(ours, logits)
    print(
        f"{GPUS[0].description}: cut at {CUTS}: {agreed}/{NUM_TOKENS} tokens, KL {nats:.6f}, bits {is_equal}"
    )
    assert agreed >= 0.95 * NUM_TOKENS
    assert nats < 0.005


def test_a_gpu_says_what_the_processor_says(
    smollm2_path: Path, whole_on_gpu: tuple[list[int], Logits]
) -> None:
    tokens, logits = whole_on_gpu
    with closing(StageRuntime(smollm2_path, options(()))) as runtime:
        chosen, ours = follow([runtime], tokens)
    agreed = sum(mine == theirs for mine, theirs in zip(chosen, tokens, strict=True))
    nats = divergence(ours, logits)
    print(f"{GPUS[0].description} and the processor: {agreed}/{NUM_TOKENS} tokens, KL {nats:.6f}")
    assert agreed >= 0.9 * NUM_TOKENS
    assert nats < 0.02


@pytest.mark.parametrize("count", [1, 15, 29])
def test_some_layers_on_a_gpu_and_some_on_the_processor_say_the_same(
    count: int, smollm2_path: Path, whole_on_gpu: tuple[list[int], Logits]
) -> None:
    tokens, logits = whole_on_gpu
    with closing(StageRuntime(smollm2_path, options(((GPUS[0].name, count),)))) as runtime:
        chosen, ours = follow([runtime], tokens)
    agreed = sum(mine == theirs for mine, theirs in zip(chosen, tokens, strict=True))
    assert agreed >= 0.9 * NUM_TOKENS
    assert divergence(logits, ours) < 0.02
