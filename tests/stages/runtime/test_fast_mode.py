"""Fast mode as users run it: with all of llama.cpp's kernels, also those that exact mode bars."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from mesh.requantize import requantise
from mesh.text.tokenizer import Tokenizer
from stages.layers import ranges_from_cuts
from stages.runtime.numerics import numerics_for, prepare_process
from stages.slicing.model_facts import read_model_facts
from stages.weights.virtual_stages import StageCache
from tests.support.tiny_models import TinyModel

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.model

NUM_TOKENS = 12
TEXT = "The colours of the flag are red, white and blue. The red stands for courage, the white for peace. "
SHOW = "import os; print('GGML_CPU_TILED_MM' in os.environ)"
# What exact mode sets.
EXACT = {"GGML_CPU_TILED_MM": "0"}


def decode(
    model: Path, cuts: tuple[int, ...], prompt: list[int], cache: Path, **settings: str
) -> dict[str, Any]:
    """What `tests.support.fast_decode` tells of a model in stages, with more variables set."""
    ranges = ranges_from_cuts(cuts, read_model_facts(model).n_layers)
    stages = [str(StageCache(cache).cut(model, layers).path) for layers in ranges]
    job = {
        "whole": str(model),
        "stages": stages,
        "prompt": prompt,
        "chunk": 32,
        "num_tokens": NUM_TOKENS,
    }
    done = subprocess.run(
        [sys.executable, "-m", "tests.support.fast_decode"],
        input=json.dumps(job),
        env={**os.environ, **settings},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def test_no_test_s_child_is_told_how_to_compute() -> None:
    prepare_process(numerics_for(exact=True, num_threads=1))
    told = subprocess.run([sys.executable, "-c", SHOW], capture_output=True, text=True, check=True)
    assert told.stdout == "False\n"


def check(model: Path, cuts: tuple[int, ...], prompt: list[int], cache: Path) -> float:
    """Stages give llama.cpp's own logits, to the bit: their batches hold what those of the whole model hold.

    Returns:
        How far the first logits are from those without tiles, on average, in standard deviations.
    """
    tiled, plain = (decode(model, cuts, prompt, cache, **settings) for settings in ({}, EXACT))
    for found in (tiled, plain):
        assert len(found["tokens"]) == NUM_TOKENS
        assert set(found["differences"]) == {0.0}
    apart = np.subtract(tiled["logits"], plain["logits"])
    return float(np.abs(apart).mean() / np.std(plain["logits"]))


@pytest.mark.parametrize("quant_type", ["Q3_K_S", "Q6_K"])
def test_a_cut_model_is_computed_as_a_whole_one(quant_type: str, tmp_path: Path) -> None:
    # Rows of whole blocks of 256 weights, else there are no such types.
    plain = TinyModel("llama", n_embd=256, n_ff=512, head_size=64).write(tmp_path / "plain.gguf")
    model = tmp_path / "model.gguf"
    requantise(plain, quant_type, model)
    apart = check(model, (2, 4), [(token * 37) % 300 + 5 for token in range(80)], tmp_path)
    assert apart < 0.1
    # Weights of three bits have no kernels but the plain ones and tiles: those were in use, then.
    if quant_type == "Q3_K_S" and platform.machine() == "x86_64":
        assert apart > 0.0


def test_a_real_model_is_computed_cut_as_whole(gemma3_path: Path, stage_cache_dir: Path) -> None:
    prompt = Tokenizer(gemma3_path).encode(TEXT * 2, add_special=True, parse_special=False)
    assert check(gemma3_path, (9,), prompt, stage_cache_dir) < 0.1
