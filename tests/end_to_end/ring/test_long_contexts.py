"""Contexts to their very end, through a ring of two stages."""

from pathlib import Path

import numpy as np
import pytest

from mesh.engine import GenerationRequest
from stages.runtime.stage_runtime import RuntimeOptions
from stages.slicing.model_facts import read_model_facts
from tests.support.ring_harness import collect, running_coordinator, running_stages
from tests.support.tiny_models import TinyModel

# Left of the context for the answer.
ROOM = 24


@pytest.fixture(scope="module")
def tiny_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return TinyModel("gemma3").write(tmp_path_factory.mktemp("long") / "tiny.gguf")


@pytest.mark.parametrize(
    ("model", "cut", "kv_type"),
    [
        ("tiny_path", 3, "f16"),
        pytest.param("smollm2_path", 15, "f16", marks=[pytest.mark.sweep, pytest.mark.timeout(1200)]),
        pytest.param("smollm2_path", 15, "q8_0", marks=[pytest.mark.sweep, pytest.mark.timeout(1200)]),
        pytest.param("gemma3_path", 9, "f16", marks=[pytest.mark.sweep, pytest.mark.timeout(3 * 3600)]),
    ],
)
async def test_the_last_position_that_a_model_was_trained_for(
    model: str, cut: int, kv_type: str, request: pytest.FixtureRequest, stage_cache_dir: Path
) -> None:
    """A prompt that all but fills the context, and an answer that takes every position left."""
    path: Path = request.getfixturevalue(model)
    facts = read_model_facts(path)
    ctx_size = facts.n_ctx_train
    random = np.random.default_rng(1)
    prompt = tuple(int(token) for token in random.integers(3, facts.n_vocab - 1, ctx_size - ROOM))
    options = RuntimeOptions(num_slots=1, ctx_size=ctx_size, kv_type=kv_type)
    async with (
        running_stages(path, (cut,), options, stage_cache_dir) as stages,
        running_coordinator(
            stages, context_length=ctx_size, num_slots=1, max_rows=128, n_vocab=facts.n_vocab
        ) as coordinator,
    ):
        tokens, last = await collect(coordinator, GenerationRequest(prompt, max_tokens=ctx_size))
    assert last.finish == "length"
    assert len(tokens) == ROOM
