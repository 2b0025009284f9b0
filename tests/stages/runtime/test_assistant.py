"""An assistant beside the last stage: its drafts, and that the stage computes as without it."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from typing import TYPE_CHECKING

import llama_cpp
import numpy as np
import pytest

from spanmesh_proto.errors import InvalidModel, InvalidWindow, StageFailed
from stages.runtime.assistant import Assistant, DraftStart
from stages.runtime.spans import Span
from stages.runtime.stage_runtime import RuntimeOptions, StageRuntime
from tests.qualification.own_models import OWN_MODELS
from tests.support.assistant_files import write_assistant
from tests.support.assistant_rounds import AssistedModel, assisted_rounds, likeliest
from tests.support.scripted_rounds import Script
from tests.support.tiny_models import TinyModel

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from numpy.typing import NDArray

    Make = Callable[..., contextlib.closing[AssistedModel]]

OPTIONS = RuntimeOptions(num_slots=3, ctx_size=256, exact=True, has_reader=True)
NOISE = np.random.default_rng(7)
TEXTS = [[int(token) for token in NOISE.integers(3, 300, size)] for size in (45, 12, 27)]

greedy = likeliest(0.0)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("assistants")
    for kind in ("dense", "moe", "e"):
        OWN_MODELS[f"gemma4-{kind}"](2).write(folder / f"{kind}.gguf")
    write_assistant(folder / "assistant.gguf")
    return folder


@pytest.fixture
def model(folder: Path) -> Make:
    def make(
        *cuts: int, kind: str = "dense", options: RuntimeOptions = OPTIONS, assisted: bool = True
    ) -> contextlib.closing[AssistedModel]:
        assistant = folder / "assistant.gguf" if assisted else None
        path = folder / f"{kind}.gguf"
        return contextlib.closing(AssistedModel(path, assistant, cuts, folder / "stages", options))

    return make


def start_of(model: AssistedModel, slot: int, text: list[int], num_tokens: int = 4) -> DraftStart:
    """Compute a text without its newest token, behind which a draft begins."""
    _, states = model.compute(slot, 0, text[:-1])
    return DraftStart(slot, len(text) - 1, text[-1], states[-1], num_tokens)


def drafted(model: AssistedModel, *starts: DraftStart) -> list[tuple[int, ...]]:
    assert model.assistant is not None
    return model.assistant.draft(starts, greedy)


@pytest.mark.parametrize("kind", ["dense", "moe", "e"])
def test_drafts_do_not_depend_on_cuts_and_other_sessions(model: Make, kind: str) -> None:
    with model(kind=kind) as whole:
        expected = [assisted_rounds(whole, [text], Script(5, 12))[0] for text in TEXTS]
    for cuts in ((3,), (2, 4)):
        with model(*cuts, kind=kind) as cut:
            assert assisted_rounds(cut, TEXTS, Script(5, 12)) == expected
    assert len({each.drafted for own in expected for each in own}) > 8


def test_the_stage_computes_the_same_bits_beside_it(model: Make) -> None:
    def logits(cut: AssistedModel) -> NDArray[np.float32]:
        found = []
        for slot, text in enumerate(TEXTS):
            for first, stop in ((0, 7), (7, 10), (9, 10), (10, len(text))):
                rows, states = cut.compute(slot, first, text[first:stop])
                found.append(rows)
                if cut.assistant is not None:
                    assert drafted(cut, DraftStart(slot, stop, text[0], states[-1], 3))[0]
        return np.concatenate(found)

    with model(2, 4) as cut, model(2, 4, assisted=False) as plain:
        assert np.array_equal(logits(cut), logits(plain))


def test_rows_that_were_rejected_are_dropped_first(model: Make) -> None:
    text = TEXTS[0]
    with model(3) as cut:
        expected = drafted(cut, start_of(cut, 0, text))
        start = start_of(cut, 1, text)
        cut.compute(1, start.position, [9, 8, 7])
        assert drafted(cut, start) == expected
        assert cut.tail.memory.length(1) == start.position
        cut.compute(1, start.position, [9, 8, 7])
        assert drafted(cut, replace(start, position=start.position + 3, token=11)) != expected


def test_copied_rows_and_those_of_another_stage_are_read_alike(model: Make) -> None:
    text = TEXTS[0]
    with model(3) as cut, model(3) as other:
        start = start_of(cut, 0, text)
        expected = drafted(cut, start)
        cut.tail.memory.copy(0, 2, start.position)
        # llama.cpp copies at the next decode, which a session has before it drafts.
        cut.compute(1, 0, [5])
        assert drafted(cut, replace(start, slot=2)) == expected
        rows, windowed = cut.tail.memory.kv_rows_and_window(0)
        saved = np.frombuffer(rows.to_bytes(), np.uint8)
        other.tail.memory.put_saved(0, saved, rows.stop, windowed)
        assert drafted(other, start) == expected


def test_drafts_end_where_the_context_or_the_one_that_draws_ends_them(model: Make) -> None:
    with model(3, options=replace(OPTIONS, num_slots=1)) as cut:
        assert cut.assistant is not None
        start = start_of(cut, 0, TEXTS[0])
        assert cut.assistant.draft([start], lambda _index, count, _logits: 9 if count < 2 else None) == [
            (9, 9)
        ]
        assert drafted(cut, replace(start, num_tokens=0)) == [()]
        (longer,) = drafted(cut, replace(start, num_tokens=7))
        assert longer[:4] == drafted(cut, start)[0]
        assert len(longer) == 7
        full = TEXTS[0] * 6
        start = start_of(cut, 0, full[:256])
        assert len(drafted(cut, start)[0]) == 4
        logits, states = cut.compute(0, 255, [full[255]])
        assert drafted(cut, DraftStart(0, 256, 9, states[-1], 4)) == [()]
        again, _ = cut.compute(0, 255, [full[255]])
        assert np.array_equal(logits, again)


def test_each_draft_is_drawn_by_its_index_and_length(model: Make) -> None:
    drawn = []

    def draw(index: int, count: int, logits: NDArray[np.float32]) -> int:
        drawn.append((index, count))
        return greedy(index, count, logits) or 0

    with model(3) as cut:
        starts = [start_of(cut, slot, TEXTS[slot], count) for slot, count in ((2, 1), (0, 3))]
        together = cut.assistant.draft(starts, draw) if cut.assistant else []
        assert together == [drafted(cut, start)[0] for start in starts]
    assert drawn == [(0, 0), (1, 0), (1, 1), (1, 2)]


def test_what_a_draft_cannot_begin_behind_is_refused(model: Make) -> None:
    with model(3) as cut:
        start = start_of(cut, 0, TEXTS[1])
        with pytest.raises(InvalidWindow, match="begins at position 12, but slot 0 ends at 11"):
            drafted(cut, replace(start, position=12))
        with pytest.raises(InvalidWindow, match="slot 3 of 3 does not exist"):
            drafted(cut, replace(start, slot=3))


def test_one_that_comes_late_or_to_another_stage_is_refused(model: Make, folder: Path) -> None:
    path = folder / "assistant.gguf"
    with model(2, 4, assisted=False) as cut:
        with pytest.raises(StageFailed, match=r"the last two layers, and layers \[2, 4\) of 6 are loaded"):
            Assistant(path, cut.stages[1])
        cut.compute(0, 0, [5])
        with pytest.raises(StageFailed, match="done before they compute"):
            Assistant(path, cut.tail)
        cut.tail.memory.trim(0, 0)
        Assistant(path, cut.tail)
    with model(5, assisted=False) as cut, pytest.raises(StageFailed, match=r"layers \[5, 6\) of 6"):
        Assistant(path, cut.tail)
    plain = replace(OPTIONS, has_reader=False)
    with model(4, options=plain, assisted=False) as cut, pytest.raises(StageFailed, match="is to be said"):
        Assistant(path, cut.tail)


def test_files_that_llama_cpp_refuses(model: Make, tmp_path: Path) -> None:
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(b"GGUF of nothing")
    narrow = write_assistant(tmp_path / "narrow.gguf", metadata={"embedding_length": 64})
    with model(4, assisted=False) as cut:
        for path in (broken, narrow):
            with pytest.raises(InvalidModel, match=f"does not load {path.name}"):
                Assistant(path, cut.tail)
        # The stage goes on.
        assert cut.compute(0, 0, [5, 6])[0].shape == (2, 320)


def test_attention_is_computed_alike_whatever_devices_prefer(model: Make) -> None:
    fast = replace(OPTIONS, exact=False)
    with model(4, options=fast) as cut:
        assert cut.tail._context_params().flash_attn_type == llama_cpp.LLAMA_FLASH_ATTN_TYPE_ENABLED
        assert assisted_rounds(cut, TEXTS, Script(3, 4))
    with model(4, options=replace(fast, has_reader=False), assisted=False) as cut:
        assert cut.tail._context_params().flash_attn_type == llama_cpp.LLAMA_FLASH_ATTN_TYPE_AUTO


def test_other_stages_have_no_use_for_a_reader(tmp_path: Path) -> None:
    runtime = StageRuntime(TinyModel("llama").write(tmp_path / "llama.gguf"), OPTIONS)
    with contextlib.closing(runtime):
        assert runtime.decode([Span(0, 0, [5], num_outputs=1)])[0].shape == (1, 320)
