"""Stage files: what they hold, that their weights are the model's bit for bit, that they appear whole."""

import errno
import os
import signal
from itertools import pairwise
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from spanmesh_proto.errors import InvalidModel, ModelError, UncuttableModel
from stages.certification import certify as certification
from stages.certification.certify import certify, cut_stage
from stages.gguf import read_header
from stages.layers import LayerRange
from stages.slicing.architectures import cutting_rules
from stages.slicing.layout import FILLER_VOCAB
from stages.slicing.tensor_names import renumbered
from tests.support.tiny_models import N_VOCAB, TinyModel


def weights_of(path: Path) -> dict[str, gguf.ReaderTensor]:
    return {tensor.name: tensor for tensor in gguf.GGUFReader(path).tensors}


def metadata_of(path: Path) -> dict[str, Any]:
    return {
        key: field.contents() for key, field in gguf.GGUFReader(path).fields.items() if "GGUF." not in key
    }


def cut(source: Path, start: int, stop: int, folder: Path) -> Path:
    output = folder / f"stage-{start}-{stop}.gguf"
    cut_stage(source, LayerRange(start, stop), output)
    return output


def same_bytes(left: gguf.ReaderTensor, right: gguf.ReaderTensor) -> bool:
    return (left.tensor_type, left.shape.tolist(), left.data.tobytes()) == (
        right.tensor_type,
        right.shape.tolist(),
        right.data.tobytes(),
    )


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    return TinyModel("llama", has_rope_factors=True).write(folder / "llama.gguf")


