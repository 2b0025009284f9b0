"""Untrained drafters: they fit their model, and llama.cpp drafts with them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest

from mesh.cli.main import run
from mesh.draft.loading import check_drafter
from mesh.tuning.beginning import DEMO_DRAFTER, write_beginning
from mesh.tuning.drafter_file import has_head_of, head_rows
from mesh.tuning.source import Source
from speculative.draft.context import DraftOptions
from tests.support.gguf_source import GgufSource
from tests.support.hub_server import running_hub
from tests.support.tiny_eagle3 import TinyEagle3
from tests.support.tiny_models import TinyModel

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.parametrize("architecture", ["llama", pytest.param("qwen3", marks=pytest.mark.sweep), "gemma3"])
def test_a_beginning_drafts(architecture: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    target = TinyModel(architecture, n_layers=8).write(tmp_path / "target.gguf")
    path = tmp_path / "beginning.gguf"
    assert run(["draft", "begin", str(target), "-o", str(path), "--vocabulary", "100"]) == 0
    found = check_drafter(path, target, DraftOptions(ctx_size=64))
    assert (found.num_own_tokens, found.read_layers) == (100, (1, 3, 4))
    source = Source(target, path)
    assert source.recorded.layers == (2, 4, 5)
    assert has_head_of(source.weights, head_rows(source.header), 64)
    assert run(["draft", "begin", str(target), "-o", str(path)]) == 1


@pytest.mark.model
def test_the_demos_model_has_a_trained_one(smollm2_path: Path, tmp_path: Path) -> None:
    path = tmp_path / "eagle3.gguf"
    for named in ((), (str(smollm2_path), "--force")):
        assert run(["draft", "begin", *named, "-o", str(path)]) == 0
        assert path.read_bytes() == DEMO_DRAFTER.read_bytes()
    assert run(["draft", "begin", "-o", str(path), "--force", "--untrained"]) == 0
    assert path.read_bytes() != DEMO_DRAFTER.read_bytes()


def test_a_repository_at_the_hub_has_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    target = TinyModel("llama", n_layers=6, is_float=True).write(tmp_path / "tiny-F32.gguf")
    drafter = TinyEagle3().write(target, tmp_path / "tiny-eagle3.gguf")
    words = ["draft", "begin", "hf:org/tiny-GGUF:F32", "-o", str(tmp_path / "out.gguf")]
    with running_hub() as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        hub.files = {path.name: path.read_bytes() for path in (target, drafter)}
        assert run(words) == 0
        assert (tmp_path / "out.gguf").read_bytes() == drafter.read_bytes()
        assert "out.gguf: hf:org/tiny-GGUF:tiny-eagle3; serve it with" in capsys.readouterr().out
        hub.files["other-eagle3.gguf"] = drafter.read_bytes()
        assert run([*words, "--force"]) == 1
        assert "has several: name one as it is, hf:org/tiny-GGUF:other-eagle3, " in capsys.readouterr().err


def test_it_is_the_models_last_layer(tmp_path: Path) -> None:
    target = TinyModel("llama", n_layers=6, is_float=True).write(tmp_path / "target.gguf")
    path = tmp_path / "beginning.gguf"
    write_beginning(path, target, 320, (1, 3, 5))
    assert Source(target, path).recorded.layers == (1, 3, 5)
    last, trained = GgufSource(target).tensors, Source(target, path).weights.trained
    query = np.array(last["blk.5.attn_q.weight"].data)
    for half in np.split(trained["blk.0.attn_q.weight"], 2, axis=1):
        np.testing.assert_allclose(half, query / 2, atol=np.abs(query).max() / 200)
    norm = np.array(last["output_norm.weight"].data)
    np.testing.assert_array_equal(trained["output_norm.weight"], norm)
    # Of the features the last ones pass.
    row = trained["fc.weight"] @ np.arange(3 * 64)
    np.testing.assert_allclose(row, np.arange(128, 192), rtol=0.01)


def test_a_model_with_few_layers_has_none(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = TinyModel("llama", n_layers=5).write(tmp_path / "target.gguf")
    assert run(["draft", "begin", str(target), "-o", str(tmp_path / "out.gguf")]) == 1
    assert "has 5 layers: a drafter reads three of at least six" in capsys.readouterr().err
    assert not (tmp_path / "out.gguf").exists()
    target = TinyModel("llama", n_layers=8).write(tmp_path / "target.gguf")
    assert run(["draft", "begin", str(target), "-o", str(tmp_path / "out.gguf"), "--layers", "2,4"]) == 1
    assert "no list of three" in capsys.readouterr().err
    assert not (tmp_path / "out.gguf").exists()
