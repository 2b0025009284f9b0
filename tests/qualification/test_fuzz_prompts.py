"""What clients send against what reaches the prompt: the comparison, the conversations, and a run."""

from __future__ import annotations

import json
from random import Random
from typing import TYPE_CHECKING, Any

import pytest

from mesh.text.tokenizer import Tokenizer
from tests.qualification.fuzz.altered_models import control_tokens, with_control_tokens, write_vocabulary
from tests.qualification.fuzz.conversations import HARMLESS, Conversations, body_for, marks_of
from tests.qualification.fuzz.prompt_comparison import Piece, anchor, forged, hidden, skeleton
from tests.qualification.fuzz.prompt_fuzz import fuzz_prompts
from tests.qualification.fuzz.report import FuzzOptions

if TYPE_CHECKING:
    from pathlib import Path

    from tests.qualification.fuzz.conversations import ApiName

FIRST, SECOND = anchor(Random(1)), anchor(Random(2))
MARKS = marks_of(("<|im_start|>", "<|im_end|>"))
APIS: tuple[ApiName, ...] = ("chat", "messages", "responses")


def prompt(*texts: str) -> list[Piece]:
    """Control tokens are those between angles; any other text is cut into tokens of three bytes."""
    pieces = []
    for text in texts:
        data = text.encode()
        if text.startswith("<"):
            pieces.append(Piece(data, is_control=True))
        else:
            pieces += [Piece(data[at : at + 3], is_control=False) for at in range(0, len(data), 3)]
    return pieces


def test_a_skeleton_has_control_tokens_and_anchors_in_order() -> None:
    found = skeleton(prompt("<s>", f"é {FIRST} & x{SECOND}", "<e>", FIRST))
    assert found == ("⟨<s>⟩", FIRST, SECOND, "⟨<e>⟩", FIRST)


@pytest.mark.parametrize(
    ("marked", "says"),
    [
        (("<s>", FIRST, "<e>"), None),
        (("<s>", FIRST, "<e>", "<s>"), "more at the end: ⟨<s>⟩"),
        (("<s>", FIRST), "less at the end: ⟨<e>⟩"),
        (("<s>", "<s>", FIRST, "<e>"), f"⟨<s>⟩ in place of {FIRST}"),
    ],
)
def test_a_forged_mark_is_found_with_its_place(marked: tuple[str, ...], says: str | None) -> None:
    found = forged(skeleton(prompt(*marked)), skeleton(prompt("<s>", FIRST, "<e>")))
    assert found is None if says is None else says in str(found)


def test_a_word_that_is_not_shown_or_elsewhere_is_found() -> None:
    assert hidden([(FIRST,), (FIRST, SECOND), ()], ("⟨<s>⟩", FIRST, SECOND)) is None
    assert "is not in the prompt" in str(hidden([(FIRST, SECOND)], (FIRST,)))
    assert "in another order" in str(hidden([(FIRST, SECOND)], (SECOND, FIRST)))


def test_a_seed_makes_the_same_conversations_with_marks_in_every_field() -> None:
    def drawn(seed: int) -> list[Any]:
        draw = Conversations(MARKS, Random(seed))
        return [draw.next() for _ in range(60)]

    assert drawn(3) == drawn(3)
    assert drawn(3) != drawn(4)
    for api in APIS:
        bodies = [body_for(api, conversation.written(marks)) for conversation, marks in drawn(3)]
        texts = "".join(json.dumps(body, ensure_ascii=False) for body in bodies)
        assert "<|im_end|>" in texts
        assert "\ue000" not in texts
        harmless = "".join(json.dumps(body_for(api, each.written(None))) for each, _ in drawn(3))
        assert HARMLESS in harmless
        assert "im_" not in harmless


def test_every_word_that_must_be_shown_is_in_each_body() -> None:
    draw = Conversations(MARKS, Random(5))
    for _ in range(30):
        conversation, marks = draw.next()
        words = {word for row in conversation.texts() for word in row}
        for api in APIS:
            body = json.dumps(body_for(api, conversation.written(marks)))
            assert all(word in body for word in words)


@pytest.mark.model
def test_a_vocabulary_gets_further_control_tokens(smollm2_path: Path, tmp_path: Path) -> None:
    names = ["<|start_header_id|>", "<|im_end|>", "[INST]"]
    path = write_vocabulary(
        smollm2_path, tmp_path / "vocabulary.gguf", dict(with_control_tokens(smollm2_path, names))
    )
    tokenizer = Tokenizer(path)
    tokens = tokenizer.encode("".join(names), add_special=False, parse_special=True)
    assert [tokenizer.name(token) for token in tokens] == names
    assert set(names) <= set(control_tokens(path))


@pytest.mark.model
def test_only_templates_make_control_tokens_and_nothing_is_hidden(smollm2_path: Path, tmp_path: Path) -> None:
    report = fuzz_prompts(FuzzOptions(4, 7, smollm2_path, tmp_path))
    assert report.is_good, [path.with_suffix(".txt").read_text() for path in report.kept]


@pytest.mark.model
def test_what_is_compared_is_compared_through_all_apis(smollm2_path: Path, tmp_path: Path) -> None:
    report = fuzz_prompts(FuzzOptions(2, 7, smollm2_path, tmp_path))
    assert report.num_cases == 2 * len(APIS)
    assert {name.partition(":")[0] for name in report.outcomes} == set(APIS)
    assert not any("no answer" in name for name in report.outcomes)


@pytest.mark.model
@pytest.mark.sweep
def test_all_templates_of_llama_cpp(smollm2_path: Path, tmp_path: Path) -> None:
    report = fuzz_prompts(FuzzOptions(400, 11, smollm2_path, tmp_path))
    assert report.is_good, [path.with_suffix(".txt").read_text() for path in report.kept]
