"""Which block drafters fit a model, what is refused and why, and what loads in a process of its own."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from mesh.draft.drafter import Drafter, loadable_file, read_drafter
from mesh.draft.loading import load_drafter
from mesh.draft.memory import drafter_bytes
from mesh.text.tokenizer import Tokenizer
from spanmesh_proto.errors import InvalidModel, UncuttableModel
from speculative.draft.context import DraftOptions
from speculative.proposer import DrafterKind
from stages.gguf import read_header
from stages.slicing.model_facts import read_model_facts
from tests.support.block_drafters import BlockDrafter
from tests.support.changed_drafters import write_changed
from tests.support.tiny_models import TinyModel

if TYPE_CHECKING:
    from pathlib import Path

    from stages.slicing.model_facts import ModelFacts

pytestmark = pytest.mark.model

KINDS = (DrafterKind.DFLASH, DrafterKind.DSPARK, DrafterKind.DFLASH2)
MASK = "tokenizer.ggml.mask_token_id"
OPTIONS = DraftOptions(ctx_size=64)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> ModelFacts:
    return read_model_facts(TinyModel("qwen3").write(tmp_path_factory.mktemp("target") / "target.gguf"))


def drafter_of(target: ModelFacts, folder: Path, drafter: BlockDrafter) -> Drafter:
    return read_drafter(drafter.write(target.path, folder / "drafter.gguf"), target)


@pytest.mark.parametrize(
    ("shape", "most_drafted"),
    [
        (BlockDrafter(), 7),
        (BlockDrafter(block_size=16), 15),
        (BlockDrafter(DrafterKind.DSPARK), 8),
        (BlockDrafter(DrafterKind.DSPARK, samples_anchor=False), 7),
        (BlockDrafter(DrafterKind.DFLASH2), 7),
    ],
)
def test_a_drafter_says_what_it_is(
    shape: BlockDrafter, most_drafted: int, target: ModelFacts, tmp_path: Path
) -> None:
    drafter = drafter_of(target, tmp_path, replace(shape, reads=(2, 1, 5)))
    assert (drafter.kind, drafter.layers, drafter.n_embd) == (shape.kind, (1, 0, 4), 64)
    assert (drafter.most_drafted, drafter.num_drafting_layers, drafter.lacks) == (most_drafted, 2, ())


@pytest.mark.parametrize(
    ("shape", "values", "message"),
    [
        (BlockDrafter(), {"target_layers": [1, 6]}, "before layers 1, 6, of which .* has 1 to 5"),
        (BlockDrafter(), {"target_layers": [0, 3]}, "before layers 0, 3, of which"),
        (BlockDrafter(), {"target_layers": [3, 3]}, "before layers 3, 3, of which .*, each once"),
        (BlockDrafter(), {"target_layers": None}, "before layers that it does not list"),
        (
            BlockDrafter(),
            {"embedding_length": 128},
            "of 128 values, .* has 64: it was made for another model",
        ),
        (BlockDrafter(), {MASK: None}, "has no mask token"),
        (BlockDrafter(), {MASK: 320}, "has the mask token 320, and .* 320 tokens"),
        (BlockDrafter(), {"block_size": 1}, "drafts 0 tokens in blocks of 1 rows"),
        (BlockDrafter(), {"block_size": 66}, "drafts 65 tokens in blocks of 66 rows"),
        (BlockDrafter(), {"block_count": 0}, "has 0 layers"),
        (BlockDrafter(), {"block_count": 1 << 30}, "has 1073741824 layers"),
        (BlockDrafter(), {"attention.head_count": 0}, "has 0 attention heads"),
        (BlockDrafter(), {"attention.value_length": 8}, "keys of 16 values and values of 8"),
        (BlockDrafter(), {"rope.dimension_count": 3}, "rotates 3 of 16 values"),
        (BlockDrafter(), {"fc.weight": None}, "tensor fc.weight is missing"),
        (BlockDrafter(), {"target_layers": [1, 2]}, r"fc.weight has shape \(192, 64\), expected \(128, 64\)"),
        (BlockDrafter(), {"blk.1.attn_k_norm.weight": None}, "blk.1.attn_k_norm.weight is missing"),
        (BlockDrafter(), {"enc.output_norm.weight": None}, "enc.output_norm.weight is missing"),
        (
            BlockDrafter(num_own_tokens=96),
            {"output.weight": None},
            "96 tokens of its own but no output.weight",
        ),
        (BlockDrafter(num_own_tokens=96), {"d2t": np.full(96, 320)}, "d2t names token ids outside"),
        (BlockDrafter(num_own_tokens=96), {"d2t": None}, r"output.weight has shape \(64, 96\)"),
        (BlockDrafter(DrafterKind.DSPARK), {"markov_w2.weight": None}, "markov_w2.weight is missing"),
        (BlockDrafter(DrafterKind.DSPARK), {"conf_proj.weight": None}, "conf_proj.weight is missing"),
        (BlockDrafter(DrafterKind.DFLASH2), {"selector_top_k": 8}, "chooses among 8 candidates, too many"),
        (BlockDrafter(DrafterKind.DFLASH2), {"selector_top_k": 0}, "chooses among 0 candidates"),
        (BlockDrafter(DrafterKind.DFLASH2), {"selector_rank": 8}, "selector_predecessor.weight has shape"),
        (BlockDrafter(DrafterKind.DFLASH2), {"conv_group_size": 48}, "in groups of 48 of 64 values"),
        (BlockDrafter(DrafterKind.DFLASH2), {"blk.0.ffn_conv_base": None}, "blk.0.ffn_conv_base is missing"),
        (
            BlockDrafter(DrafterKind.DFLASH2),
            {"markov_w1.weight": np.zeros((320, 32), np.float32)},
            "has both markov_w1.weight and selector_hidden.weight",
        ),
    ],
)
def test_a_drafter_of_another_model_is_refused(
    shape: BlockDrafter, values: dict[str, Any], message: str, target: ModelFacts, tmp_path: Path
) -> None:
    good = shape.write(target.path, tmp_path / "good.gguf")
    bad = write_changed(good, tmp_path / "bad.gguf", values)
    with pytest.raises(InvalidModel, match=f"^bad.gguf.*{message}"):
        read_drafter(bad, target)


def test_layers_that_are_no_numbers_are_refused(target: ModelFacts, tmp_path: Path) -> None:
    good = BlockDrafter().write(target.path, tmp_path / "good.gguf")
    bad = write_changed(good, tmp_path / "bad.gguf", {"target_layers": ["x"]})
    with pytest.raises(InvalidModel, match=r"bad.gguf: .*'dflash.target_layers' lists 'x', need integers"):
        read_drafter(bad, target)


def test_streams_of_hidden_states_are_refused(target: ModelFacts, tmp_path: Path) -> None:
    good = BlockDrafter().write(target.path, tmp_path / "good.gguf")
    bad = write_changed(good, tmp_path / "bad.gguf", {"hyper_connection_count": 4})
    with pytest.raises(UncuttableModel, match=r"bad.gguf is a drafter for DeepSeek V4, whose streams"):
        read_drafter(bad, target)
    with pytest.raises(
        UncuttableModel, match=r"good.gguf cannot draft for .*: its hidden states have 4 streams"
    ):
        read_drafter(good, replace(target, n_streams=4))


@pytest.mark.parametrize("kind", KINDS)
def test_what_it_lacks_comes_from_the_target(kind: DrafterKind, target: ModelFacts, tmp_path: Path) -> None:
    drafter = drafter_of(target, tmp_path, BlockDrafter(kind, is_complete=False))
    assert drafter.lacks == ("token_embd.weight", "output.weight")
    path = loadable_file(drafter, target.path, tmp_path)
    assert read_drafter(path, target).lacks == ()
    assert read_header(path).tensors["output.weight"].shape == (64, 320)
    assert ms_per_token(drafter, target.path, tmp_path) > 0


def test_a_drafter_with_an_embedding_alone_uses_it_as_its_head(target: ModelFacts, tmp_path: Path) -> None:
    good = BlockDrafter().write(target.path, tmp_path / "good.gguf")
    tied = write_changed(good, tmp_path / "tied.gguf", {"output.weight": None})
    drafter = read_drafter(tied, target)
    assert drafter.lacks == ()
    assert ms_per_token(drafter, target.path, tmp_path) > 0


def test_memory_grows_with_layers_and_tokens_of_a_block(target: ModelFacts, tmp_path: Path) -> None:
    def num_bytes(shape: BlockDrafter, draft_max: int = 8) -> int:
        drafter = drafter_of(target, tmp_path, shape)
        options = DraftOptions(ctx_size=1024, draft_max=draft_max)
        return drafter_bytes(drafter, target.path, options, 512) - drafter.path.stat().st_size

    two, four = num_bytes(BlockDrafter(n_layers=2)), num_bytes(BlockDrafter(n_layers=4))
    # Keys and values of two heads of 16, in f16.
    assert four - two == 1024 * 2 * 2 * (2 * 16) * 2
    longer = num_bytes(BlockDrafter(block_size=16), draft_max=15)
    assert longer - num_bytes(BlockDrafter(block_size=16), draft_max=5) == 4 * 10 * 320


def ms_per_token(drafter: Drafter, target: Path, root: Path) -> float:
    """Load a drafter, and close it again."""
    with contextlib.closing(load_drafter(drafter, Tokenizer(target), OPTIONS, root=root)) as loaded:
        assert loaded.is_alive
        return loaded.draft_ms_per_token


def test_what_llama_cpp_cannot_load_ends_a_process_of_its_own(target: ModelFacts, tmp_path: Path) -> None:
    drafter = drafter_of(target, tmp_path, BlockDrafter(is_complete=False))
    with pytest.raises(InvalidModel, match=r"^drafter.gguf cannot draft: .* requires ctx_other"):
        ms_per_token(replace(drafter, lacks=()), target.path, tmp_path)
    good = BlockDrafter(DrafterKind.DSPARK).write(target.path, tmp_path / "good.gguf")
    aborting = write_changed(good, tmp_path / "aborting.gguf", {"block_size": None})
    with pytest.raises(InvalidModel, match=r"^llama.cpp aborts when it drafts with aborting.gguf"):
        ms_per_token(read_drafter(aborting, target), target.path, tmp_path)


def test_another_vocabulary_is_refused(target: ModelFacts, tmp_path: Path) -> None:
    good = BlockDrafter().write(target.path, tmp_path / "good.gguf")
    other = TinyModel("qwen3").write(tmp_path / "other.gguf", controls=("<|x|>",))
    with pytest.raises(InvalidModel, match=r"good.gguf cannot draft for other.gguf: token \d+ is "):
        ms_per_token(read_drafter(good, read_model_facts(other)), other, tmp_path)
