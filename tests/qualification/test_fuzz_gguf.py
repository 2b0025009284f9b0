"""A short run of `mesh bench fuzz --gguf`, and the bounds that it asked for."""

from __future__ import annotations

import struct
from random import Random
from typing import TYPE_CHECKING

import pytest

from spanmesh_proto.errors import InvalidModel
from stages.slicing.model_facts import read_model_facts
from stages.slicing.tensor_names import layer_of
from tests.qualification.fuzz.gguf_fuzz import (
    fuzz_ggufs,
    hostile_files,
    small_layout,
    try_model,
    write_layout,
)
from tests.qualification.fuzz.isolated_trial import trials
from tests.qualification.fuzz.report import FuzzOptions

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.model
def test_damaged_files_load_or_are_refused_with_a_reason(smollm2_path: Path, tmp_path: Path) -> None:
    report = fuzz_ggufs(FuzzOptions(10, 4, smollm2_path, tmp_path))
    assert report.is_good
    assert report.num_cases == 10
    assert report.outcomes["InvalidModel (reading)"] > 2
    assert report.outcomes["loaded"] > 0


@pytest.mark.model
def test_what_a_file_makes_its_reader_do_is_told_apart(
    smollm2_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "small.gguf"
    write_layout(smollm2_path, small_layout(smollm2_path, num_layers=2, num_tokens=1024), path)
    assert read_model_facts(path).n_layers == 2
    context = trials()
    assert try_model(context, path, tmp_path).step == "done"
    refused = try_model(context, tmp_path, tmp_path)
    assert (refused.step, refused.error) == ("reading", "InvalidModel")
    # Not an error of ours, and therefore told with its traceback.
    unforeseen = try_model(context, path, str(tmp_path))  # type: ignore[arg-type]
    assert (unforeseen.step, unforeseen.error) == ("cutting", None)
    assert "TypeError" in (unforeseen.raised or "")
    monkeypatch.setattr("tests.qualification.fuzz.isolated_trial._PATIENCE_S", 0.0)
    assert try_model(context, path, tmp_path).is_hung


def test_the_seed_decides(smollm2_path: Path, tmp_path: Path) -> None:
    layout = small_layout(smollm2_path, num_layers=1, num_tokens=64)
    path = tmp_path / "small.gguf"
    write_layout(smollm2_path, layout, path)
    good = path.read_bytes()
    first, second = (hostile_files(good, layout, Random(5)) for _ in range(2))
    assert [next(first) for _ in range(20)] == [next(second) for _ in range(20)]


def gguf(num_tensors: int, num_keys: int, rest: bytes) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", 3, num_tensors, num_keys) + rest


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (gguf(2**63, 0, bytes(10_000)), "end inside the header"),
        (gguf(0, 2**64 - 1, bytes(10_000)), "end inside the header"),
        (gguf(300, 300, bytes(10_000)), "end inside the header"),
        (gguf(0, 1, struct.pack("<Q", 65_536) + bytes(70_000)), "a name of 65536 bytes"),
        (gguf(0, 2, bytes(10_000)), "metadata key '' is in the file twice"),
    ],
)
def test_counts_and_lengths_are_bounded_before_anything_is_allocated(
    tmp_path: Path, content: bytes, reason: str
) -> None:
    path = tmp_path / "lying.gguf"
    path.write_bytes(content)
    with pytest.raises(InvalidModel, match=reason):
        read_model_facts(path)


def test_a_layer_s_number_of_5000_digits_is_no_layer() -> None:
    assert layer_of("blk.12.attn_q.weight") == 12
    assert layer_of("blk." + "9" * 5000 + ".attn_q.weight") is None
