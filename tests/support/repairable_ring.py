"""A ring of fake stages whose stages can die, be moved and be made anew, while a coordinator runs."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import threading
from typing import TYPE_CHECKING

import grpc

from mesh.coordinator.coordinator import Coordinator
from mesh.coordinator.ring import StageAddress
from spanmesh_proto import windows_pb2_grpc as rpc
from stages.serving.composition import PlugOptions
from stages.serving.kv_replication import Replication
from stages.serving.sent_rows import LEAST_SENT_BYTES
from stages.serving.server import StageService
from stages.transport.channels import SERVER_OPTIONS
from tests.support.disks import give_disk
from tests.support.fake_stage import FakeRuntime
from tests.support.ring_harness import RunningStage, beside, plugs_for

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Sequence
    from pathlib import Path

    from mesh.coordinator.options import CoordinatorOptions
    from stages.runtime.spans import Span
    from stages.runtime.stage_runtime import StageRuntime

NUM_STAGES = 3


class RepairableRing:
    """Stages in one process, each behind a server of its own.

    Args:
        on_decode: Called before each batch with the index of the stage, in the thread that computes there.
        make_runtime: Loads a stage; None makes fake ones.
        most_sent_bytes: How much of what they sent on stages keep; a fake one's row takes 4.
        news_s: If given, every stage has a copy that takes its place, and is told news so often.
        disk_root: If given, stages keep blocks there.
        assistant: If given, an assistant of this file drafts beside the tail.

    Attributes:
        coordinator: Set by `serving`.
        num_repairs: Rings made after the first.
        term: Of the coordinator, as stages are told.
    """

    def __init__(
        self,
        on_decode: Callable[[int, Sequence[Span]], None] = lambda _index, _spans: None,
        make_runtime: Callable[[int], StageRuntime | FakeRuntime] | None = None,
        most_sent_bytes: int = LEAST_SENT_BYTES,
        news_s: float | None = None,
        disk_root: Path | None = None,
        assistant: Path | None = None,
    ) -> None:
        self.disk_root = disk_root
        self.assistant = assistant
        self.copies: list[RunningStage | None] = [None] * NUM_STAGES
        self._news_s = news_s
        self.coordinator: Coordinator
        self.num_repairs = 0
        self.term = 0
        self.stages: list[RunningStage | None] = [None] * NUM_STAGES
        self._on_decode = on_decode
        self._make_runtime = make_runtime or self._fake
        self._most_sent_bytes = most_sent_bytes
        self._keys = itertools.count()
        self.mesh_id = self.mesh_key = ""

    async def fill(self) -> list[StageAddress]:
        """Start a stage where there is none, have the others rejoin, and link all of them."""
        number = next(self._keys)
        self.mesh_id, self.mesh_key = f"ring {number}", f"key {number}"
        for index, stage in enumerate(self.stages):
            replica = self.copies[index]
            if stage is not None:
                await stage.service.rejoin(index, self.mesh_id, self.mesh_key, self.term)
            elif replica is not None:
                await replica.service.rejoin(index, self.mesh_id, self.mesh_key, self.term)
                self.stages[index], self.copies[index] = replica, None
            else:
                self.stages[index] = await self._start(index)
        stages = self.running
        for stage, following in itertools.pairwise(stages):
            await stage.service.connect(following.address.address)
        if self._news_s is not None:
            await self._follow()
        return [stage.address for stage in stages]

    @property
    def running(self) -> list[RunningStage]:
        """All stages, where none is missing."""
        return [stage for stage in self.stages if stage is not None]

    def furthest(self) -> int:
        """Tokens of the longest answer that is under way; -1 if none is."""
        sessions = self.coordinator._sessions.values()
        return max((len(session._generation._committed) for session in sessions), default=-1)

    async def kill(self, index: int, is_dead: threading.Event | None = None) -> None:
        """End a stage as if its process died: all its streams at once; says when they have."""
        stage, self.stages[index] = self.stages[index], None
        if stage is not None:
            await stage.server.stop(0)
            if stage.service._engine.next is not None:
                await stage.service._engine.next.close()
        if is_dead is not None:
            is_dead.set()
        if stage is not None:
            await stage.service.close()

    async def repair(self) -> None:
        """What `mesh serve` does after a loss, without Ray."""
        addresses = await self.fill()
        await self.coordinator.reconnect(addresses, self.mesh_id, self.mesh_key)
        self.num_repairs += 1

    async def keep_whole(self) -> None:
        """Repair again and again; a stage may die meanwhile."""
        while True:
            await self.coordinator.broken()
            with contextlib.suppress(Exception):
                await self.repair()

    async def close(self) -> None:
        for index in range(NUM_STAGES):
            await self.kill(index)
            if (replica := self.copies[index]) is not None:
                await replica.server.stop(0)
                await replica.service.close()

    async def _follow(self) -> None:
        for index, stage in enumerate(self.running):
            replica = self.copies[index] or await self._start(index)
            self.copies[index] = replica
            replication = replica.service.plug_of(Replication)
            if replication is not None:
                await replication.follow(stage.address.address, "", self.mesh_id, self.mesh_key, self.term)

    async def _start(self, index: int) -> RunningStage:
        runtime = self._make_runtime(index)
        service = StageService(
            runtime,  # type: ignore[arg-type]  # a fake has all that a stage uses
            stage_index=index,
            mesh_id=self.mesh_id,
            mesh_key=self.mesh_key,
            most_sent_bytes=self._most_sent_bytes,
            plug_options=PlugOptions(
                pause_s=lambda _took_s: self._news_s or 0.0,
                assistant=beside(runtime, self.assistant),
            ),
            # Fakes stand still where a test wants it, and all stages share this event loop.
            computes_in_loop=not isinstance(runtime, FakeRuntime),
        )
        if self.disk_root is not None:
            await give_disk(service, self.disk_root, index)
        server = grpc.aio.server(interceptors=[service.key_check], options=SERVER_OPTIONS)
        rpc.add_StageServicer_to_server(service, server)
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        return RunningStage(service, server, StageAddress("local", f"127.0.0.1:{port}", runtime.info.layers))

    def _fake(self, index: int) -> FakeRuntime:
        return FakeRuntime(
            index, NUM_STAGES, is_poisoned=True, on_decode=lambda spans: self._on_decode(index, spans)
        )


class Deaths:
    """Which stages die, and when: batches of the whole ring are counted.

    Args:
        at: Number of a batch to the index of the stage that dies as it is computed; -1 is the one that
            computes it.
    """

    def __init__(self, at: dict[int, int]) -> None:
        self.ring: RepairableRing
        self.num_died = 0
        self._at = at
        self._num_batches = 0
        self._lock = threading.Lock()
        self._loop = asyncio.get_running_loop()
        self.dying: set[asyncio.Task[None]] = set()

    def __call__(self, index: int, _spans: Sequence[Span]) -> None:
        """Before a batch, in the thread that computes it."""
        with self._lock:
            self._num_batches += 1
            dies = self._at.get(self._num_batches)
        if dies is not None:
            self._loop.call_soon_threadsafe(self._kill, index if dies < 0 else dies)

    def _kill(self, index: int) -> None:
        self.num_died += 1
        task = asyncio.ensure_future(self.ring.kill(index))
        self.dying.add(task)


def replication_of(stage: RunningStage) -> Replication:
    replication = stage.service.plug_of(Replication)
    assert replication is not None
    return replication


@contextlib.asynccontextmanager
async def serving(
    ring: RepairableRing, options: CoordinatorOptions, **more: object
) -> AsyncIterator[Coordinator]:
    """A coordinator over the ring, which is repaired whenever it breaks."""
    stages = await ring.fill()
    ring.coordinator = Coordinator(
        stages,
        options,
        mesh_id=ring.mesh_id,
        mesh_key=ring.mesh_key,
        **{  # type: ignore[arg-type]
            "plugs": plugs_for(),
            "make_proposers": None,
            "clock_s": asyncio.get_running_loop().time,
            **more,
        },
    )
    await ring.coordinator.start()
    keeper = asyncio.create_task(ring.keep_whole())
    try:
        yield ring.coordinator
    finally:
        keeper.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await keeper
        await ring.coordinator.stop()
        await ring.close()
