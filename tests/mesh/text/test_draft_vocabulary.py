"""A draft model must mean by every token what the target means by it."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from mesh.draft.drafter import read_drafter
from mesh.draft.loading import load_drafter
from mesh.text.tokenizer import Tokenizer, Vocabulary, num_shared_tokens
from spanmesh_proto.errors import InvalidModel
from speculative.draft.context import DraftOptions
from stages.slicing.model_facts import read_model_facts
from tests.support.tiny_models import N_VOCAB, TinyModel

if TYPE_CHECKING:
    from pathlib import Path

    from speculative.draft.worker import LoadedDrafter

TARGET = Vocabulary("target.gguf", (b"<s>", b"</s>", b"a", b"b"), {"bos": 0, "eos": 1, "eot": None}, 4)
DRAFT = replace(TARGET, name="draft.gguf")


def test_the_same_vocabulary() -> None:
    assert num_shared_tokens(DRAFT, TARGET) == 4


@pytest.mark.parametrize(("num_draft", "num_target"), [(4, 6), (6, 4), (5, 6)])
def test_padding_may_differ(num_draft: int, num_target: int) -> None:
    padding = (b"[PAD4]", b"[PAD5]")
    draft = replace(DRAFT, texts=(*TARGET.texts, *padding)[:num_draft])
    target = replace(TARGET, texts=(*TARGET.texts, *padding)[:num_target])
    assert num_shared_tokens(draft, target) == min(num_draft, num_target)


@pytest.mark.parametrize(
    ("draft", "complaint"),
    [
        (
            replace(DRAFT, texts=(b"<s>", b"</s>", b"x", b"y")),
            "token 2 is 'x' in the draft, 'a' in the target",
        ),
        (
            replace(DRAFT, texts=TARGET.texts[:3], num_used=3),
            "token 3 is missing (it has 3 tokens) in the draft, 'b' in the target",
        ),
        (
            replace(DRAFT, texts=(*TARGET.texts, b"c"), num_used=5),
            "token 4 is 'c' in the draft, missing (it has 4 tokens) in the target",
        ),
        (
            replace(DRAFT, special={"bos": 0, "eos": 3, "eot": None}),
            "eos is token 3 in the draft, 1 in the target",
        ),
        (
            replace(DRAFT, special={"bos": 0, "eos": 1, "eot": 1}),
            "eot is token 1 in the draft, None in the target",
        ),
    ],
)
def test_the_first_difference_is_named(draft: Vocabulary, complaint: str) -> None:
    with pytest.raises(InvalidModel) as raised:
        num_shared_tokens(draft, TARGET)
    assert raised.value.message == (
        f"draft.gguf cannot draft for target.gguf: {complaint}; make a draft with `mesh draft make`"
    )


def load(draft: Path, target: Path, options: DraftOptions) -> LoadedDrafter:
    return load_drafter(read_drafter(draft, read_model_facts(target)), Tokenizer(target), options)


@pytest.mark.model
def test_a_model_of_another_family(smollm2_path: Path, gemma3_path: Path) -> None:
    with pytest.raises(
        InvalidModel, match=r"token 0 is '<pad>' in the draft, '<\|endoftext\|>' in the target"
    ):
        load(gemma3_path, smollm2_path, DraftOptions())


def test_a_draft_that_is_no_gguf(tmp_path: Path) -> None:
    target = TinyModel("llama").write(tmp_path / "target.gguf")
    draft = tmp_path / "draft.gguf"
    draft.write_text("no model")
    with pytest.raises(InvalidModel, match=r"draft.gguf is not a GGUF file"):
        load(draft, target, DraftOptions())


def test_one_that_fits(tmp_path: Path) -> None:
    target = TinyModel("llama").write(tmp_path / "target.gguf")
    draft = TinyModel("llama", n_layers=2, seed=2).write(tmp_path / "draft.gguf")
    model = load(draft, target, DraftOptions(ctx_size=64))
    assert model.draft_ms_per_token > 0
    assert model.num_tokens == N_VOCAB
    model.close()
