"""Images in families of every kind: stages compute the bits of llama.cpp's own evaluation of the whole."""

from __future__ import annotations

import itertools
from contextlib import ExitStack, closing
from typing import TYPE_CHECKING

import numpy as np
import pytest

from spanmesh_proto.errors import InvalidWindow, UncuttableModel
from stages.runtime.kv_state import KvRows
from stages.runtime.spans import Span
from stages.runtime.stage_runtime import RuntimeOptions, StageRuntime
from stages.slicing.source_model import read_source
from tests.support.stage_chain import ANSWER, Stages
from tests.support.tiny_vision import (
    HYBRID,
    MOST_AT_ONCE,
    MROPE,
    SEE_ALL,
    Part,
    WholeModel,
    chunks_of,
    image,
    positions_of,
    text,
    write_vision,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from numpy.typing import NDArray


pytestmark = pytest.mark.model
QUICK = ("llama", "gemma3", "qwen3vl", "qwen35", "granite", "gemma4-e")
OTHERS = (
    *("qwen3moe", "gpt-oss", "phi3", "gemma4", "deepseek2", "glm4v", "falcon-h1", "granitehybrid"),
    *("nemotron_h", "llama4", "cogvlm"),
)
ALL = (*QUICK, *(pytest.param(name, marks=pytest.mark.sweep) for name in OTHERS))

SLIDING = {"gemma3", "gemma4", "gemma4-e", "gpt-oss"}


def assert_same(found: list[NDArray[np.float32]], expected: list[NDArray[np.float32]], what: object) -> None:
    for one, other in zip(found, expected, strict=True):
        assert np.array_equal(one.view(np.uint32), other.view(np.uint32)), what


def prompts(name: str) -> tuple[list[Part], list[Part]]:
    """Two prompts that are the same up to the second image."""
    lines = 8 if name == "gemma4" else 3
    start = [text(1, 9), image(name, 5, lines, 4), text(2, 7)]
    return (
        [*start, image(name, 6, 2, 5), text(3, 6)],
        [*start, image(name, 7, 2, 5), text(4, 8)],
    )


def options_of(name: str, num_threads: int = 1) -> RuntimeOptions:
    return RuntimeOptions(
        num_slots=2,
        ctx_size=160,
        exact=True,
        num_checkpoints=4 if name in HYBRID else 0,
        most_at_once=MOST_AT_ONCE if name in SEE_ALL else 0,
        num_threads=num_threads,
    )


@pytest.mark.parametrize("name", ALL)
def test_every_cut_gives_the_bits_of_the_whole_model(name: str, tmp_path: Path) -> None:
    model = write_vision(name, tmp_path / "model.gguf")
    one, other = prompts(name)
    options = options_of(name)
    with closing(WholeModel(model, options)) as whole:
        expected, unlike = whole.logits(one, ANSWER), whole.logits(other, ANSWER)
        turned = whole.logits([*one[:3], image(name, 6, 5, 2), *one[4:]], ANSWER)
    assert not np.array_equal(expected[0], unlike[0])
    # Where positions have parts, or rows see all, the shape of an image counts.
    assert np.array_equal(expected[0], turned[0]) == (name not in MROPE)
    allowed = read_source(model).allowed_cuts
    assert allowed
    for cuts in ((), *((cut,) for cut in allowed), allowed):
        with closing(Stages(model, cuts, options)) as stages:
            assert_same(stages.run(one), expected, cuts)
            # Another image in the slot, then the first again, in short windows.
            assert_same(stages.run(other, window=5), unlike, cuts)
            assert_same(stages.run(one, slot=1, window=4), expected, cuts)


@pytest.mark.parametrize("name", ALL)
def test_slots_go_back_and_on_behind_an_image(name: str, tmp_path: Path) -> None:
    """Another second image, in the slot itself, in a copy of it, and in new stages with its rows."""
    model = write_vision(name, tmp_path / "model.gguf")
    one, other = prompts(name)
    options = options_of(name)
    with closing(WholeModel(model, options)) as whole:
        expected = whole.logits(other, ANSWER)
    behind = sum(len(part.ids) for part in one[:2])
    cut = read_source(model).allowed_cuts[-1]
    with ExitStack() as stack:
        stages, fresh = (stack.enter_context(closing(Stages(model, (cut,), options))) for _ in range(2))
        if name in HYBRID:
            _run_to_checkpoint(stages, one, behind)
        else:
            stages.run(one)
            for runtime in stages.runtimes:
                runtime.memory.copy(0, 1, behind)
            assert_same(stages.run(other, slot=1, start=behind), expected, "copied")
        states = [
            runtime.memory.state_at(0, behind) if name in HYBRID else None for runtime in stages.runtimes
        ]
        # Of windows that have begun to slide the first rows are gone.
        saved = [] if name in SLIDING else [runtime.memory.kv_rows(0) for runtime in stages.runtimes]
        assert_same(stages.run(other, start=behind), expected, "gone back")
        if not saved:
            return
        # In two pieces, of which one ends within the image.
        within = behind - 5
        for runtime, rows, state in zip(fresh.runtimes, saved, states, strict=True):
            for first, last in ((0, within), (within, behind)):
                piece = rows.cut(first, last).to_bytes()
                is_plain = KvRows.without_caches(first, last, np.frombuffer(piece, np.uint8))
                runtime.memory.put_kv_rows(0, is_plain or KvRows.from_bytes(piece, first), state)
        if name not in HYBRID:
            # Back before it is known where images lie, as a replica goes when it follows a rejection.
            for runtime, own in zip(fresh.runtimes, stages.runtimes, strict=True):
                runtime.memory.put_kv_rows(0, own.memory.kv_rows(0))
                runtime.memory.trim(0, behind)
                assert runtime.memory.kv_rows(0).stop == behind
            assert_same(fresh.run(other, start=behind), expected, "brought and gone back")
            for runtime in fresh.runtimes:
                runtime.memory.trim(0, 0)
            # More than a session wants, to be copied before its own has begun.
            for runtime, own in zip(fresh.runtimes, stages.runtimes, strict=True):
                runtime.memory.put_kv_rows(0, own.memory.kv_rows(0))
                runtime.memory.copy(0, 1, behind, positions_of(one))
            assert_same(fresh.run(other, slot=1, start=behind), expected, "copied from what was brought")
            for runtime in fresh.runtimes:
                runtime.memory.trim(0, 0)
                runtime.memory.copy(1, 0, behind)
        assert_same(fresh.run(other, start=behind), expected, "brought")


def _run_to_checkpoint(stages: Stages, parts: Sequence[Part], behind: int) -> None:
    """The prompt, with a checkpoint behind its first image."""
    stages.begin(0, 0, positions_of(parts))
    row = 0
    for part in parts:
        checkpoints = (behind,) if row == behind else ()
        stages.compute(0, row, part.ids, part.rows, num_outputs=0, checkpoints=checkpoints)
        row += len(part.ids)


@pytest.mark.parametrize("name", ["gemma3", "qwen3vl"])
def test_other_sessions_may_compute_between_windows_of_an_image(name: str, tmp_path: Path) -> None:
    """And together with them, where they share a batch; with two threads as with one."""
    model = write_vision(name, tmp_path / "model.gguf")
    one, _ = prompts(name)
    with closing(WholeModel(model, options_of(name))) as whole:
        expected = whole.logits(one, ANSWER)
    with closing(Stages(model, (3,), options_of(name, 2))) as stages:

        def others() -> Iterator[None]:
            for row in itertools.count():
                stages.compute(1, row, [30 + row], num_outputs=1)
                yield

        assert_same(stages.run(one, window=5, between=others()), expected, "between")


def test_rows_that_see_all_differ_if_they_are_divided(tmp_path: Path) -> None:
    model = write_vision("gemma3", tmp_path / "model.gguf")
    one, _ = prompts("gemma3")
    causal = [Part(part.tokens, part.rows) for part in one]
    options = options_of("gemma3")
    with closing(Stages(model, (3,), options)) as stages:
        seen = stages.run(one)
        assert not np.array_equal(stages.run(causal)[0], seen[0])
        # The switch of attention is back: what follows is causal again.
        assert_same(stages.run(one), seen, "again")


@pytest.mark.parametrize("name", ["gemma3", "qwen3vl"])
def test_no_slot_goes_back_into_an_image(name: str, tmp_path: Path) -> None:
    model = write_vision(name, tmp_path / "model.gguf")
    one, _ = prompts(name)
    (first, second), end = chunks_of(one), sum(len(part.ids) for part in one)
    assert one[1].rows is not None
    rows = one[1].rows[2:]
    with closing(StageRuntime(model, options_of(name))) as runtime:
        runtime.memory.lay_out(0, 0, positions_of(one))
        row = 0
        for part in one:
            runtime.decode([Span(0, row, list(part.ids), part.rows)])
            row += len(part.ids)
        memory = runtime.memory
        within = range(first.first_row + 1, first.stop)
        assert not any(memory.can_go_back(0, each) for each in within)
        assert memory.latest_return(0, 0, first.stop - 1) == first.first_row
        assert memory.latest_return(0, first.first_row + 1, first.stop - 1) is None
        with pytest.raises(UncuttableModel, match="cannot go back to position 11, within an image"):
            memory.trim(0, first.first_row + 2)
        assert memory.length(0) == end
        with pytest.raises(InvalidWindow, match=r"divides the image|to which slot 0 cannot go back"):
            runtime.decode([Span(0, first.first_row + 2, list(one[1].ids[2:]), rows)])
        memory.trim(0, second.first_row)
        assert memory.length(0) == second.first_row


def test_images_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    model = write_vision("gemma3", tmp_path / "model.gguf")
    seen = image("gemma3", 1, 9, 9)
    with closing(StageRuntime(model, options_of("gemma3"))) as runtime:
        runtime.memory.lay_out(0, 0, positions_of([seen]))
        with pytest.raises(InvalidWindow, match="a window has 81 rows; this stage takes 1 to 80"):
            runtime.decode([Span(0, 0, list(seen.ids), seen.rows)])
        lined = image("qwen3vl", 1, 2, 2, width=64)
        runtime.memory.lay_out(0, 0, positions_of([lined]))
        with pytest.raises(
            InvalidWindow, match="an image has columns, but positions of this model have one part"
        ):
            runtime.decode([Span(0, 0, list(lined.ids), lined.rows)])
    with closing(StageRuntime(model, RuntimeOptions(ctx_size=160, exact=True))) as runtime:
        runtime.memory.lay_out(0, 0, positions_of([seen]))
        with pytest.raises(InvalidWindow, match="a window has 81 rows; this stage takes 1 to 63"):
            runtime.decode([Span(0, 0, list(seen.ids), seen.rows)])


def test_a_stage_that_embeds_again_wants_the_rows_of_an_image_as_well(tmp_path: Path) -> None:
    model = write_vision("gemma4-e", tmp_path / "model.gguf")
    one, _ = prompts("gemma4-e")
    options = options_of("gemma4-e")
    with closing(Stages(model, (3,), options)) as stages:
        first, second = stages.runtimes
        assert (first.takes_rows, first.hands_on_rows) == (True, True)
        assert (second.takes_rows, second.hands_on_rows) == (True, False)
        expected = stages.run(one)
        stages.begin(0, 9, positions_of(one))
        ids, rows = list(one[1].ids), one[1].rows
        assert rows is not None
        (hidden,) = first.decode([Span(0, 9, ids, rows)])
        for embedded in (None, rows[1:], np.zeros((len(ids), 63), np.float32)):
            with pytest.raises(InvalidWindow, match="use the embedding again: rows that are no tokens came"):
                second.decode([Span(0, 9, ids, hidden, embedded=embedded)])
        # They count: others give other logits, as another image does.
        behind = []
        for embedded in (rows, rows[::-1].copy(), rows):
            second.decode([Span(0, 9, ids, hidden, embedded=embedded)])
            behind.append(stages.compute(0, 21, one[2].ids, num_outputs=1))
        assert np.array_equal(behind[0], behind[2])
        assert not np.array_equal(behind[0], behind[1])
        assert_same(stages.run(one), expected, "again")
