"""Checks of a projector's header, before libmtmd sees it."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from spanmesh_proto.errors import InvalidModel
from stages.vision.projector_file import KINDS, REFUSED, check_projector
from tests.support.tiny_families import TINY_FAMILIES
from tests.support.tiny_projectors import llava, text_model

# What llama.cpp has besides: projectors for sound, and for both.
OF_SOUND = {
    *("gemma3na", "gemma4a", "gemma4ua", "glma", "granite_speech", "lfm2a", "meralion", "mimo_audio"),
    *("musicflamingo", "parakeet", "pockettts_gen", "pockettts_spkenc", "qwen2a", "qwen3a", "qwen3tts_gen"),
    *("qwen3tts_spkenc", "ultravox", "voxtral", "dots3note_a"),
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return text_model(tmp_path_factory.mktemp("model") / "model.gguf")


def test_a_projector_for_pictures_is_named_by_its_kind(model: Path, tmp_path: Path) -> None:
    assert check_projector(llava(tmp_path / "mmproj.gguf"), model) == "mlp"
    # Of files for several senses.
    both = {"clip.projector_type": None, "clip.vision.projector_type": "qwen2.5o"}
    assert check_projector(llava(tmp_path / "both.gguf", **both), model) == "qwen2.5o"


@pytest.mark.parametrize(
    ("metadata", "reason"),
    [
        ({"clip.has_vision_encoder": False}, "something else than pictures"),
        ({"clip.has_vision_encoder": None, "clip.has_audio_encoder": True}, "something else than pictures"),
        ({"clip.has_vision_encoder": 1}, "something else than pictures"),
        ({"clip.projector_type": "hunyuanvl"}, r"mmproj\.gguf is not served \(HunyuanVL: positions of"),
        ({"clip.projector_type": "deepseek4v"}, r"DeepSeek-4 Vision: its rows depend on their place"),
        ({"clip.projector_type": "ultravox"}, "of kind 'ultravox', which is not known here"),
        ({"clip.projector_type": None}, "of kind '', which is not known here"),
        ({"clip.projector_type": 7}, "'clip.projector_type' is 7, need a string"),
    ],
)
def test_one_that_is_none_for_pictures_is_refused(
    metadata: dict[str, object], reason: str, model: Path, tmp_path: Path
) -> None:
    with pytest.raises(InvalidModel, match=reason):
        check_projector(llava(tmp_path / "mmproj.gguf", **metadata), model)


def test_models_and_projectors_are_not_mistaken_for_each_other(model: Path, tmp_path: Path) -> None:
    projector = llava(tmp_path / "mmproj.gguf")
    with pytest.raises(InvalidModel, match=r"model\.gguf is a model \(llama\) and no projector"):
        check_projector(model, model)
    with pytest.raises(InvalidModel, match=r"mmproj\.gguf is a projector: name the model"):
        check_projector(projector, projector)


def test_a_family_that_would_end_the_process_is_refused(tmp_path: Path) -> None:
    model = TINY_FAMILIES["glm4moe"].write(tmp_path / "glm.gguf")
    with pytest.raises(InvalidModel, match=r"glm\.gguf takes no rows.*glm4moe\.rope\.dimension_sections is"):
        check_projector(llava(tmp_path / "mmproj.gguf"), model)


def test_every_kind_that_llama_cpp_knows_is_accounted_for() -> None:
    source = os.environ.get("SPANMESH_LLAMA_CPP")
    if source is None:
        pytest.skip("no source of llama.cpp: see SPANMESH_LLAMA_CPP")
    text = (Path(source) / "tools/mtmd/clip-impl.h").read_text()
    table = re.search(r"PROJECTOR_TYPE_NAMES = \{(.*?)\n\};", text, re.DOTALL)
    assert table is not None
    known = set(re.findall(r'"([^"]+)"', table[1]))
    assert known == KINDS | REFUSED.keys() | OF_SOUND
    assert not KINDS & REFUSED.keys()
