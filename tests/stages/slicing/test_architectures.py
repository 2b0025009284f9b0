"""What single families need beyond the generic rules."""

from pathlib import Path

import pytest

from spanmesh_proto.errors import UncuttableModel
from stages.certification.certify import cut_stage
from stages.gguf import read_header
from stages.layers import LayerRange
from stages.slicing.architectures.cutting_rules import FAMILIES, family_of
from stages.slicing.model_facts import read_model_facts
from tests.support.tiny_models import TinyModel

PATTERN = "gemma3.attention.sliding_window_pattern"
WINDOW = "gemma3.attention.sliding_window"


def stage_values(source: Path, layers: LayerRange, key: str) -> object:
    output = source.with_name("stage.gguf")
    cut_stage(source, layers, output)
    value = read_header(output).metadata.get(key)
    return None if value is None else value.decode()


def test_the_table() -> None:
    assert {"llama", "qwen2", "qwen3", "gemma3"} < set(FAMILIES)
    assert all(family.architecture == name for name, family in FAMILIES.items())
    assert all(rule.name and rule.reason for family in FAMILIES.values() for rule in family.rules)
    assert not family_of("starship").has_uniform_layers


@pytest.mark.parametrize(
    ("layers", "pattern"),
    [
        (LayerRange(0, 6), (True, True, True, True, True, False)),
        (LayerRange(3, 8), (True, True, False, True, True)),
        (LayerRange(11, 13), (False, True)),
    ],
)
def test_gemma3_windows_follow_the_layers(
    tmp_path: Path, layers: LayerRange, pattern: tuple[bool, ...]
) -> None:
    source = TinyModel("gemma3", n_layers=13).write(tmp_path / "gemma3.gguf")
    assert stage_values(source, layers, PATTERN) == pattern
    assert stage_values(source, layers, WINDOW) == 16


def test_gemma3_stage_without_windows(tmp_path: Path) -> None:
    source = TinyModel("gemma3", n_layers=7).write(tmp_path / "gemma3.gguf")
    assert stage_values(source, LayerRange(5, 6), WINDOW) == 0


def test_gemma3_with_its_own_period(tmp_path: Path) -> None:
    source = TinyModel("gemma3").write(tmp_path / "gemma3.gguf", integers={PATTERN: 2})
    assert stage_values(source, LayerRange(1, 4), PATTERN) == (False, True, False)


def test_gemma3_with_its_own_pattern(tmp_path: Path) -> None:
    source = TinyModel("gemma3").write(tmp_path / "gemma3.gguf", arrays={PATTERN: [1, 0, 0, 1, 0, 1]})
    assert stage_values(source, LayerRange(2, 5), PATTERN) == (False, True, False)
    assert stage_values(source, LayerRange(1, 3), WINDOW) == 0


def test_gemma3_without_windows(tmp_path: Path) -> None:
    source = TinyModel("gemma3", window=0).write(tmp_path / "gemma3.gguf")
    assert stage_values(source, LayerRange(2, 5), PATTERN) is None


def test_gemma3_27b_is_refused(tmp_path: Path) -> None:
    wide = TinyModel("gemma3", n_layers=62, n_embd=128).write(tmp_path / "27b.gguf")
    assert read_model_facts(wide).allowed_cuts == ()
    with pytest.raises(
        UncuttableModel, match=r"27b\.gguf cannot be cut: .*1/sqrt\(32\) in a gemma3 of 62 layers"
    ):
        cut_stage(wide, LayerRange(0, 30), tmp_path / "stage.gguf")
    # In one piece it keeps its 62 layers.
    cut_stage(wide, LayerRange(0, 62), tmp_path / "stage.gguf")


def test_62_layers_with_equal_scales_can_be_cut(tmp_path: Path) -> None:
    source = TinyModel("gemma3", n_layers=62).write(tmp_path / "gemma3.gguf")
    assert len(read_model_facts(source).allowed_cuts) == 61
