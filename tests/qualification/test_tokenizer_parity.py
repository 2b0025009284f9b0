"""Tokenizing of long runs against llama.cpp on a large stack."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

import pytest
from click.testing import CliRunner

from meshbench.lab.llama_cpp_build import unpacked_source
from tests.qualification import tokenizer_parity
from tests.qualification.fuzz.altered_models import PRE_KIND, text_value, write_vocabulary
from tests.qualification.tokenizer_parity import (
    TokenizingProcess,
    VocabularyFile,
    compare,
    known_kinds,
    llama_encode,
    product,
    vocabularies,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

pytestmark = pytest.mark.model
needs_source = pytest.mark.skipif(
    unpacked_source() is None, reason="no source of llama.cpp: see SPANMESH_LLAMA_CPP"
)


class Wrong:
    """Refuses short texts, and gives one id too many for others."""

    def encode(self, text: str) -> Sequence[int] | None:
        return None if len(text) < 5 else [0] * (len(text) + 1)


@needs_source
def test_all_kinds_of_llama_cpp_are_known() -> None:
    source = unpacked_source()
    assert source is not None
    kinds = known_kinds(source)
    assert {"gpt-4o", "tekken", "deepseek-v3", "smollm", "llama-bpe", "default"} <= set(kinds)
    assert len(kinds) > 80


def test_a_small_stack_ends_and_a_large_one_does_not(smollm2_path: Path, tmp_path: Path) -> None:
    path = write_vocabulary(smollm2_path, tmp_path / "v.gguf", {PRE_KIND: text_value("gpt-4o")})
    files = [VocabularyFile("gpt-4o", path)]

    def small(path: Path) -> TokenizingProcess:
        return TokenizingProcess(llama_encode, path, 2**20)

    found = list(compare(files, small, runs=["capitals", "digits"], lengths=[100, 28_000]))
    assert [case.outcome for case in found] == ["equal", "ended", "equal", "equal"]
    assert "SIG" in found[1].reason
    assert [case.is_good for case in found] == [True, False, True, True]


@contextmanager
def wrong(_path: Path) -> Iterator[Wrong]:
    yield Wrong()


def test_other_ids_and_refusals_are_told_apart(smollm2_path: Path) -> None:
    found = list(compare([VocabularyFile("own", smollm2_path)], wrong, runs=["digits"], lengths=[4, 8]))
    assert [case.outcome for case in found] == ["refused", "differs"]
    assert "9 ids in place of 8" in found[1].reason


def test_a_file_that_is_no_vocabulary_is_not_loaded(tmp_path: Path) -> None:
    path = tmp_path / "none.gguf"
    path.write_bytes(b"GGUF")
    (found,) = compare([VocabularyFile("none", path)], product)
    assert found.outcome == "not loaded"


@needs_source
def test_an_interrupted_comparison_goes_on(smollm2_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = [VocabularyFile(name, smollm2_path) for name in ("first", "second", "third")]
    monkeypatch.setattr(tokenizer_parity, "vocabularies", lambda *_: iter(files))
    common = ["--model", str(smollm2_path), "--run", "tabs", "--length", "100", "--length", "200"]
    found = CliRunner().invoke(tokenizer_parity.main, [*common, "--from", "second"])
    assert found.stdout == "second: equal 2\nthird: equal 2\nin all: equal 4\n"
    assert found.exit_code == 0
    found = CliRunner().invoke(tokenizer_parity.main, [*common, "--from", "fourth"])
    assert "no vocabulary has such a name" in found.stderr
    assert found.exit_code == 2


@pytest.mark.sweep
@needs_source
def test_all_vocabularies_give_the_ids_of_a_large_stack(smollm2_path: Path, tmp_path: Path) -> None:
    source = unpacked_source()
    assert source is not None
    files = vocabularies(source, smollm2_path, tmp_path)
    wrong = [case for case in compare(files, product, lengths=[100, 60_000]) if not case.is_good]
    assert not wrong
