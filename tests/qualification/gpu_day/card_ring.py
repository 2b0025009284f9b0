"""Ring of stages on one card: every stage in this process, linked by gRPC on loopback, without Ray."""

from __future__ import annotations

import asyncio
import time
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING, Final

import grpc

from mesh.coordinator.coordinator import Coordinator
from mesh.coordinator.options import CoordinatorOptions
from mesh.coordinator.ring import StageAddress
from mesh.engine import GenerationRequest
from spanmesh_proto import windows_pb2_grpc as rpc
from stages.runtime.numerics import FAST_MAX_ROWS
from stages.runtime.stage_runtime import StageRuntime
from stages.serving.server import StageService
from stages.transport.channels import SERVER_OPTIONS

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Sequence
    from pathlib import Path

    from mesh.engine import GenerationStats
    from speculative.proposer import Proposer
    from stages.runtime.stage_runtime import RuntimeOptions

_MESH_ID: Final = "one-card"
_MESH_KEY: Final = "one-card"
# Everything is in one process: while that computes, no stage is dead.
_PING_TIMEOUT_S: Final = 120.0


@dataclass(frozen=True)
class RingRates:
    """Rates of several sessions at once."""

    tokens_per_s: float | None
    """Tokens of all sessions together, while all of them decode; None if they never did at the same time."""
    first_token_s: float
    """Median time from the requests to a session's first token."""
    tokens: tuple[int, ...]
    """The tokens of the first session."""
    stats: GenerationStats
    """Counts of the first session."""


@dataclass(frozen=True)
class _Answer:
    tokens: list[int]
    counts: list[int]
    times_s: list[float]
    stats: GenerationStats


@asynccontextmanager
async def card_ring(
    stages: Sequence[tuple[Path, RuntimeOptions]],
    *,
    make_proposers: Callable[[GenerationRequest], Sequence[Proposer]] | None = None,
) -> AsyncIterator[Coordinator]:
    """Load stages, link them, and connect a coordinator.

    Args:
        stages: File and options of each, in order; all have the same numbers of slots and positions.
        make_proposers: See `Coordinator`; None proposes nothing.

    Raises:
        MeshError: If a stage cannot be loaded.
    """
    async with AsyncExitStack() as stack:
        services: list[StageService] = []
        addresses: list[StageAddress] = []
        n_vocab = 0
        for index, (path, options) in enumerate(stages):
            runtime = await asyncio.to_thread(StageRuntime, path, options)
            n_vocab = runtime.info.n_vocab
            service = StageService(runtime, stage_index=index, mesh_id=_MESH_ID, mesh_key=_MESH_KEY)
            stack.push_async_callback(service.close)
            server = grpc.aio.server(interceptors=[service.key_check], options=SERVER_OPTIONS)
            rpc.add_StageServicer_to_server(service, server)
            port = server.add_insecure_port("127.0.0.1:0")
            await server.start()
            stack.push_async_callback(server.stop, 0)
            services.append(service)
            addresses.append(StageAddress("card", f"127.0.0.1:{port}", runtime.info.layers))
        for service, following in zip(services, addresses[1:], strict=False):
            await service.connect(following.address)
        first = stages[0][1]
        coordinator = Coordinator(
            addresses,
            CoordinatorOptions(
                first.ctx_size,
                first.num_slots,
                FAST_MAX_ROWS,
                n_vocab,
                max_waiting=first.num_slots,
                ping_timeout_s=_PING_TIMEOUT_S,
            ),
            mesh_id=_MESH_ID,
            mesh_key=_MESH_KEY,
            make_proposers=make_proposers,
            clock_s=time.monotonic,
        )
        await coordinator.start()
        stack.push_async_callback(coordinator.stop)
        yield coordinator


async def decode(coordinator: Coordinator, prompts: Sequence[Sequence[int]], num_tokens: int) -> RingRates:
    """Answer all prompts at once.

    Args:
        coordinator: Of a ring.
        prompts: Token ids of each session.
        num_tokens: Tokens of each answer.
    """
    start_s = time.perf_counter()
    answers = await asyncio.gather(*(_answer(coordinator, prompt, num_tokens) for prompt in prompts))
    from_s = max(answer.times_s[0] for answer in answers)
    until_s = min(answer.times_s[-1] for answer in answers)
    num_between = sum(
        count
        for answer in answers
        for at_s, count in zip(answer.times_s, answer.counts, strict=True)
        if from_s < at_s <= until_s
    )
    return RingRates(
        tokens_per_s=num_between / (until_s - from_s) if until_s > from_s else None,
        first_token_s=median(answer.times_s[0] for answer in answers) - start_s,
        tokens=tuple(answers[0].tokens),
        stats=answers[0].stats,
    )


async def _answer(coordinator: Coordinator, prompt: Sequence[int], num_tokens: int) -> _Answer:
    tokens: list[int] = []
    counts: list[int] = []
    times_s: list[float] = []
    stats: GenerationStats | None = None
    async for part in coordinator.generate(GenerationRequest(tuple(prompt), num_tokens, uses_cache=False)):
        times_s.append(time.perf_counter())
        counts.append(len(part.tokens))
        tokens += part.tokens
        stats = part.stats
    assert stats is not None
    return _Answer(tokens, counts, times_s, stats)
