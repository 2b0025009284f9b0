"""The real API over the real coordinator and stages, around a fake model with a real vocabulary."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from mesh.api.api_keys import ApiKeys
from mesh.coordinator.coordinator import Coordinator
from mesh.text.tokenizer import Tokenizer
from speculative.proposer import Proposer
from tests.support.api_harness import Api, running_api
from tests.support.fake_stage import FakeRuntime
from tests.support.ring_harness import RunningStage, running_coordinator, running_services
from tests.support.status_parts import sessions_of

CHAT = "/v1/chat/completions"
CONTEXT_LENGTH = 512


@dataclass
class RingApi:
    api: Api
    coordinator: Coordinator
    runtimes: list[FakeRuntime]
    stages: list[RunningStage]

    async def is_idle(self, *, within_s: float = 60.0) -> None:
        """Wait until nothing runs, waits or is open anywhere."""
        async with asyncio.timeout(within_s):
            while self.num_anywhere():  # noqa: ASYNC110
                await asyncio.sleep(0.005)

    def num_anywhere(self) -> int:
        sessions = sessions_of(self.coordinator)
        open_at_stages = sum(stage.service.stats().num_open_sessions for stage in self.stages)
        return sessions.running + sessions.waiting + open_at_stages


@asynccontextmanager
async def running_ring_api(
    tokenizer: Tokenizer,
    *,
    num_slots: int = 2,
    max_waiting: int = 64,
    keys: ApiKeys | None = None,
    make_proposer: Callable[[], Proposer] | None = None,
    clock_s: Callable[[], float] = time.monotonic,
    **options: Any,
) -> AsyncIterator[RingApi]:
    """Two stages, a coordinator, and the API on a free port."""
    runtimes = [
        FakeRuntime(index, 2, n_vocab=tokenizer.n_vocab, num_slots=num_slots, ctx_size=CONTEXT_LENGTH)
        for index in range(2)
    ]
    async with (
        running_services(runtimes) as stages,
        running_coordinator(
            stages,
            context_length=CONTEXT_LENGTH,
            num_slots=num_slots,
            max_waiting=max_waiting,
            make_proposer=make_proposer,
            max_rows=FakeRuntime.max_rows,
            n_vocab=tokenizer.n_vocab,
            clock_s=clock_s,
            token_texts=tokenizer.texts,
        ) as coordinator,
        running_api(coordinator, tokenizer, keys=keys, **options) as api,
    ):
        yield RingApi(api, coordinator, runtimes, stages)
