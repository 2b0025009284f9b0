"""Families whose layers are unlike llama's, cut at every place that their rules allow."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from spanmesh_proto.errors import UncuttableModel
from stages.certification.certify import CertifyOptions, certify, cut_stage
from stages.certification.comparison import Difference
from stages.layers import LayerRange
from stages.runtime.numerics import EXACT_MAX_ROWS
from stages.runtime.slot_memory import StateCheckpoints
from stages.runtime.spans import Span
from stages.runtime.stage_runtime import StageRuntime
from stages.slicing.model_facts import read_model_facts
from tests.support.tiny_families import TINY_FAMILIES
from tests.support.tiny_models import TinyModel

SHORT = CertifyOptions(n_prompt=20, n_decode=4)
RECURRENT = {"mamba2", "falcon-h1", "qwen3next", "nemotron_h", "granitehybrid"}


@pytest.mark.parametrize("name", TINY_FAMILIES)
def test_every_cut_is_bit_equal(name: str, tmp_path: Path) -> None:
    """Prefill, decode, chunks past the window, spans after going back; alone and all cuts at once."""
    family = TINY_FAMILIES[name]
    report = certify(family.write(tmp_path / "model.gguf"), None, SHORT)
    assert tuple(result.cut for result in report.cuts) == family.cuts
    assert [result.cut for result in report.cuts if not result.difference.is_bit_equal] == []
    assert report.is_known
    for result in report.cuts:
        phases = {phase.phase: phase.difference for phase in result.phases}
        assert phases["prefill"] == Difference(n_rows=20, n_tokens=20, n_equal_tokens=20)
        assert phases["decode"].n_tokens == 4
        assert phases["chunks"].n_rows >= 80
        assert phases["spans"].n_tokens == (23 if name in RECURRENT else 11)
        assert phases["windows"].n_tokens == (86 if name in RECURRENT else 0)
    assert (report.with_checkpoints is not None) == (name in RECURRENT)
    together = report.together
    assert (together is None) == (len(family.cuts) == 1)
    assert together is None or (together.is_bit_equal and together.n_tokens >= 28)


def test_a_checkpoint_with_a_wrong_bit_shows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only where sessions go back: the reference never does."""
    read = StateCheckpoints.read

    def read_badly(self: StateCheckpoints, slot: int) -> NDArray[np.uint8]:
        copy = read(self, slot)
        copy[-1] ^= 1
        return copy

    monkeypatch.setattr(StateCheckpoints, "read", read_badly)
    report = certify(TINY_FAMILIES["mamba2"].write(tmp_path / "model.gguf"), [2], SHORT)
    assert report.with_checkpoints is not None
    assert [phase.phase for phase in report.cuts[0].phases if not phase.difference.is_bit_equal] == ["spans"]
    assert not report.is_exact
    assert report.is_exact_onward


def test_rows_at_once_that_differ_from_rows_one_by_one_show(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    decode = StageRuntime.decode

    def decode_badly(self: StageRuntime, spans: Sequence[Span]) -> list[NDArray[np.float32]]:
        outputs = decode(self, spans)
        if len(spans[0].tokens) == EXACT_MAX_ROWS:
            outputs[0] = outputs[0] + np.float32(1e-3)
        return outputs

    monkeypatch.setattr(StageRuntime, "decode", decode_badly)
    report = certify(TINY_FAMILIES["mamba2"].write(tmp_path / "model.gguf"), [2], SHORT)
    assert [phase.phase for phase in report.cuts[0].phases if not phase.difference.is_bit_equal] == [
        "windows"
    ]
    assert not report.is_exact
    assert report.is_exact_onward


@pytest.mark.parametrize("name", ["glm4moe", "deepseek2", "qwen3next"])
def test_the_trunk_before_a_prediction_layer_is_cut_like_any_model(name: str, tmp_path: Path) -> None:
    family = TINY_FAMILIES[name]
    model = family.with_prediction_layer().write(tmp_path / "model.gguf")
    facts = read_model_facts(model)
    assert (facts.n_layers, facts.n_prediction_layers) == (family.n_layers, 1)
    report = certify(model, None, SHORT)
    assert tuple(result.cut for result in report.cuts) == family.cuts
    assert report.is_exact
    assert report.is_known


@pytest.mark.parametrize("architecture", ["gemma2", "granite"])
def test_llamas_near_relatives_are_bit_equal(architecture: str, tmp_path: Path) -> None:
    model = TinyModel(architecture, is_tied=architecture == "gemma2").write(tmp_path / "model.gguf")
    report = certify(model, None, SHORT)
    assert [result.cut for result in report.cuts] == [1, 2, 3, 4, 5]
    assert report.is_exact


@pytest.mark.parametrize(
    ("name", "cut", "reason"),
    [
        ("gemma4", 5, "the last 2 layers share the KV caches of layers 4 and 5"),
        ("llama4", 3, "cuts are multiples of 4"),
    ],
)
def test_other_cuts_are_refused_with_the_reason(name: str, cut: int, reason: str, tmp_path: Path) -> None:
    model = TINY_FAMILIES[name].write(tmp_path / "model.gguf")
    facts = read_model_facts(model)
    assert facts.allowed_cuts == TINY_FAMILIES[name].cuts
    assert reason in facts.refused_cuts[cut]
    with pytest.raises(UncuttableModel, match=f"cannot be cut at layer {cut}: .*{reason}"):
        cut_stage(model, LayerRange(0, cut), tmp_path / "stage.gguf")


def test_recurrent_state_is_a_fact_of_the_model(tmp_path: Path) -> None:
    cannot = {
        name
        for name, family in TINY_FAMILIES.items()
        if not read_model_facts(family.write(tmp_path / "model.gguf")).can_trim
    }
    assert cannot == RECURRENT