@pytest.fixture(scope="module")
def tied(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return TinyModel("qwen3", is_tied=True).write(tmp_path_factory.mktemp("models") / "tied.gguf")


@pytest.mark.parametrize(("start", "stop"), [(0, 2), (2, 5), (5, 6), (0, 6)])
def test_layers_are_renumbered_and_unchanged(llama: Path, tmp_path: Path, start: int, stop: int) -> None:
    whole, stage = weights_of(llama), weights_of(cut(llama, start, stop, tmp_path))
    layers = {name for name in stage if name.startswith("blk.")}
    expected = {
        f"blk.{layer - start}.{kind}": whole[f"blk.{layer}.{kind}"]
        for layer in range(start, stop)
        for kind in {name.split(".", 2)[2] for name in whole if name.startswith("blk.0.")}
    }
    assert layers == set(expected)
    assert all(same_bytes(stage[name], tensor) for name, tensor in expected.items())


@pytest.mark.parametrize(("start", "stop"), [(0, 2), (2, 5), (5, 6), (0, 6)])
def test_small_tensors_are_in_every_stage(llama: Path, tmp_path: Path, start: int, stop: int) -> None:
    whole, stage = weights_of(llama), weights_of(cut(llama, start, stop, tmp_path))
    for name in ("rope_freqs.weight", "output_norm.weight"):
        assert same_bytes(stage[name], whole[name])


def test_who_holds_the_vocabulary(llama: Path, tmp_path: Path) -> None:
    whole = weights_of(llama)
    first, middle, tail = (weights_of(cut(llama, *edges, tmp_path)) for edges in pairwise((0, 2, 5, 6)))
    assert same_bytes(first["token_embd.weight"], whole["token_embd.weight"])
    assert middle["token_embd.weight"].shape.tolist() == [64, FILLER_VOCAB]
    assert not middle["token_embd.weight"].data.any()
    # llama.cpp takes the embedding as the head if there is none: no filler of full size is needed.
    assert same_bytes(tail["token_embd.weight"], whole["output.weight"])
    for stage in (first, middle, tail):
        assert "output.weight" not in stage


def test_who_holds_a_tied_vocabulary(tied: Path, tmp_path: Path) -> None:
    whole = weights_of(tied)
    first, middle, tail = (weights_of(cut(tied, *edges, tmp_path)) for edges in pairwise((0, 2, 5, 6)))
    assert same_bytes(first["token_embd.weight"], whole["token_embd.weight"])
    assert same_bytes(tail["token_embd.weight"], whole["token_embd.weight"])
    assert middle["token_embd.weight"].n_bytes == 64 * FILLER_VOCAB * 4


def test_an_architecture_that_insists_on_a_head_gets_a_filler(tmp_path: Path) -> None:
    source = TinyModel("internlm2").write(tmp_path / "internlm2.gguf")
    whole = weights_of(source)
    first, middle, tail = (weights_of(cut(source, *edges, tmp_path)) for edges in pairwise((0, 2, 5, 6)))
    assert same_bytes(first["token_embd.weight"], whole["token_embd.weight"])
    assert same_bytes(tail["output.weight"], whole["output.weight"])
    for filler in (first["output.weight"], tail["token_embd.weight"]):
        assert filler.shape.tolist() == [64, N_VOCAB]
        assert filler.n_bytes < whole["output.weight"].n_bytes
        assert not filler.data.any()
    assert (
        middle["output.weight"].shape.tolist()
        == middle["token_embd.weight"].shape.tolist()
        == [64, FILLER_VOCAB]
    )


def test_a_head_of_fixed_size_has_no_more_rows_than_the_embedding(tmp_path: Path) -> None:
    source = TinyModel("qwen3tts").write(tmp_path / "qwen3tts.gguf")
    middle = cut(source, 2, 5, tmp_path)
    shapes = [weights_of(middle)[f"{name}.weight"].shape.tolist() for name in ("token_embd", "output")]
    assert shapes == [[64, N_VOCAB]] * 2
    assert metadata_of(middle)["qwen3tts.vocab_size"] == N_VOCAB


def test_metadata(llama: Path, tmp_path: Path) -> None:
    whole = metadata_of(llama)
    for start, stop, vocab_size in ((0, 2, N_VOCAB), (2, 5, FILLER_VOCAB), (5, 6, N_VOCAB)):
        stage = metadata_of(cut(llama, start, stop, tmp_path))
        own = {
            "llama.block_count": stop - start,
            "llama.vocab_size": vocab_size,
            "tokenizer.ggml.model": "no_vocab",
            "spanmesh.layer_start": start,
            "spanmesh.layer_stop": stop,
            "spanmesh.layer_count": 6,
        }
        kept = {key: value for key, value in whole.items() if "tokenizer." not in key and key not in own}
        assert stage == kept | own


def test_arrays_with_an_entry_per_layer_are_cut(tmp_path: Path) -> None:
    arrays = {"llama.attention.head_count_kv": [2, 2, 1, 1], "llama.rope.dimension_sections": [4, 3, 2, 1]}
    source = TinyModel("llama", n_layers=4).write(tmp_path / "varied.gguf", arrays=arrays)
    stage = metadata_of(cut(source, 1, 4, tmp_path))
    assert stage["llama.attention.head_count_kv"] == [2, 1, 1]
    assert stage["llama.rope.dimension_sections"] == [4, 3, 2, 1]


def test_alignment_is_kept(tmp_path: Path) -> None:
    source = TinyModel("llama").write(tmp_path / "aligned.gguf", alignment=128)
    whole = weights_of(source)
    stage = weights_of(cut(source, 2, 4, tmp_path))
    assert all(tensor.data_offset % 128 == 0 for tensor in stage.values())
    assert same_bytes(stage["blk.0.attn_q.weight"], whole["blk.2.attn_q.weight"])


def test_the_same_cut_gives_the_same_bytes(llama: Path, tmp_path: Path) -> None:
    (tmp_path / "again").mkdir()
    assert cut(llama, 2, 5, tmp_path).read_bytes() == cut(llama, 2, 5, tmp_path / "again").read_bytes()


def test_progress_ends_at_the_total(llama: Path, tmp_path: Path) -> None:
    calls: list[tuple[int, int]] = []
    output = tmp_path / "stage.gguf"
    cut_stage(llama, LayerRange(0, 3), output, progress=lambda done, total: calls.append((done, total)))
    total = output.stat().st_size
    assert calls[-1] == (total, total)
    assert [done for done, _ in calls] == sorted(done for done, _ in calls)


@pytest.mark.model
def test_real_models_lose_nothing(smollm2_path: Path, tmp_path: Path) -> None:
    edges = (0, 7, 18, 30)
    parts = [weights_of(cut(smollm2_path, *pair, tmp_path)) for pair in pairwise(edges)]
    whole = weights_of(smollm2_path)
    for name, tensor in whole.items():
        if not name.startswith("blk."):
            continue
        layer, kind = int(name.split(".")[1]), name.split(".", 2)[2]
        part = max(index for index, edge in enumerate(edges) if edge <= layer)
        assert same_bytes(parts[part][f"blk.{layer - edges[part]}.{kind}"], tensor)


def test_layers_that_are_not_there(llama: Path, tmp_path: Path) -> None:
    with pytest.raises(UncuttableModel, match=r"llama\.gguf has 6 layers; \[4, 7\) is not among them"):
        cut(llama, 4, 7, tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_stage_is_not_cut_again(llama: Path, tmp_path: Path) -> None:
    stage = cut(llama, 2, 5, tmp_path)
    with pytest.raises(InvalidModel, match=r"is a stage, layers \[2, 5\); name the whole model's file"):
        cut_stage(stage, LayerRange(0, 1), tmp_path / "again.gguf")
    assert list(tmp_path.iterdir()) == [stage]


def test_the_model_itself_is_not_overwritten(tmp_path: Path) -> None:
    source = TinyModel("llama").write(tmp_path / "model.gguf")
    before = source.read_bytes()
    with pytest.raises(ModelError, match="is the model itself; choose another name"):
        cut_stage(source, LayerRange(0, 3), source)
    assert source.read_bytes() == before
    assert list(tmp_path.iterdir()) == [source]


def test_output_in_a_folder_that_is_not_there(llama: Path, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"cannot write .*stage\.gguf: No such file or directory"):
        cut_stage(llama, LayerRange(0, 3), tmp_path / "absent" / "stage.gguf")


def test_a_full_disk_leaves_nothing_behind(llama: Path, tmp_path: Path) -> None:
    resource = pytest.importorskip("resource", reason="file size limits are Unix only")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    previous = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, limits[1]))
        with pytest.raises(ModelError, match=os.strerror(errno.EFBIG)):
            cut_stage(llama, LayerRange(0, 3), tmp_path / "stage.gguf")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, previous)
    assert list(tmp_path.iterdir()) == []


