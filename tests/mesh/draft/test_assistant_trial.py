"""An assistant is tried in a process of its own, which llama.cpp may end."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from mesh.draft.assistant_trial import check_any_drafter, try_assistant
from spanmesh_proto.errors import InvalidModel
from speculative.draft.context import DraftOptions
from speculative.proposer import DrafterKind
from tests.qualification.own_models import OWN_MODELS
from tests.support.assistant_files import write_assistant
from tests.support.tiny_models import TinyModel

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.parametrize("kind", ["dense", "moe", "e"])
def test_one_that_fits_drafts(kind: str, tmp_path: Path) -> None:
    model = OWN_MODELS[f"gemma4-{kind}"](1).write(tmp_path / "model.gguf")
    found = check_any_drafter(
        write_assistant(tmp_path / "assistant.gguf"), model, DraftOptions(num_sessions=4)
    )
    assert found.kind is DrafterKind.ASSISTANT
    assert (found.n_layers, found.num_tokens, found.num_sessions) == (4, 320, 4)
    assert found.draft_ms_per_token > 0
    assert found.memory_bytes > found.file_bytes


def test_what_llama_cpp_cannot_run_is_told_of(tmp_path: Path) -> None:
    model = OWN_MODELS["gemma4-dense"](1).write(tmp_path / "model.gguf")
    narrow = write_assistant(tmp_path / "narrow.gguf", metadata={"embedding_length": 64})
    with pytest.raises(InvalidModel, match=r"^narrow.gguf cannot draft: llama.cpp does not load narrow.gguf"):
        try_assistant(narrow, model)


def test_an_abort_ends_the_trial_only(tmp_path: Path) -> None:
    """Beside a model without windows llama.cpp ends its process."""
    llama = TinyModel("llama").write(tmp_path / "llama.gguf")
    assistant = write_assistant(tmp_path / "assistant.gguf")
    with pytest.raises(
        InvalidModel,
        match=r"^llama.cpp aborts when it drafts with assistant.gguf \(exit code -\d+\): use another",
    ):
        try_assistant(assistant, llama)
