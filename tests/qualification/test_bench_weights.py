"""The proofs about weights, small: little memory, transfers that survive all harm, moves of what must."""

from __future__ import annotations

from random import Random
from typing import TYPE_CHECKING

from stages.layers import LayerRange
from tests.qualification.weights.rebalance import add_fourth_host
from tests.qualification.weights.slicing import measure_cutting
from tests.qualification.weights.transfer import disrupt_transfers
from tests.support.tiny_models import TinyModel

if TYPE_CHECKING:
    from pathlib import Path


async def test_a_sparse_model_is_cut_in_little_memory_and_a_harmed_transfer_ends_equal(
    tmp_path: Path,
) -> None:
    cutting = measure_cutting(tmp_path, 2**31, 2**24, seed=3)
    assert cutting.passed, cutting
    assert cutting.file_bytes > 0.9 * 2**31
    assert (tmp_path / "model.gguf").stat().st_blocks * 512 < 2**28
    model = TinyModel("llama", n_embd=256, n_ff=768, n_heads=8, head_size=32).write(tmp_path / "tiny.gguf")
    report = await disrupt_transfers(
        model, LayerRange(1, 6), tmp_path, num_kills=2, rate=4e6, random=Random(5)
    )
    assert report.passed, report


async def test_a_fourth_host_moves_what_changes_hands(tmp_path: Path) -> None:
    model = TinyModel("llama", n_layers=13, has_rope_factors=True).write(tmp_path / "model.gguf")
    moves = await add_fourth_host(model, tmp_path)
    assert [move.host for move in moves] == ["host1", "host2", "host3", "host4"]
    assert all(move.is_equal for move in moves)
    assert [move.sent_bytes for move in moves] == [move.changed_bytes for move in moves]
    # The newcomer has nothing; the others keep most of what they had.
    assert moves[3].sent_bytes == moves[3].stage_bytes
    assert sum(move.sent_bytes for move in moves) < 0.6 * sum(move.stage_bytes for move in moves)