def test_ctrl_c_leaves_nothing_behind(llama: Path, tmp_path: Path) -> None:
    output = tmp_path / "stage.gguf"
    output.write_bytes(b"an older stage")

    def press_ctrl_c(done: int, _total: int) -> None:
        if done > 10_000:
            signal.raise_signal(signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        cut_stage(llama, LayerRange(0, 3), output, progress=press_ctrl_c)
    assert list(tmp_path.iterdir()) == [output]
    assert output.read_bytes() == b"an older stage"


def test_a_source_that_shrinks_meanwhile(tmp_path: Path) -> None:
    source = TinyModel("llama").write(tmp_path / "model.gguf")
    size = source.stat().st_size

    def shrink(_done: int, _total: int) -> None:
        os.truncate(source, size - 20_000)

    with pytest.raises(InvalidModel, match=r"model\.gguf ended inside tensor '.*' while it was being cut"):
        cut_stage(source, LayerRange(0, 6), tmp_path / "stage.gguf", progress=shrink)
    assert list(tmp_path.iterdir()) == [source]


def test_an_unknown_family_is_refused_if_cutting_changes_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # In this process, where the family can be made unknown.
    monkeypatch.setattr(certification, "certify_isolated", certify)
    monkeypatch.delitem(cutting_rules.FAMILIES, "granite")
    # Granite scales its embedding, and llama.cpp does so again with the hidden states of the stage before.
    source = TinyModel("granite").write(tmp_path / "granite.gguf")
    with pytest.raises(
        UncuttableModel,
        match=r"'granite', and the self-check failed: cut at 2 its logits differ by up to [\d.]+",
    ):
        cut(source, 2, 4, tmp_path)
    assert list(tmp_path.iterdir()) == [source]


def test_an_unknown_architecture_is_refused(tmp_path: Path) -> None:
    source = TinyModel("starship").write(tmp_path / "starship.gguf")
    with pytest.raises(
        UncuttableModel,
        match=r"no certified rules for 'starship', .* llama\.cpp does not load",
    ):
        cut(source, 2, 4, tmp_path)


def test_zeros_are_zeros_in_every_filler_type(tmp_path: Path) -> None:
    source = TinyModel("internlm2", n_embd=256, n_heads=4, head_size=64, n_layers=2).write(
        tmp_path / "wide.gguf"
    )
    filler = weights_of(cut(source, 1, 2, tmp_path))["token_embd.weight"]
    assert filler.tensor_type == gguf.GGMLQuantizationType.IQ1_S
    assert np.array_equal(
        gguf.quants.dequantize(filler.data, filler.tensor_type), np.zeros((N_VOCAB, 256), np.float32)
    )


@pytest.mark.model
def test_layers_lie_in_their_blocks_as_they_do_in_the_model(smollm2_path: Path, tmp_path: Path) -> None:
    whole = read_header(smollm2_path).tensors
    # In this file layer 10 follows layer 1: these are ranges that have no gap there.
    for start, stop in ((3, 7), (10, 18), (20, 30)):
        stage = read_header(cut(smollm2_path, start, stop, tmp_path)).tensors
        places = [
            tensor.offset_bytes - whole[renumbered(tensor.name, -start)].offset_bytes
            for tensor in stage.values()
            if tensor.name.startswith("blk.")
        ]
        assert places
        assert all(place % 4096 == 0 for place in places)
