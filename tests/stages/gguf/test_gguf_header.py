"""Reading GGUF headers: what is in them, and what a file gets that is not a whole GGUF."""

import math
import os
import re
import struct
from pathlib import Path
from typing import Any

import gguf
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from spanmesh_proto.errors import InvalidModel, ModelError, UncuttableModel
from stages.gguf import read_header
from stages.slicing.model_facts import read_model_facts
from stages.slicing.source_model import SourceModel, read_source
from tests.support.tiny_models import N_VOCAB, TinyModel


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return TinyModel("llama", has_rope_factors=True).write(tmp_path_factory.mktemp("models") / "tiny.gguf")


def damaged(tiny: Path, folder: Path, old: bytes, new: bytes) -> Path:
    """A copy of the model with some bytes of its header changed."""
    data = tiny.read_bytes()
    assert data.count(old) >= 1
    path = folder / "damaged.gguf"
    path.write_bytes(data.replace(old, new, 1))
    return path


def test_agrees_with_gguf_py(tiny: Path) -> None:
    header = read_header(tiny)
    reader = gguf.GGUFReader(tiny)
    theirs = {
        tensor.name: (
            tuple(tensor.shape.tolist()),
            tensor.tensor_type,
            int(tensor.data_offset),
            int(tensor.n_bytes),
        )
        for tensor in reader.tensors
    }
    ours = {
        tensor.name: (tensor.shape, tensor.type, tensor.offset_bytes, tensor.n_bytes)
        for tensor in header.tensors.values()
    }
    assert ours == theirs
    fields = {key: field for key, field in reader.fields.items() if not key.startswith("GGUF.")}
    assert list(header.metadata) == list(fields)
    for key, field in fields.items():
        decoded = header.metadata[key].decode()
        assert (list(decoded) if isinstance(decoded, tuple) else decoded) == field.contents(), key


def test_facts_of_a_tiny_model(tiny: Path) -> None:
    facts = read_model_facts(tiny)
    assert (facts.architecture, facts.name, facts.n_layers) == ("llama", "Tiny llama", 6)
    assert (facts.n_embd, facts.n_vocab, facts.n_ctx_train) == (64, N_VOCAB, 1024)
    assert facts.allowed_cuts == (1, 2, 3, 4, 5)
    assert (facts.kv_widths, facts.head_widths) == ((2 * (16 + 16),) * 6, (16, 16))
    assert facts.embedding_bytes == N_VOCAB * 64 // 32 * 34
    assert facts.head_bytes == facts.embedding_bytes + 64 * 4
    padding = facts.file_bytes - sum(facts.layer_bytes) - facts.embedding_bytes - facts.head_bytes
    assert 0 < padding < 20_000  # the header


def test_facts_of_a_tied_model_count_the_embedding_twice(tmp_path: Path) -> None:
    facts = read_model_facts(TinyModel("qwen3", is_tied=True).write(tmp_path / "tied.gguf"))
    assert facts.head_bytes == facts.embedding_bytes + 64 * 4


def test_facts_of_real_models(smollm2_path: Path, gemma3_path: Path) -> None:
    smollm2, gemma3 = read_model_facts(smollm2_path), read_model_facts(gemma3_path)
    assert (smollm2.n_layers, smollm2.n_embd, smollm2.n_vocab) == (30, 576, 49_152)
    assert (gemma3.n_layers, gemma3.n_embd, gemma3.n_vocab) == (18, 640, 262_144)
    # 3 KV heads of 64 + 64; 1 KV head of 256 + 256.
    assert smollm2.kv_widths == (384,) * 30
    assert gemma3.kv_widths == (512,) * 18
    assert (smollm2.has_windows, gemma3.has_windows) == (False, True)
    assert sum(smollm2.layer_bytes) + smollm2.head_bytes < smollm2.file_bytes


def test_per_layer_head_counts(tmp_path: Path) -> None:
    model = TinyModel("llama", n_layers=4)
    path = model.write(tmp_path / "varied.gguf", arrays={"llama.attention.head_count_kv": [2, 1, 4, 0]})
    assert read_model_facts(path).kv_widths == (64, 32, 128, 0)


@pytest.mark.parametrize("entry", ["x", math.nan, math.inf, 1.5])
def test_lists_of_something_else_are_no_counts(tmp_path: Path, entry: Any) -> None:
    key = "llama.attention.head_count_kv"
    path = TinyModel("llama", n_layers=2).write(tmp_path / "odd.gguf", arrays={key: [entry, entry]})
    with pytest.raises(InvalidModel, match=f"'{key}' lists {entry!r}, need integers"):
        read_model_facts(path)


