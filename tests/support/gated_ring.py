"""A ring whose schedule is a choice: messages pass and fake stages compute only when they are let.

Everything of the project is real: stages' services, queues and workers, the coordinator, gRPC on loopback.
Only these are put in between:

- a *gate* in each direction of every stream. What a side writes is held there, in order, before gRPC has it.
  `GatedRing.pass_on` lets the oldest message of one gate go. Between streams there is no order: so a Close
  can overtake the Open of its session, as it can in a network. Greetings and pings pass by themselves.
- a gate before each batch of each stage, in the thread that computes.
- a clock that stands still: `StillLoop` is an event loop whose time only `GatedRing.pass_time` moves,
  and each message or batch by a millisecond.

Whatever is let go is waited for until the process is *quiet*: what passed has arrived, every stage's thread
waits (for work, or at its gate), every stream that ended has ended on both sides, and the event loop has
nothing to run. Each of these is counted, none is guessed from time, so the same choices give the same run:
that is what lets hypothesis shrink a schedule, and replay it. A process that does not become quiet within
`_REAL_GUARD_S` of real time is an error.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import itertools
import math
import threading
import time
from typing import TYPE_CHECKING, Any, Final

import grpc
import structlog

import mesh.coordinator.stage_streams
import stages.serving.kv_replication
import stages.serving.stage_engine
import stages.transport.links
from mesh.coordinator.ring import StageAddress
from spanmesh_proto import windows_pb2_grpc as rpc
from stages.serving.composition import PlugOptions
from stages.serving.scheduler import WindowScheduler
from stages.serving.sent_rows import LEAST_SENT_BYTES
from stages.serving.server import StageService
from stages.transport.channels import SERVER_OPTIONS, open_channel
from tests.support.disks import give_disk
from tests.support.fake_recurrent import FakeRecurrentRuntime
from tests.support.fake_stage import FakeRuntime
from tests.support.gated_streams import STREAM_HEADER, GatedChannel, GatedStage
from tests.support.gates import (
    BatchGate,
    Choice,
    Gate,
    StillLoop,
    Stream,
    WatchedArrivals,
    next_batch,
    next_message,
)
from tests.support.repairable_ring import NUM_STAGES, RepairableRing
from tests.support.ring_harness import RunningStage

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterator
    from pathlib import Path

    import pytest


_REAL_GUARD_S: Final = 60.0
_NEWS_S: Final = 0.5
# What passing a message or computing a batch takes, by the clock that stands still otherwise.
_TICK_S: Final = 0.001


class GatedRing(RepairableRing):
    """Fake stages behind real services, whose messages and batches wait until they are let.

    Make it, and everything around it, in a `StillLoop`, within `watched`.

    Args:
        num_slots: Of each stage.
        is_followed: Whether each stage has a copy that follows it, and takes its place when it is lost.
        disk_root: If given, stages keep blocks there; reading and writing take no time.
        num_checkpoints: If not 0, slots have recurrent state, and so many checkpoints each.
        most_sent_bytes: How much of what they sent on stages keep; a row takes 4.
    """

    def __init__(
        self,
        *,
        num_slots: int,
        is_followed: bool = False,
        disk_root: Path | None = None,
        num_checkpoints: int = 0,
        most_sent_bytes: int = LEAST_SENT_BYTES,
    ) -> None:
        super().__init__(
            news_s=_NEWS_S if is_followed else None, disk_root=disk_root, most_sent_bytes=most_sent_bytes
        )
        self.num_slots = num_slots
        self.num_checkpoints = num_checkpoints
        loop = asyncio.get_running_loop()
        assert isinstance(loop, StillLoop)
        self.loop = loop
        self.streams: dict[int, Stream] = {}
        self.batches: dict[str, BatchGate] = {}
        self._stream_ids = itertools.count(1)
        self._num_doing = 0
        self._changed = asyncio.Event()
        self._names: dict[str, str] = {}
        self._numbers = itertools.count()
        # The gate of the stage that is being made, for its queue.
        self.gate_of_next: BatchGate | None = None
        self._waits_since_s = math.inf
        self._is_stuck = False
        self._is_closed = threading.Event()
        threading.Thread(target=self._guard, daemon=True).start()

    # What can happen.

    def choices(self) -> list[Choice]:
        """All that waits to be let, in an order that depends on what happened before alone."""
        held = [gate for stream in self.streams.values() for gate in stream.gates if gate.held]
        # Streams may have begun at the same time.
        gates = sorted(held, key=lambda gate: gate.name)
        passing = [
            Choice(functools.partial(next_message, gate), functools.partial(self.pass_on, gate))
            for gate in gates
        ]
        computing = [
            Choice(functools.partial(next_batch, name, gate), functools.partial(self._compute, gate))
            for name, gate in sorted(self.batches.items())
            if gate.waiting
        ]
        return passing + computing

    async def pass_on(self, gate: Gate) -> None:
        """Let the oldest message of a gate go."""
        await self._tick()
        _message, let_go = gate.held.popleft()
        await let_go()

    async def _compute(self, gate: BatchGate) -> None:
        await self._tick()
        gate.let_one()

    async def _tick(self) -> None:
        """Whatever happens takes a moment. What timers bring about comes before it."""
        await self.pass_time(_TICK_S)
        await self.quiet()

    async def pass_time(self, seconds: float) -> None:
        """Move the clock: timers that are due fire."""
        self.loop.now_s += seconds

    async def quiet(self) -> None:
        """Wait until nothing more happens by itself.

        Raises:
            TimeoutError: If that takes longer than any machine can need: something is not counted.
        """
        loop = self.loop
        num_idle = 0
        while num_idle < 2:
            self._changed.clear()
            await asyncio.sleep(0)
            if loop.has_work:
                num_idle = 0
            elif self._is_quiet() and not loop.has_work:
                num_idle += 1
            else:
                num_idle = 0
                self._waits_since_s = time.monotonic()
                await self._changed.wait()
                self._waits_since_s = math.inf
                if self._is_stuck:
                    raise TimeoutError(f"not quiet after {_REAL_GUARD_S:g} s: {self._restless()}")

    def _guard(self) -> None:
        """In a thread of its own: wakes `quiet` if that waits in vain."""
        while not self._is_closed.wait(_REAL_GUARD_S / 10):
            if time.monotonic() - self._waits_since_s > _REAL_GUARD_S:
                self._is_stuck = True
                self.loop.call_soon_threadsafe(self._changed.set)
                return

    def _is_quiet(self) -> bool:
        return (
            not self._num_doing
            and all(gate.is_quiet for gate in self.batches.values())
            and all(stream.is_quiet for stream in self.streams.values())
        )

    def _restless(self) -> str:
        batches = [name for name, gate in self.batches.items() if not gate.is_quiet]
        streams = [stream for stream in self.streams.values() if not stream.is_quiet]
        return f"{self._num_doing} I/O, {batches}, {streams}"

    @property
    def is_clear(self) -> bool:
        """Whether nothing is under way: no message is held, and no stage has anything to compute."""
        return not self.choices()

    # The ring.

    async def kill(self, index: int, is_dead: threading.Event | None = None) -> None:
        stage, self.stages[index] = self.stages[index], None
        if stage is not None:
            await self._end(stage)

    async def close(self) -> None:
        for gate in self.batches.values():
            gate.open()
        for index in range(NUM_STAGES):
            await self.kill(index)
            if (copy := self.copies[index]) is not None:
                await self._end(copy)
        self._is_closed.set()

    async def _end(self, stage: RunningStage) -> None:
        name = self._names.pop(stage.address.address)
        with self.doing():
            await stage.server.stop(0)
            if stage.service._engine.next is not None:
                await stage.service._engine.next.close()
            self.batches[name].open()
            await stage.service.close()
        del self.batches[name]

    async def _start(self, index: int) -> RunningStage:
        name = f"stage {index} ({next(self._numbers)})"
        self.gate_of_next = gate = BatchGate(lambda: self.loop.call_soon_threadsafe(self._changed.set))
        make: Callable[..., FakeRuntime] = FakeRuntime
        if self.num_checkpoints:
            make = functools.partial(FakeRecurrentRuntime, num_checkpoints=self.num_checkpoints)
        runtime = make(index, NUM_STAGES, num_slots=self.num_slots, is_poisoned=True, on_decode=gate.hold)
        service = StageService(
            runtime,  # type: ignore[arg-type]  # a fake has all that a stage uses
            stage_index=index,
            mesh_id=self.mesh_id,
            mesh_key=self.mesh_key,
            term=self.term,
            most_sent_bytes=self._most_sent_bytes,
            plug_options=PlugOptions(pause_s=lambda _took_s: _NEWS_S),
            computes_in_loop=False,  # gates hold it
        )
        if self.disk_root is not None:
            await give_disk(service, self.disk_root, index, is_inline=True)
        self.batches[name] = gate
        server = grpc.aio.server(interceptors=[service.key_check], options=SERVER_OPTIONS)
        rpc.add_StageServicer_to_server(GatedStage(self, service), server)
        port = server.add_insecure_port("127.0.0.1:0")
        with self.doing():
            await server.start()
        address = f"127.0.0.1:{port}"
        self._names[address] = name
        return RunningStage(service, server, StageAddress("local", address, runtime.info.layers))

    # What is in between.

    @contextlib.contextmanager
    def doing(self) -> Iterator[None]:
        """Something real that takes its time: nothing is quiet until it is done."""
        self._num_doing += 1
        try:
            yield
        finally:
            self._num_doing -= 1
            self._changed.set()

    def changed(self) -> None:
        """Have `quiet` look again."""
        self._changed.set()

    def begin(self, caller: str, address: str, what: str) -> tuple[int, Stream]:
        """A call leaves."""
        callee = self._names.get(address, "nobody")
        stream = Stream(caller, Gate(f"{what}, {caller} -> {callee}"), Gate(f"{what}, {callee} -> {caller}"))
        number = next(self._stream_ids)
        self.streams[number] = stream
        return number, stream

    def end_calls_of(self, caller: str) -> None:
        """End streams as if their caller's process died: what is held is lost."""
        for stream in self.streams.values():
            if stream.caller == caller and not stream.is_over:
                stream.end()

    def over(self, stream: Stream) -> None:
        """The caller's side has seen the end."""
        stream.is_over = True
        stream.forth.held.clear()
        stream.back.held.clear()
        self._forget_ended()
        self._changed.set()

    def _forget_ended(self) -> None:
        ended = [number for number, stream in self.streams.items() if stream.is_over and not stream.is_served]
        for number in ended:
            del self.streams[number]

    @contextlib.contextmanager
    def serving(self, context: grpc.aio.ServicerContext[Any, Any]) -> Iterator[Stream]:
        """The handler of a call runs."""
        number = int(str(dict(context.invocation_metadata() or ())[STREAM_HEADER]))
        stream = self.streams.get(number)
        if stream is None:
            # Its caller gave up before it came here.
            stream = Stream("nobody", Gate("nobody"), Gate("nobody"), is_over=True)
            self.streams[number] = stream
        stream.has_begun = stream.is_served = True
        self._changed.set()
        try:
            yield stream
        finally:
            stream.is_served = False
            stream.forth.held.clear()
            self._forget_ended()
            self._changed.set()

    async def read(self, gate: Gate, read: Awaitable[Any]) -> Any:
        """Wait for what passes a gate, and count it."""
        gate.is_read = True
        try:
            message = await read
        finally:
            gate.is_read = False
            self._changed.set()
        gate.num_arrived += 1
        return message


