"""The drafter of a group is swapped in a running ring: texts stay, and other keys have no part in it."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

import numpy as np
import pytest

from mesh.coordinator.feature_store import FeatureNeeds
from mesh.coordinator.tuning_plug import TuningPlug
from mesh.draft.drafter import read_drafter
from mesh.draft.loading import load_drafter
from mesh.engine import GenerationRequest
from mesh.serve.group_drafter import GroupDrafter
from mesh.serve.proposers import Proposers
from mesh.status import TuningStatus
from mesh.text.tokenizer import Tokenizer
from speculative.controller import ControllerOptions
from speculative.draft.context import DraftOptions
from stages.runtime.stage_runtime import RuntimeOptions
from stages.sampling.sampler import SamplingParams
from stages.slicing.model_facts import read_model_facts
from tests.support.changed_drafters import write_changed
from tests.support.eagle3 import DRAFTER
from tests.support.ring_harness import plugs_for, running_coordinator, running_stages

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Hashable
    from pathlib import Path

    from mesh.coordinator.coordinator import Coordinator

pytestmark = pytest.mark.model

CTX_SIZE, NUM_TOKENS = 256, 20
CHAT = "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"
QUESTIONS = ("What is a tree?", "Count from one to ten.")
SAMPLINGS = (SamplingParams(), SamplingParams(0.8, seed=5))
MEMBER, OTHER = "aa", "bb"


class Told:
    """What the coordinator tells of its sessions; see `mesh.coordinator.tuning_plug.Tuning`."""

    def __init__(self) -> None:
        self.running: set[Hashable] = set()
        self.num_came = 0
        self.judged: dict[str, list[bool]] = {}

    def came(self) -> None:
        self.num_came += 1

    def began(self, session: Hashable) -> None:
        self.running.add(session)

    def ended(self, session: Hashable) -> None:
        self.running.discard(session)

    def drafted(self, proposer: str, *, is_accepted: bool) -> None:
        self.judged.setdefault(proposer, []).append(is_accepted)

    def status(self) -> TuningStatus:
        return TuningStatus(group="staff")


class Ring:
    """A ring whose members have a drafter of their own."""

    def __init__(self, target: Path, folder: Path) -> None:
        facts = read_model_facts(target)
        self.tokenizer = Tokenizer(target)
        noise = np.random.default_rng(1).normal(0.0, 0.03, (576, 3 * 576)).astype(np.float32)
        spoilt = write_changed(DRAFTER, folder / "spoilt.gguf", {"fc.weight": noise})
        limits = DraftOptions(ctx_size=CTX_SIZE, num_sessions=4)
        drafters = [read_drafter(path, facts) for path in (DRAFTER, spoilt)]
        self.base, self.spoilt = (
            load_drafter(each, self.tokenizer, limits, root=folder) for each in drafters
        )
        self.group = GroupDrafter(self.base, lambda request: request.client == MEMBER)
        needs = FeatureNeeds(drafters[0].layers, facts.n_layers, drafters[0].n_embd)
        self.proposers = Proposers("draft", draft=self.base, group=self.group, feature_needs=needs)
        self.told = Told()

    def request(self, question: str, client: str, sampling: SamplingParams) -> GenerationRequest:
        prompt = self.tokenizer.encode(CHAT.format(question), add_special=False, parse_special=True)
        return GenerationRequest(
            tuple(prompt), NUM_TOKENS, self.tokenizer.end_tokens, sampling, client=client, uses_cache=False
        )

    @contextlib.asynccontextmanager
    async def coordinator(
        self, target: Path, cache: Path, *, drafts: bool = True
    ) -> AsyncIterator[Coordinator]:
        options = RuntimeOptions(num_slots=4, ctx_size=CTX_SIZE, exact=True)
        async with (
            running_stages(target, (15,), options, cache) as stages,
            running_coordinator(
                stages,
                context_length=CTX_SIZE,
                num_slots=4,
                n_vocab=self.tokenizer.n_vocab,
                make_proposers=self.proposers if drafts else None,
                controller=ControllerOptions(fixed_width=3, fixed_depth=2),
                plugs=[*plugs_for(feature_needs=self.proposers.feature_needs), TuningPlug(self.told)],
            ) as coordinator,
        ):
            yield coordinator

    async def answer(
        self, coordinator: Coordinator, number: int, client: str, in_the_middle: Callable[[], None]
    ) -> list[int]:
        """One answer, in the middle of which something happens."""
        tokens: list[int] = []
        has_happened = False
        async for part in coordinator.generate(self.request(QUESTIONS[number], client, SAMPLINGS[number])):
            tokens += part.tokens
            if not has_happened and len(tokens) > NUM_TOKENS // 2:
                has_happened = True
                in_the_middle()
        assert has_happened
        return tokens

    async def texts(
        self, coordinator: Coordinator, client: str, drafters: tuple[int, int] = (0, 0)
    ) -> list[list[int]]:
        """All answers, drafted by so many sessions of the drafter and of the spoilt one."""

        def check() -> None:
            assert len(self.told.running) == 1
            assert (self.base.num_open, self.spoilt.num_open) == drafters

        return [await self.answer(coordinator, number, client, check) for number in range(len(QUESTIONS))]

    def close(self) -> None:
        self.group.close()
        self.base.close()


async def test_no_text_differs_across_swaps_and_other_keys_have_no_part_in_them(
    smollm2_path: Path, tmp_path: Path, stage_cache_dir: Path
) -> None:
    ring = Ring(smollm2_path, tmp_path)
    told, group = ring.told, ring.group
    try:
        async with ring.coordinator(smollm2_path, stage_cache_dir, drafts=False) as coordinator:
            plain = await ring.texts(coordinator, OTHER)
            assert coordinator.status().tuning == TuningStatus(group="staff")
        async with ring.coordinator(smollm2_path, stage_cache_dir) as coordinator:
            assert await ring.texts(coordinator, MEMBER, (1, 0)) == plain
            assert told.judged.keys() <= {"eagle3/0"}

            # In mid-answer a drafter of noise takes its place, for later sessions.
            def swap() -> None:
                group.serve(1, ring.spoilt)
                group.close_former()
                assert (ring.base.num_open, ring.spoilt.num_open) == (1, 0)

            assert await ring.answer(coordinator, 0, MEMBER, swap) == plain[0]
            assert await ring.texts(coordinator, MEMBER, (0, 1)) == plain
            assert told.judged.keys() <= {"eagle3/0", "eagle3/1"}
            # Another key has the same drafter as ever, also for the texts that the group had.
            told.judged.clear()
            assert await ring.texts(coordinator, OTHER, (1, 0)) == plain
            assert told.judged.keys() <= {"eagle3"}

            # In mid-answer it goes: first for later sessions, then for this one as well.
            def leave() -> None:
                group.serve(0, None)
                group.close_former()
                assert group.has_former
                assert ring.spoilt.is_alive
                group.close_former(at_once=True)
                assert not group.has_former

            assert await ring.answer(coordinator, 1, MEMBER, leave) == plain[1]
            assert await ring.texts(coordinator, MEMBER, (1, 0)) == plain
        assert told.running == set()
        assert told.num_came == 4 * len(plain) + len(plain) + 2
    finally:
        ring.close()
