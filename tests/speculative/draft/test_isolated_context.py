"""The draft context in a process of its own: it drafts the same, and its end ends drafting only."""

from __future__ import annotations

import os
import signal
import time
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from mesh.draft.loading import SETUP
from speculative.draft import isolated_context
from speculative.draft.context import DraftFile, DraftOptions, DraftUnusable
from speculative.draft.isolated_context import ContextEnded, IsolatedContext
from speculative.draft.worker import LoadedDrafter
from speculative.proposer import DrafterKind
from tests.support.draft_models import greedy, running_draft, wait_for
from tests.support.tiny_models import N_VOCAB, TinyModel

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

OPTIONS = DraftOptions(draft_max=8, ctx_size=128, num_sessions=2)
LIMIT_S = 60.0


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return TinyModel("llama").write(tmp_path_factory.mktemp("tiny") / "tiny.gguf")


def file_of(path: Path) -> DraftFile:
    return DraftFile(DrafterKind.MODEL, path, OPTIONS, N_VOCAB)


@contextmanager
def isolated(path: Path) -> Iterator[LoadedDrafter]:
    file = file_of(path)
    model = LoadedDrafter(file, IsolatedContext(file, SETUP, limit_s=LIMIT_S), clock_s=time.monotonic)
    try:
        yield model
    finally:
        model.close()


def process_of(model: LoadedDrafter) -> int:
    pid = model._context.thread_id
    assert pid is not None
    return pid


def is_there(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()


def test_it_drafts_what_the_context_in_this_process_drafts(tiny: Path) -> None:
    prompts = ([1, 2, 3], [1, 2, 3, 4, 5, 6])
    found = []
    with running_draft(tiny, OPTIONS, num_tokens=N_VOCAB) as here, isolated(tiny) as there:
        assert process_of(there) != os.getpid()
        for model in (here, there):
            proposers = [model.open(greedy) for _ in prompts]
            for proposer, prompt in zip(proposers, prompts, strict=True):
                proposer.extend(prompt)
            found.append([wait_for(proposer, 8) for proposer in proposers])
            # A text that begins like another's takes over its rows.
            proposers[0].close()
            again = model.open(greedy)
            again.extend([1, 2, 3])
            found[-1].append(wait_for(again, 4))
    assert found[0] == found[1]
    assert all(proposal.tokens for proposal in found[0])


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGABRT])
def test_its_end_ends_drafting_and_nothing_else(tiny: Path, number: signal.Signals) -> None:
    with isolated(tiny) as model:
        proposer = model.open(greedy)
        proposer.extend([1, 2, 3])
        assert model.is_alive
        wait_for(proposer, 2)
        os.kill(process_of(model), number)
        with pytest.raises(DraftUnusable, match=f"ended with exit code -{int(number)}: nothing is drafted"):
            wait_for(proposer, 64)
        assert not model.is_alive
        # Others notice as well, one whose rows were to be copied too, and the thread goes on.
        other = model.open(greedy)
        other.extend([1, 2, 3, 4, 5])
        with pytest.raises(DraftUnusable, match="exit code"):
            wait_for(other, 2)
        other.close()


def test_ctrl_c_does_not_end_it(tiny: Path) -> None:
    with isolated(tiny) as model:
        os.kill(process_of(model), signal.SIGINT)
        proposer = model.open(greedy)
        proposer.extend([1, 2, 3])
        assert len(wait_for(proposer, 4).tokens) == 4


def test_one_that_does_not_answer_is_killed(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(isolated_context, "_ABORT_PATIENCE_S", 0.2)
    monkeypatch.setattr(isolated_context, "_POLL_S", 0.05)
    with isolated(tiny) as model:
        proposer = model.open(greedy)
        proposer.extend([1, 2, 3])
        pid = process_of(model)
        os.kill(pid, signal.SIGSTOP)
        proposer.propose(4)
    assert not is_there(pid)


def test_a_file_that_is_no_draft_model_leaves_no_process(tmp_path: Path) -> None:
    path = tmp_path / "draft.gguf"
    path.write_bytes(b"GGUF" + bytes(60))
    before = children()
    with pytest.raises(DraftUnusable, match=r"cannot load .*draft\.gguf as a draft model.*llama\.cpp: \S"):
        IsolatedContext(file_of(path), SETUP, limit_s=LIMIT_S)
    assert children() <= before


def hang() -> None:
    """Instead of the preparations of the process."""
    time.sleep(LIMIT_S)


@pytest.mark.parametrize(("prepare", "was_late"), [(hang, True), (os.abort, False)])
def test_one_that_does_not_load_leaves_no_process(
    tiny: Path, monkeypatch: pytest.MonkeyPatch, prepare: Callable[[], None], *, was_late: bool
) -> None:
    monkeypatch.setattr(isolated_context, "_POLL_S", 0.05)
    before = children()
    with pytest.raises(ContextEnded) as raised:
        IsolatedContext(file_of(tiny), replace(SETUP, prepare=prepare), limit_s=0.2 if was_late else LIMIT_S)
    assert raised.value.was_late is was_late
    assert raised.value.exit_code == (-signal.SIGKILL if was_late else -signal.SIGABRT)
    assert children() <= before


def children() -> set[int]:
    """Processes of the draft that this process has started."""
    found = Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children").read_text().split()
    return {int(pid) for pid in found if b"spawn_main" in Path(f"/proc/{pid}/cmdline").read_bytes()}
