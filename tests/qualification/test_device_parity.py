"""How far two ways to compute the same are apart; the processor stands in for a GPU."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np
import pytest

from spanmesh_proto.errors import ClusterError
from stages.runtime.devices import layer_devices, list_devices
from stages.slicing.source_model import read_source
from tests.qualification.device_parity import (
    PROCESSOR,
    STAGES,
    Parity,
    _all_cuts,
    compare,
    first_device,
    measure,
    random_prompt,
    table,
)
from tests.support.tiny_families import TINY_FAMILIES
from tests.support.tiny_models import TinyModel

if TYPE_CHECKING:
    from pathlib import Path


def test_equal_logits_are_equal() -> None:
    logits = np.random.default_rng(1).normal(size=(5, 7)).astype(np.float32)
    assert compare(logits, logits.copy()) == Parity(5, 5, 0.0, is_bit_equal=True)


def test_figures_are_those_of_the_distributions() -> None:
    ours = np.log(np.array([[0.5, 0.5], [0.9, 0.1]], np.float32))
    theirs = np.log(np.array([[0.25, 0.75], [0.9, 0.1]], np.float32))
    found = compare(ours, theirs)
    assert (found.num_tokens, found.num_agreed, found.is_bit_equal) == (2, 1, False)
    first = 0.5 * math.log(0.5 / 0.25) + 0.5 * math.log(0.5 / 0.75)
    assert found.mean_kl_nats == pytest.approx(first / 2, rel=1e-5)


def test_bounds_are_of_both_figures() -> None:
    assert Parity(100, 95, 0.005, is_bit_equal=False).is_within(STAGES)
    assert not Parity(100, 94, 0.0, is_bit_equal=False).is_within(STAGES)
    assert not Parity(100, 100, 0.006, is_bit_equal=False).is_within(STAGES)
    assert Parity(100, 90, 0.02, is_bit_equal=False).is_within(PROCESSOR)
    assert not Parity(100, 89, 0.0, is_bit_equal=False).is_within(PROCESSOR)


def test_a_prompt_is_the_same_each_time_and_of_the_vocabulary() -> None:
    for n_vocab in (320, 50_000):
        prompt = random_prompt(n_vocab, 200)
        assert prompt == random_prompt(n_vocab, 200)
        assert 80 <= min(prompt) <= max(prompt) < n_vocab


@pytest.mark.parametrize(
    ("name", "cuts"),
    [("qwen3moe", (1, 2, 3)), ("llama4", (4,)), ("smallthinker", (4, 8)), ("qwen3next", (1, 2, 3, 4, 5))],
)
def test_a_model_is_cut_at_as_many_places_as_stages_may_have(
    name: str, cuts: tuple[int, ...], tmp_path: Path
) -> None:
    source = read_source(TINY_FAMILIES[name].write(tmp_path / "model.gguf"))
    assert _all_cuts(source) == cuts


def test_all_ways_of_computing_a_model_agree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (processor,) = (device for device in list_devices() if device.kind == "cpu")
    monkeypatch.setattr("stages.runtime.devices.layer_devices", lambda: (processor,))
    monkeypatch.setattr("llama_cpp.llama_supports_gpu_offload", lambda: True)
    model = TinyModel("llama").write(tmp_path / "llama.gguf")
    found = measure(model, processor, tmp_path, num_tokens=24)
    assert found.cuts == (1, 2, 3, 4, 5)
    assert found.is_within
    (line,) = table([found]).splitlines()[2:]
    assert line.startswith("| llama.gguf | llama | 6 | 24/24")
    assert line.endswith("| within |")


@pytest.mark.skipif(bool(layer_devices()), reason="this machine has a GPU")
def test_without_a_gpu_there_is_nothing_to_compare() -> None:
    with pytest.raises(ClusterError, match="finds no device for layers here; it finds none"):
        first_device()
