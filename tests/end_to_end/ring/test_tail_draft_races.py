"""An assistant beside the last stage, with other proposers and many windows in flight."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

import pytest

from mesh.coordinator.tail_draft_plug import TailDraftPlug
from speculative.controller import ControllerOptions
from speculative.remote_drafts import RemoteDrafter, RemoteDraftProposer
from stages.runtime.assistant import Assistant
from tests.end_to_end.ring.test_tail_drafts import (
    CTX_SIZE,
    NUM_DRAFTED,
    SAMPLINGS,
    coordinating,
    folder,
    plain_text,
    request,
    stages,
)
from tests.support.proposers import Oracle
from tests.support.ring_harness import collect, plugs_for, running_coordinator
from tests.support.tiny_models import N_VOCAB

if TYPE_CHECKING:
    from stages.sampling.sampler import SamplingParams
    from tests.support.ring_harness import RunningStage

__all__ = ["folder", "stages"]  # fixtures

# One of seven tokens that are proposed is wrong, in the middle of a window.
ERRS = (False,) * 6 + (True,)


@pytest.mark.parametrize("sampling", SAMPLINGS.values(), ids=SAMPLINGS)
@pytest.mark.parametrize("cancels", [True, False])
async def test_windows_behind_a_rejection_fail_nobody(
    stages: list[RunningStage], sampling: SamplingParams, *, cancels: bool
) -> None:
    """What a draft drops from the slot is missed by windows that left before the rejection was known."""
    wanted = request(sampling=sampling)
    plain = await plain_text(stages, wanted)
    async with running_coordinator(
        stages,
        context_length=CTX_SIZE,
        num_slots=4,
        n_vocab=N_VOCAB,
        make_proposers=lambda _request: [
            Oracle([*wanted.prompt, *plain], ERRS),
            RemoteDraftProposer(RemoteDrafter(NUM_DRAFTED)),
        ],
        controller=ControllerOptions(fixed_width=3, fixed_depth=3),
        plugs=[*plugs_for(has_windows=True), TailDraftPlug()],
        cancels=cancels,
    ) as coordinator:
        tokens, last = await collect(coordinator, wanted)
    assert tokens == plain
    assert last.stats.num_accepted > len(plain) // 2
    assert last.stats.num_replays == 0


async def test_verdicts_do_not_wait_for_drafts(
    stages: list[RunningStage], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The event loop sends them: it computes short windows itself, but none that a draft follows."""
    draft = Assistant.draft
    threads: list[int] = []

    def noted(*arguments: Any) -> list[tuple[int, ...]]:
        threads.append(threading.get_ident())
        return draft(*arguments)

    monkeypatch.setattr(Assistant, "draft", noted)
    async with coordinating(stages, TailDraftPlug()) as coordinator:
        await collect(coordinator, request())
    assert len(threads) > 5
    assert threading.get_ident() not in threads
