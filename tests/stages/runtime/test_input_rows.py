"""Rows in place of token ids at the first stage: a token's embedding gives what the token gives."""

from __future__ import annotations

import itertools
from contextlib import closing
from typing import TYPE_CHECKING

import numpy as np
import pytest

from spanmesh_proto.errors import InvalidWindow
from spanmesh_proto.row_ids import FIRST_ROW_ID
from stages.certification.certify import cut_stage
from stages.layers import LayerRange
from stages.runtime.spans import Span
from stages.runtime.stage_runtime import RuntimeOptions, StageRuntime
from tests.support.short_models import embedding_of, short_smollm2_path  # noqa: F401 - a fixture
from tests.support.tiny_families import TINY_FAMILIES

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from numpy.typing import NDArray

pytestmark = pytest.mark.model
TEXT = [int(token) for token in np.random.default_rng(5).integers(100, 40000, 40)]
OTHER = [int(token) for token in np.random.default_rng(6).integers(100, 40000, 40)]
PICTURE = range(8, 20)


@pytest.fixture(scope="module")
def embedding(short_smollm2_path: Path) -> NDArray[np.float32]:  # noqa: F811
    return embedding_of(short_smollm2_path)


def ids_of(tokens: Sequence[int]) -> list[int]:
    return [FIRST_ROW_ID + token for token in tokens]


def logits(runtime: StageRuntime, chunks: Sequence[Sequence[Span]]) -> list[NDArray[np.float32]]:
    return [rows for spans in chunks for rows in runtime.decode(spans)]


@pytest.mark.parametrize(("exact", "num_threads"), [(True, 1), (True, 2), (False, 1)])
def test_rows_of_tokens_compute_as_the_tokens_do(
    short_smollm2_path: Path,  # noqa: F811
    embedding: NDArray[np.float32],
    *,
    exact: bool,
    num_threads: int,
) -> None:
    """A picture within a text, while another text is computed with it or beside it."""
    options = RuntimeOptions(num_slots=2, ctx_size=64, exact=exact, num_threads=num_threads)
    start, stop = PICTURE.start, PICTURE.stop
    shown = TEXT[start:stop]
    wanted, given = (
        [
            [Span(0, 0, TEXT[:start]), Span(1, 0, OTHER[:5], None, 1)],
            [picture, Span(1, 5, OTHER[5:8], None, 3)],
            [Span(0, stop, TEXT[stop:], None, 7), Span(1, 8, OTHER[8:9], None, 1)],
        ]
        for picture in (
            Span(0, start, shown, None, 2),
            Span(0, start, ids_of(shown), embedding[shown], 2),
        )
    )
    with closing(StageRuntime(short_smollm2_path, options)) as runtime:
        expected = logits(runtime, wanted)
    with closing(StageRuntime(short_smollm2_path, options)) as runtime:
        found = logits(runtime, given)
    for one, other in zip(expected, found, strict=True):
        if exact:
            assert np.array_equal(one, other)
        else:
            np.testing.assert_allclose(one, other, atol=0.05)


def test_a_first_stage_hands_on_the_same_hidden_states(
    short_smollm2_path: Path,  # noqa: F811
    embedding: NDArray[np.float32],
    tmp_path: Path,
) -> None:
    path = tmp_path / "first.gguf"
    cut_stage(short_smollm2_path, LayerRange(0, 1), path)
    with closing(StageRuntime(path, RuntimeOptions(ctx_size=64, exact=True))) as runtime:
        (expected,) = runtime.decode([Span(0, 0, TEXT)])
        (found,) = runtime.decode([Span(0, 0, ids_of(TEXT), embedding[TEXT])])
    assert np.array_equal(expected, found)


def test_what_rows_add_to_deep_layers_passes_every_cut(tmp_path: Path) -> None:
    """DeepStack: rows are as wide as the embedding and an addition to each of the first layers' outputs."""
    family = TINY_FAMILIES["qwen3vl"]
    model = family.write(tmp_path / "model.gguf")
    num_rows, options = 24, RuntimeOptions(ctx_size=64, exact=True)
    rows = np.random.default_rng(1).normal(0, 1, (num_rows, 3 * family.n_embd)).astype(np.float32)
    answer = list(range(20, 29))

    def logits_of(cuts: Sequence[int], rows: NDArray[np.float32]) -> NDArray[np.float32]:
        hidden: list[NDArray[np.float32] | None] = [rows, None]
        for layers in itertools.pairwise((0, *cuts, family.n_layers)):
            path = tmp_path / f"{layers}.gguf"
            if not path.exists():
                cut_stage(model, LayerRange(*layers), path)
            with closing(StageRuntime(path, options)) as stage:
                last = stage.info.is_tail
                for part, (start, ids) in enumerate(((0, ids_of(range(num_rows))), (num_rows, answer))):
                    span = Span(0, start, ids, hidden[part], len(ids) if last else 0)
                    hidden[part] = stage.decode([span])[0]
        return np.concatenate([each for each in hidden if each is not None])

    expected = logits_of((), rows)
    for cuts in (*((cut,) for cut in family.cuts), family.cuts):
        assert np.array_equal(logits_of(cuts, rows), expected), cuts
    for addition in range(2):
        changed = rows.copy()
        changed[0, (1 + addition) * family.n_embd] += 1
        assert not np.array_equal(logits_of((), changed), expected)


def test_rows_that_would_end_the_process_are_refused(tmp_path: Path) -> None:
    path = TINY_FAMILIES["glm4moe"].write(tmp_path / "model.gguf")
    with closing(StageRuntime(path, RuntimeOptions(ctx_size=64))) as runtime:
        rows = np.zeros((2, TINY_FAMILIES["glm4moe"].n_embd), np.float32)
        with pytest.raises(InvalidWindow, match=r"llama\.cpp takes token ids only of this model"):
            runtime.decode([Span(0, 0, ids_of([1, 2]), rows)])
        assert np.isfinite(runtime.decode([Span(0, 0, [20, 21, 22], None, 1)])[0]).all()


@pytest.mark.parametrize(
    ("tokens", "width", "reason"),
    [
        (ids_of([1, 2]), None, f"token {FIRST_ROW_ID + 1} is outside the vocabulary of 49152"),
        ([5, 49152], 576, "token 49152 is outside the vocabulary of 49152"),
        (ids_of([1, 2]), 575, r"hidden states have shape \(2, 575\); expected \(2, 576\)"),
    ],
)
def test_rows_that_do_not_fit_are_refused(
    short_smollm2_path: Path,  # noqa: F811
    tokens: list[int],
    width: int | None,
    reason: str,
) -> None:
    hidden = None if width is None else np.zeros((len(tokens), width), np.float32)
    with (
        closing(StageRuntime(short_smollm2_path, RuntimeOptions(ctx_size=64))) as runtime,
        pytest.raises(InvalidWindow, match=reason),
    ):
        runtime.decode([Span(0, 0, tokens, hidden)])
