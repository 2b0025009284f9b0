"""The tokenizer on real vocabularies."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mesh.text.detokenizer import AnswerText
from mesh.text.tokenizer import Tokenizer
from spanmesh_proto.errors import InvalidModel, InvalidRequest
from stages.certification.certify import cut_stage
from stages.layers import LayerRange
from tests.support.tiny_embedders import TinyEmbedder

pytestmark = pytest.mark.model


@pytest.fixture(scope="module")
def smollm2(smollm2_path: Path) -> Tokenizer:
    return Tokenizer(smollm2_path)


@pytest.fixture(scope="module")
def gemma3(gemma3_path: Path) -> Tokenizer:
    return Tokenizer(gemma3_path)


def _text(tokenizer: Tokenizer, tokens: list[int]) -> str:
    text = AnswerText(tokenizer.piece)
    return "".join(text.push(token) for token in tokens) + text.flush()


def test_reads_what_the_file_says(smollm2: Tokenizer, gemma3: Tokenizer) -> None:
    assert (smollm2.n_vocab, smollm2.n_ctx_train) == (49152, 8192)
    assert (smollm2.bos, smollm2.eos) == ("<|im_start|>", "<|im_end|>")
    assert not smollm2.adds_bos
    assert smollm2.chat_template is not None
    assert "<|im_start|>" in smollm2.chat_template
    assert (gemma3.n_vocab, gemma3.n_ctx_train) == (262144, 32768)
    assert (gemma3.bos, gemma3.adds_bos) == ("<bos>", True)


def test_end_tokens_are_all_that_end_an_answer(smollm2: Tokenizer) -> None:
    ends = {smollm2.special_token("<|endoftext|>"), smollm2.special_token("<|im_end|>")}
    assert ends <= smollm2.end_tokens


# The vocabulary lacks bytes that only control, unassigned and private characters use.
_assigned = st.characters(exclude_categories=("Cc", "Cn", "Co", "Cs"))


@settings(deadline=None, max_examples=200)
@given(text=st.text(_assigned))
def test_text_comes_back(smollm2: Tokenizer, text: str) -> None:
    tokens = smollm2.encode(text, add_special=False, parse_special=False)
    assert _text(smollm2, tokens) == text


def test_special_tokens_are_read_only_when_asked_and_have_no_text(smollm2: Tokenizer) -> None:
    special = smollm2.encode("<|im_end|>", add_special=False, parse_special=True)
    assert len(special) == 1
    assert smollm2.piece(special[0]) == b""
    assert len(smollm2.encode("<|im_end|>", add_special=False, parse_special=False)) > 1
    assert smollm2.special_token("<|nobody knows this|>") is None


def test_begins_with_bos_only_where_the_model_does(smollm2: Tokenizer, gemma3: Tokenizer) -> None:
    assert gemma3.encode("Hi", add_special=True, parse_special=True)[0] == gemma3.special_token("<bos>")
    with_special = smollm2.encode("Hi", add_special=True, parse_special=True)
    assert with_special == smollm2.encode("Hi", add_special=False, parse_special=True)


def test_half_a_surrogate_pair_is_refused(smollm2: Tokenizer) -> None:
    with pytest.raises(InvalidRequest, match="character 2"):
        smollm2.encode("ab\ud800", add_special=False, parse_special=False)


def test_a_text_longer_than_any_buffer_guess_is_encoded_whole(smollm2: Tokenizer) -> None:
    text = "\u2603" * 20_000
    assert _text(smollm2, smollm2.encode(text, add_special=False, parse_special=False)) == text


def test_many_threads_agree_with_one(smollm2_path: Path) -> None:
    tokenizer = Tokenizer(smollm2_path)
    texts = [f"Line {number}:" + " l\u00f6wen und b\u00e4ren" * number for number in range(200)]
    with ThreadPoolExecutor(8) as pool:
        together = list(
            pool.map(lambda text: tokenizer.encode(text, add_special=True, parse_special=True), texts)
        )
        back = list(pool.map(lambda tokens: _text(tokenizer, tokens), together))
    assert back == texts
    assert together == [tokenizer.encode(text, add_special=True, parse_special=True) for text in texts]


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(InvalidModel, match=r"none\.gguf is not a file"):
        Tokenizer(tmp_path / "none.gguf")


def test_a_file_that_is_not_a_gguf_is_named_with_the_reason(tmp_path: Path) -> None:
    path = tmp_path / "notes.gguf"
    path.write_text("not a model " * 100)
    with pytest.raises(InvalidModel, match=r"notes\.gguf is not a GGUF"):
        Tokenizer(path)


def test_a_stage_without_vocabulary_is_refused(smollm2_path: Path, tmp_path: Path) -> None:
    path = tmp_path / "middle.gguf"
    cut_stage(smollm2_path, LayerRange(10, 11), path)
    with pytest.raises(InvalidModel, match="has no vocabulary"):
        Tokenizer(path)


def test_vocabularies_that_drop_text_are_told_apart(
    smollm2: Tokenizer, gemma3: Tokenizer, tmp_path: Path
) -> None:
    assert smollm2.is_lossless
    assert gemma3.is_lossless
    words = Tokenizer(TinyEmbedder("bert").write(tmp_path / "tiny.gguf"))
    assert not words.is_lossless
    assert words.encode("word1" + " " * 5000 + "word1", add_special=False, parse_special=False) == 2 * (
        words.encode("word1", add_special=False, parse_special=False)
    )
    # One token for a word that is not there.
    assert len(words.encode("1" * 3000, add_special=False, parse_special=False)) == 1