@contextlib.contextmanager
def watched(patch: pytest.MonkeyPatch, ring_of: Callable[[], GatedRing | None]) -> Iterator[None]:
    """Have channels and queues that are made meanwhile be those of a ring.

    Args:
        patch: Takes everything back.
        ring_of: The ring that is being used.
    """

    def open_gated(address: str, host: str, identity: Any) -> Any:
        ring = ring_of()
        assert ring is not None
        return GatedChannel(ring, open_channel(address, host, identity), address)

    def now_us() -> int:
        ring = ring_of()
        assert ring is not None
        return int(ring.loop.time() * 1e6)

    class WatchedQueue(WindowScheduler):
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options)
            ring = ring_of()
            assert ring is not None
            assert ring.gate_of_next is not None
            self._arrivals = WatchedArrivals(ring.gate_of_next)  # type: ignore[assignment]

    with patch.context() as patched:
        for module in (
            mesh.coordinator.stage_streams,
            stages.transport.links,
            stages.serving.kv_replication,
        ):
            patched.setattr(module, "open_channel", open_gated)
        patched.setattr(stages.serving.stage_engine, "WindowScheduler", WatchedQueue)
        patched.setattr(stages.serving.stage_engine, "monotonic_us", now_us)
        with silent():
            yield


@contextlib.contextmanager
def silent() -> Iterator[None]:
    """Log nothing: a search says everything thousands of times."""
    was = structlog.get_config()
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger("critical"))
    try:
        yield
    finally:
        structlog.configure(**was)
