"""Blocks over cut models in exact mode: token for token those of llama.cpp on whole ones."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import llama_cpp
import numpy as np
import pytest

from mesh.draft.drafter import loadable_file, read_drafter
from mesh.draft.loading import SETUP
from speculative.draft.block_context import BlockContext
from speculative.draft.block_sequence import BlockSpan
from speculative.draft.context import DraftFile, DraftOptions, DraftOutput, DraftUnusable, SlotRows
from speculative.proposer import DrafterKind
from stages.runtime.llama import init_backend
from stages.slicing.model_facts import read_model_facts
from tests.support.block_cases import CASES, first_lines, recorded
from tests.support.block_drafters import BlockDrafter
from tests.support.draft_oracle import OracleMissing, build_draft_oracle
from tests.support.tiny_models import N_VOCAB, TinyModel

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = pytest.mark.model

KINDS = (DrafterKind.DFLASH, DrafterKind.DSPARK, DrafterKind.DFLASH2)
NUM_READ = 10
DRAW = np.random.default_rng(5)
FEATURES = DRAW.normal(size=(64, 3 * 64)).astype(np.float32)


@pytest.fixture(autouse=True, scope="module")
def exact() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GGML_CPU_TILED_MM", "0")
        init_backend()
        yield


@pytest.mark.parametrize("name", CASES)
def test_drafts_are_those_recorded_of_llama_cpp(name: str, tmp_path: Path) -> None:
    assert [first_lines(rounds) for rounds in CASES[name].ours(tmp_path)] == recorded()[name]


@pytest.mark.sweep
@pytest.mark.parametrize("name", CASES)
def test_drafts_are_those_of_llama_cpp(name: str, tmp_path: Path) -> None:
    try:
        program = build_draft_oracle()
    except OracleMissing as missing:
        pytest.skip(str(missing))
    ours, theirs = CASES[name].ours(tmp_path), CASES[name].theirs(tmp_path, program)
    assert sum(map(len, theirs)) >= 80
    assert ours == theirs


@contextlib.contextmanager
def context_of(folder: Path, drafter: BlockDrafter, **options: Any) -> Iterator[BlockContext]:
    target = TinyModel("qwen3", seed=3).write(folder / "target.gguf")
    path = drafter.write(target, folder / "drafter.gguf")
    found = read_drafter(path, read_model_facts(target))
    file = DraftFile(
        found.kind,
        loadable_file(found, target, folder),
        DraftOptions(ctx_size=128, **options),
        N_VOCAB,
        found.feature_width,
    )
    with contextlib.closing(BlockContext(file, SETUP)) as context:
        yield context


def span(start: int, stop: int, num_drafted: int, *, is_anew: bool = False) -> BlockSpan:
    """Rows of these tokens, and a block behind them."""
    return BlockSpan(
        start,
        tuple(range(start, stop)),
        FEATURES[start - 1 : stop - 1],
        None,
        has_output=num_drafted > 0,
        is_anew=is_anew,
        num_drafted=num_drafted,
    )


def drafted(context: BlockContext, *parts: tuple[int, BlockSpan]) -> list[DraftOutput]:
    outputs = context.decode([SlotRows(*part) for part in parts], contextlib.nullcontext())
    assert outputs is not None
    return [output for output in outputs if output is not None]


def same(left: DraftOutput, right: DraftOutput) -> bool:
    return np.array_equal(left.values, right.values)


@pytest.mark.parametrize("kind", KINDS)
def test_a_block_leaves_nothing_behind(kind: DrafterKind, tmp_path: Path) -> None:
    with context_of(tmp_path, BlockDrafter(kind)) as context:
        [first] = drafted(context, (0, span(1, NUM_READ, 5, is_anew=True)))
        memory = llama_cpp.llama_get_memory(context._context)
        assert llama_cpp.llama_memory_seq_pos_max(memory, 0) == NUM_READ - 2
        [again] = drafted(context, (0, span(NUM_READ - 1, NUM_READ, 5)))
        assert same(first, again)


@pytest.mark.parametrize("kind", KINDS)
def test_pieces_say_what_the_whole_says(kind: DrafterKind, tmp_path: Path) -> None:
    with context_of(tmp_path, BlockDrafter(kind), num_sessions=2) as context:
        [whole] = drafted(context, (0, span(1, NUM_READ, 6, is_anew=True)))
        drafted(context, (1, span(1, 5, 0, is_anew=True)))
        drafted(context, (1, span(5, 8, 3)))
        [pieces] = drafted(context, (1, span(8, NUM_READ, 6)))
        assert same(whole, pieces)


@pytest.mark.parametrize("kind", KINDS)
def test_sessions_with_blocks_of_other_lengths_say_what_each_says_alone(
    kind: DrafterKind, tmp_path: Path
) -> None:
    spans = [span(1, 6, 3, is_anew=True), span(1, 9, 6, is_anew=True), span(1, 8, 3, is_anew=True)]
    with context_of(tmp_path, BlockDrafter(kind), num_sessions=4) as context:
        alone = [drafted(context, (slot, each))[0] for slot, each in enumerate(spans)]
        alone = [output._replace(values=output.values.copy()) for output in alone]
        for slots in ((0, 1, 2), (3, 1, 0)):
            together = drafted(context, *zip(slots, spans, strict=True))
            assert all(map(same, alone, together))
            assert [len(output.values) for output in together] == [3, 6, 3]


def test_a_copied_session_goes_on_from_its_first_tokens(tmp_path: Path) -> None:
    with context_of(tmp_path, BlockDrafter(), num_sessions=2) as context:
        drafted(context, (0, span(1, 20, 0, is_anew=True)))
        context.copy(0, 1, 12)
        memory = llama_cpp.llama_get_memory(context._context)
        assert llama_cpp.llama_memory_seq_pos_max(memory, 1) == 10
        [copied] = drafted(context, (1, span(12, 16, 6)))
        [whole] = drafted(context, (0, span(1, 16, 6, is_anew=True)))
        assert same(copied, whole)
        context.copy(0, 1, 1)
        assert llama_cpp.llama_memory_seq_pos_max(memory, 1) == -1


def test_many_sessions_are_drafted_in_several_batches(tmp_path: Path) -> None:
    with context_of(tmp_path, BlockDrafter(block_size=16), num_sessions=12, draft_max=15) as context:
        spans = [span(1, 4 + slot, 15, is_anew=True) for slot in range(12)]
        alone = [drafted(context, (slot, each))[0].values.copy() for slot, each in enumerate(spans)]
        together = [output.values for output in drafted(context, *enumerate(spans))]
        assert all(np.array_equal(*pair) for pair in zip(alone, together, strict=True))


def test_an_aborted_decode_leaves_a_cache_that_can_go_on(tmp_path: Path) -> None:
    with context_of(tmp_path, BlockDrafter()) as context:
        [before] = drafted(context, (0, span(1, NUM_READ, 6, is_anew=True)))
        context.abort()
        assert context.decode([SlotRows(0, span(1, 20, 6, is_anew=True))], contextlib.nullcontext()) is None
        context.resume()
        [again] = drafted(context, (0, span(1, NUM_READ, 6, is_anew=True)))
        assert same(before, again)


def test_features_behind_a_gap_are_refused(tmp_path: Path) -> None:
    with context_of(tmp_path, BlockDrafter()) as context:
        drafted(context, (0, span(1, 5, 0, is_anew=True)))
        with pytest.raises(DraftUnusable, match=r"llama.cpp returns -1"):
            drafted(context, (0, span(8, 10, 4)))


@pytest.mark.parametrize(
    ("kind", "draft_max", "most_drafted"),
    [
        (DrafterKind.DFLASH, 8, 7),
        (DrafterKind.DFLASH, 4, 4),
        (DrafterKind.DSPARK, 16, 8),
        (DrafterKind.DFLASH2, 16, 7),
    ],
)
def test_blocks_are_no_longer_than_trained_or_wanted(
    kind: DrafterKind, draft_max: int, most_drafted: int, tmp_path: Path
) -> None:
    with context_of(tmp_path, BlockDrafter(kind), draft_max=draft_max) as context:
        assert context.most_drafted == most_drafted
        assert context.timed_span(0, context).num_drafted == most_drafted


def test_a_lattice_is_walked_by_the_tokens_that_were_chosen() -> None:
    # Candidates 4 and 7, then 1 and 9: behind 4 the first of them is likelier, behind 7 the second.
    rows = np.array([[4, 7, 0.5, 0.1, 0.5, 0.1], [1, 9, 3, 0, 0, 2]], np.float32)
    output = DraftOutput(rows, num_candidates=2)
    first = output.logits(0, 5, 12)
    assert {token: float(first[token]) for token in np.flatnonzero(np.isfinite(first))} == {
        4: 0.5,
        7: pytest.approx(0.1),
    }
    assert int(output.logits(1, 4, 12).argmax()) == 1
    assert int(output.logits(1, 7, 12).argmax()) == 9
    # What is no candidate, or no token, changes nothing.
    assert int(output.logits(1, 11, 12).argmax()) == 1
    assert np.isneginf(output.logits(1, 4, 9)[2:]).all()