@pytest.mark.parametrize("content", [b"", b"GG", b"PK\x03\x04 a zip file", b"\x89PNG\r\n\x1a\n" * 10])
def test_not_a_gguf(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "other.gguf"
    path.write_bytes(content)
    with pytest.raises(InvalidModel, match=re.escape(f"{path} is not a GGUF file")):
        read_model_facts(path)


def test_no_file(tmp_path: Path) -> None:
    with pytest.raises(InvalidModel, match=r"absent\.gguf cannot be read: No such file"):
        read_model_facts(tmp_path / "absent.gguf")
    with pytest.raises(InvalidModel, match="cannot be read: Is a directory"):
        read_model_facts(tmp_path)


def test_a_pipe_is_not_waited_for(tmp_path: Path) -> None:
    path = tmp_path / "pipe.gguf"
    os.mkfifo(path)
    with pytest.raises(InvalidModel, match="no regular file"):
        read_header(path)


@pytest.mark.parametrize("kept_bytes", [4, 8, 24, 30, 100, 2_000, 9_000])
def test_truncated_header(tiny: Path, tmp_path: Path, kept_bytes: int) -> None:
    path = tmp_path / "short.gguf"
    path.write_bytes(tiny.read_bytes()[:kept_bytes])
    with pytest.raises(
        InvalidModel, match=f"short.gguf is truncated: {kept_bytes} bytes end inside the header"
    ):
        read_model_facts(path)


def test_truncated_tensor_data(tiny: Path, tmp_path: Path) -> None:
    path = tmp_path / "short.gguf"
    path.write_bytes(tiny.read_bytes()[:-1_000])
    with pytest.raises(
        InvalidModel, match=r"truncated: tensor 'blk\.5\.\S+' ends at byte \d+, the file has \d+"
    ):
        read_model_facts(path)


@pytest.mark.parametrize(("version", "shown"), [(1, "version 1"), (4, "version 4"), (3 << 24, "big-endian")])
def test_other_versions(tiny: Path, tmp_path: Path, version: int, shown: str) -> None:
    path = damaged(tiny, tmp_path, b"GGUF\x03\x00\x00\x00", b"GGUF" + struct.pack("<I", version))
    with pytest.raises(InvalidModel, match=f"is a {shown} GGUF, need little-endian version 2 or 3"):
        read_model_facts(path)


@pytest.mark.parametrize(
    "name", ["token_embd.weight", "output_norm.weight", "blk.3.attn_q.weight", "blk.0.ffn_norm.weight"]
)
def test_missing_tensor(tmp_path: Path, name: str) -> None:
    path = TinyModel("llama").write(tmp_path / "gap.gguf", without=frozenset({name}))
    with pytest.raises(InvalidModel, match=rf"tensor '{re.escape(name)}' is missing"):
        read_model_facts(path)


def test_missing_layer(tmp_path: Path) -> None:
    names = frozenset(name for name in TinyModel("internlm2")._weights() if name.startswith("blk.2."))
    path = TinyModel("internlm2").write(tmp_path / "gap.gguf", without=names)
    with pytest.raises(InvalidModel, match="layer 2 of 6 has no tensors"):
        read_model_facts(path)


def test_more_layers_than_counted(tiny: Path, tmp_path: Path) -> None:
    key = b"llama.block_count" + struct.pack("<I", 4)
    path = damaged(tiny, tmp_path, key + struct.pack("<I", 6), key + struct.pack("<I", 5))
    with pytest.raises(InvalidModel, match="is of layer 5, the metadata count 5"):
        read_model_facts(path)


@pytest.mark.parametrize("count", [0, 7, 2**32 - 1])
def test_fewer_layers_than_counted(tiny: Path, tmp_path: Path, count: int) -> None:
    key = b"llama.block_count" + struct.pack("<I", 4)
    path = damaged(tiny, tmp_path, key + struct.pack("<I", 6), key + struct.pack("<I", count))
    with pytest.raises(
        InvalidModel, match=r"layer 6 of 7 has no|need at least 1|\d+ layers, but \d+ tensors"
    ):
        read_model_facts(path)


def test_missing_or_wrong_metadata(tiny: Path, tmp_path: Path) -> None:
    path = damaged(tiny, tmp_path, b"general.architecture", b"general.architectura")
    with pytest.raises(InvalidModel, match=r"'general\.architecture' is missing or an array, need a string"):
        read_model_facts(path)
    path = damaged(tiny, tmp_path, b"llama.context_length", b"llama.context_lengte")
    with pytest.raises(
        InvalidModel, match=r"'llama\.context_length' is missing or an array, need an integer"
    ):
        read_model_facts(path)


def test_embedding_of_another_width(tiny: Path, tmp_path: Path) -> None:
    key = b"llama.embedding_length" + struct.pack("<I", 4)
    path = damaged(tiny, tmp_path, key + struct.pack("<I", 64), key + struct.pack("<I", 65))
    with pytest.raises(
        InvalidModel, match=r"token_embd\.weight has shape \(64, 320\), expected \(65, vocabulary\)"
    ):
        read_model_facts(path)


def test_layers_for_multi_token_prediction_are_no_layers_of_stages(tmp_path: Path) -> None:
    path = TinyModel("qwen3").write(tmp_path / "mtp.gguf", integers={"qwen3.nextn_predict_layers": 1})
    facts = read_model_facts(path)
    plain = read_model_facts(TinyModel("qwen3").write(tmp_path / "plain.gguf"))
    assert (facts.n_layers, facts.n_prediction_layers) == (plain.n_layers - 1, 1)
    assert facts.layer_bytes == plain.layer_bytes[:-1]
    assert facts.file_bytes > sum(facts.layer_bytes)


@pytest.mark.parametrize("count", [6, 7])
def test_a_trunk_without_layers(count: int, tmp_path: Path) -> None:
    path = TinyModel("qwen3").write(tmp_path / "mtp.gguf", integers={"qwen3.nextn_predict_layers": count})
    with pytest.raises(InvalidModel, match=f"nextn_predict_layers is {count} of 6 layers"):
        read_model_facts(path)


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(position=st.integers(4, 12_000), noise=st.binary(min_size=1, max_size=9))
def test_noise_in_the_header_gives_a_model_or_a_clear_error(
    tiny: Path, tmp_path: Path, position: int, noise: bytes
) -> None:
    data = bytearray(tiny.read_bytes())
    data[position : position + len(noise)] = noise
    path = tmp_path / "noisy.gguf"
    path.write_bytes(data)
    try:
        outcome: SourceModel | ModelError = read_source(path)
    except (InvalidModel, UncuttableModel) as error:
        outcome = error
    if isinstance(outcome, ModelError):
        assert "\n" not in outcome.message
        assert "noisy.gguf" in outcome.message
    else:
        assert outcome.n_layers == len(outcome.layers)
