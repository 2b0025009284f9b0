"""Which drafters lie beside a model, and which models beside a drafter."""

from __future__ import annotations

import shlex
import shutil
from typing import TYPE_CHECKING

import pytest

from mesh.draft.drafter import loadable_file, own_head, serving_command
from mesh.draft.pairs import DrafterBeside, drafters_beside, models_beside
from stages.slicing.model_facts import read_model_facts
from tests.support.drafter_files import write_header
from tests.support.eagle3 import DRAFTER
from tests.support.tiny_families import TINY_FAMILIES
from tests.support.tiny_models import TinyModel

if TYPE_CHECKING:
    from pathlib import Path

COMMIT, OTHER = "a" * 40, "b" * 40


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def head_of(model: Path, path: Path, folder: Path) -> Path:
    """A file with a model's own head only."""
    head = own_head(read_model_facts(model))
    assert head is not None
    shutil.copy(loadable_file(head, model, folder), path)
    return path


def beside(model: Path) -> dict[str, DrafterBeside]:
    return {found.path.name: found for found in drafters_beside(read_model_facts(model))}


def test_drafters_of_a_folder_with_what_they_are_and_why_they_do_not_fit(tmp_path: Path) -> None:
    folder = tmp_path / "models"
    folder.mkdir()
    model = TINY_FAMILIES["glm4moe"].with_prediction_layer().write(folder / "model.gguf")
    head_of(model, folder / "mtp-model.gguf", tmp_path)
    shutil.copy(DRAFTER, folder / "eagle3.gguf")
    write_header(folder / "assistant.gguf", "gemma4-assistant", n_prediction_layers=1)
    TinyModel("llama").write(folder / "small.gguf")
    (folder / "broken.gguf").write_bytes(b"GGUF of nothing")
    (folder / "deep").mkdir()
    shutil.copy(DRAFTER, folder / "deep" / "further.gguf")
    found = beside(model)
    assert [*found] == ["assistant.gguf", "eagle3.gguf", "mtp-model.gguf"]
    head = found["mtp-model.gguf"]
    assert (head.label, head.misfit) == ("a head for multi-token prediction", "")
    assert found["eagle3.gguf"].label == "an EAGLE-3 drafter"
    assert "reads hidden states of 576 values" in found["eagle3.gguf"].misfit
    assert found["assistant.gguf"].label == "an assistant of Gemma 4"
    assert found["assistant.gguf"].misfit
    assert [*models_beside(folder / "mtp-model.gguf")] == [model]
    assert [*models_beside(folder / "eagle3.gguf")] == []


def test_all_commits_of_a_cached_repository_are_beside_one_another(tmp_path: Path) -> None:
    repository = tmp_path / "cache" / "spanmesh" / "models" / "org" / "repo"
    deep = repository / COMMIT / "Q8_0"
    deep.mkdir(parents=True)
    (repository / OTHER).mkdir()
    model = TINY_FAMILIES["glm4moe"].with_prediction_layer().write(deep / "model.gguf")
    head = head_of(model, repository / OTHER / "mtp-model.gguf", tmp_path)
    strange = repository.with_name("other") / COMMIT
    strange.mkdir(parents=True)
    shutil.copy(head, strange / "mtp-model.gguf")
    assert [found.path for found in drafters_beside(read_model_facts(model))] == [head]
    assert [*models_beside(head)] == [model]
    assert [*models_beside(strange / "mtp-model.gguf")] == []


def test_the_command_is_one_for_a_shell(tmp_path: Path) -> None:
    model, drafter = tmp_path / "my model.gguf", tmp_path / "it's.gguf"
    words = shlex.split(serving_command(model, drafter))
    assert words == ["mesh", "serve", str(model), "--draft", str(drafter)]
