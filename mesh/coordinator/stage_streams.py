"""Control and verdict streams of the coordinator, and clock offsets of the stages."""

from __future__ import annotations

import asyncio
import contextlib
import functools
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import grpc
import structlog

from spanmesh_proto import windows_pb2 as wire
from spanmesh_proto import windows_pb2_grpc as rpc
from spanmesh_proto.errors import HostUnreachable, MeshError, StageFailed
from speculative.acceptance import StageMeasure
from stages.transport.channels import key_metadata, open_channel
from stages.transport.links import explain

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from stages.transport.channels import Identity

# Clock filter of NTP (Mills, RFC 5905): of the latest queries the one with the shortest round trip waited
# least, so its two directions are the most alike, and half of its round trip bounds the error. At four
# queries a second these are 4 s: two clocks drift apart by less than half a millisecond.
_NUM_SAMPLES = 16
_ABOUT_BLOCKS = frozenset({"block_news", "fetched"})

log = structlog.get_logger()


class _Sample(NamedTuple):
    rtt_us: int
    offset_us: int


class ClockOffset:
    """Clock offset and round trip of one stage."""

    def __init__(self) -> None:
        self._samples: deque[_Sample] = deque(maxlen=_NUM_SAMPLES)
        # Asked for with every window, and found anew with every reply.
        self._best: _Sample | None = None

    def add(self, sent_us: int, stage_us: int, received_us: int) -> None:
        """Record a reply.

        Args:
            sent_us: When the query left, by the coordinator's clock.
            stage_us: When the stage replied, by its own clock.
            received_us: When the reply arrived, by the coordinator's clock.
        """
        self._samples.append(_Sample(received_us - sent_us, stage_us - (sent_us + received_us) // 2))
        self._best = min(self._samples)

    @property
    def rtt_us(self) -> int | None:
        """Shortest of the latest round trips; None before the first."""
        return None if self._best is None else self._best.rtt_us

    @property
    def offset_us(self) -> int | None:
        """The stage's clock minus the coordinator's; None before the first reply."""
        return None if self._best is None else self._best.offset_us


class ControlStream:
    """Out-of-band stream to one stage: cancels, closes and pings out; failures and replies back.

    Args:
        address: `host:port` of the stage.
        hello: First message, with the protocol version.
        mesh_key: Key shared by all stages and the coordinator.
        on_failure: Called with each failure that the stage reports.
        on_reply: Called with each reply to a ping.
        on_lost: Called once with the reason when the stream ends without `close`.
        clock_us: Monotonic, microseconds.
        host: Name of the host that must answer at the address.
        identity: TLS identity of this process; None if both ends are in one process.
        on_other: Called with each other reply but failures.

    Attributes:
        clock: Clock offset and round trip of the stage.
        latest: The stage's latest reply to a ping; None before the first.
    """

    def __init__(
        self,
        address: str,
        hello: wire.Hello,
        mesh_key: str,
        *,
        on_failure: Callable[[wire.Failure], None],
        on_reply: Callable[[], None],
        on_lost: Callable[[MeshError], None],
        clock_us: Callable[[], int],
        host: str = "",
        identity: Identity | None = None,
        on_other: Callable[[wire.ControlReply], None] = lambda _reply: None,
    ) -> None:
        self.clock = ClockOffset()
        self.latest: wire.Pong | None = None
        self._on_other = on_other
        self._clock_us = clock_us
        self._address = address
        self._hello = hello
        self._on_failure = on_failure
        self._on_reply = on_reply
        self._on_lost = on_lost
        self._channel = open_channel(address, host, identity)
        self._call: grpc.aio.StreamStreamCall[wire.ControlRequest, wire.ControlReply] = rpc.StageStub(
            self._channel
        ).Control(metadata=key_metadata(mesh_key))
        self._requests: asyncio.Queue[wire.ControlRequest] = asyncio.Queue()
        self._pongs: dict[int, asyncio.Future[wire.Pong]] = {}
        self._last_ping_us = 0
        self._tasks: list[asyncio.Task[None]] = []

    async def open(self, timeout_s: float = 10) -> wire.Welcome:
        """Shake hands.

        Raises:
            ProtocolVersionMismatch: If the stage speaks another version.
            HostUnreachable: If the stage does not answer in time.
        """
        async with _answer_of(self._address, timeout_s):
            await self._call.write(wire.ControlRequest(hello=self._hello))
            reply = await self._call.read()
        if not isinstance(reply, wire.ControlReply):
            raise StageFailed(f"{self._address} closed the control stream: {await self._call.details()}")
        self._tasks = [asyncio.create_task(self._write()), asyncio.create_task(self._read())]
        return reply.welcome

    def cancel(self, session: int, epoch: int) -> None:
        """Void the session's windows below `epoch`."""
        self._requests.put_nowait(wire.ControlRequest(cancel=wire.Cancel(session=session, epoch=epoch)))

    def close_session(self, session: int, keep: wire.Keep | None = None) -> None:
        """End the session and free its slot.

        Args:
            session: Its id.
            keep: Blocks of the slot that the stage is to keep on disk, if there are any.
        """
        self._requests.put_nowait(wire.ControlRequest(close=wire.Close(session=session, keep=keep)))

    def fetch(self, fetch: wire.Fetch) -> None:
        """Have the stage read blocks from its disk."""
        self._requests.put_nowait(wire.ControlRequest(fetch=fetch))

    def ask(self) -> None:
        """Send a ping; `on_reply` is called with its reply."""
        self._requests.put_nowait(wire.ControlRequest(ping=wire.Ping(sent_us=self._now_us())))

    async def ping(self, timeout_s: float = 2) -> wire.Pong:
        """Counters of the stage.

        Raises:
            TimeoutError: If the stage does not answer in time.
        """
        number = self._now_us()
        pong: asyncio.Future[wire.Pong] = asyncio.get_running_loop().create_future()
        self._pongs[number] = pong
        self._requests.put_nowait(wire.ControlRequest(ping=wire.Ping(sent_us=number)))
        try:
            async with asyncio.timeout(timeout_s):
                return await pong
        finally:
            del self._pongs[number]

    def _now_us(self) -> int:
        self._last_ping_us = max(self._clock_us(), self._last_ping_us + 1)
        return self._last_ping_us

    async def close(self, *, is_lost: bool = False) -> None:
        """End the stream.

        Args:
            is_lost: Whether the stage is lost; if not, queued messages leave first.
        """
        await _finish(self._tasks, None if is_lost else self._requests)
        self._call.cancel()
        await self._channel.close(None)

    async def _write(self) -> None:
        try:
            while True:
                await self._call.write(await self._requests.get())
                self._requests.task_done()
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
            pass  # see `_read`
        except Exception as error:
            # Neither would be sent any more: ends of sessions, and pings.
            log.exception("control_failed", address=self._address)
            self._on_lost(StageFailed(f"the coordinator failed to write to {self._address}: {error!r}"))

    async def _read(self) -> None:
        reason: MeshError = StageFailed(f"the control stream to {self._address} ended")
        try:
            while isinstance(reply := await self._call.read(), wire.ControlReply):
                if reply.WhichOneof("kind") == "failure":
                    self._on_failure(reply.failure)
                elif reply.WhichOneof("kind") == "pong":
                    self._on_reply()
                    self.latest = reply.pong
                    self.clock.add(reply.pong.sent_us, reply.pong.stage_us, self._clock_us())
                    if (pong := self._pongs.get(reply.pong.sent_us)) is not None and not pong.done():
                        pong.set_result(reply.pong)
                elif reply.WhichOneof("kind") in _ABOUT_BLOCKS:
                    self._on_other(reply)
        except grpc.aio.AioRpcError as error:
            reason = explain(error, self._address)
        except Exception as error:
            # Failures of windows come over this stream only.
            log.exception("control_failed", address=self._address)
            reason = StageFailed(f"the coordinator failed on what {self._address} sent: {error!r}")
        self._on_lost(reason)


@dataclass(frozen=True)
class BatchTimes:
    """Times of a batch, shared by its verdicts."""

    stages: tuple[wire.StageTime, ...]
    """Of each stage, in pipeline order."""

    @functools.cached_property
    def measures(self) -> tuple[StageMeasure, ...]:
        """Times for cost models; empty if a stage did not compute the batch."""
        if not all(time.num_rows for time in self.stages):
            return ()
        return tuple(
            StageMeasure(time.num_rows, time.queue_us / 1000, time.compute_us / 1000) for time in self.stages
        )


class VerdictStream:
    """Stream of verdicts from the tail.

    Args:
        address: `host:port` of the tail.
        hello: First message, with the protocol version.
        mesh_key: Key shared by all stages and the coordinator.
        on_verdict: Called with each verdict, and the times of its batch.
        on_bundle: Called with each message, before its verdicts.
        on_lost: Called once with the reason when the stream ends without `close`.
        host: Name of the host that must answer at the address.
        identity: TLS identity of this process; None if both ends are in one process.

    Attributes:
        num_bundles: Messages so far.
        num_received_bytes: Size of all verdicts so far.
    """

    def __init__(
        self,
        address: str,
        hello: wire.Hello,
        mesh_key: str,
        *,
        on_verdict: Callable[[wire.Verdict, BatchTimes], None],
        on_bundle: Callable[[wire.VerdictBundle], None],
        on_lost: Callable[[MeshError], None],
        host: str = "",
        identity: Identity | None = None,
    ) -> None:
        self.num_bundles = 0
        self.num_received_bytes = 0
        self._address = address
        self._on_verdict = on_verdict
        self._on_bundle = on_bundle
        self._on_lost = on_lost
        self._channel = open_channel(address, host, identity)
        self._call: grpc.aio.UnaryStreamCall[wire.Hello, wire.VerdictBundle] = rpc.StageStub(
            self._channel
        ).Verdicts(hello, metadata=key_metadata(mesh_key))
        self._tasks: list[asyncio.Task[None]] = []

    async def open(self, timeout_s: float = 10) -> None:
        """Wait until the tail has accepted the stream.

        Raises:
            HostUnreachable: If the tail does not answer in time.
            ProtocolError: If it refuses.
        """
        async with _answer_of(self._address, timeout_s):
            await self._call.initial_metadata()
        self._tasks = [asyncio.create_task(self._read())]

    async def close(self) -> None:
        """End the stream."""
        await _finish(self._tasks)
        self._call.cancel()
        await self._channel.close(None)

    async def _read(self) -> None:
        reason: MeshError = StageFailed(f"the verdict stream from {self._address} ended")
        try:
            while isinstance(bundle := await self._call.read(), wire.VerdictBundle):
                self._on_bundle(bundle)
                times = BatchTimes(tuple(bundle.times))
                for verdict in bundle.verdicts:
                    self._on_verdict(verdict, times)
                self.num_bundles += 1
                self.num_received_bytes += bundle.ByteSize()
        except grpc.aio.AioRpcError as error:
            reason = explain(error, self._address)
        except Exception as error:
            # Every session waits for verdicts from this stream.
            log.exception("verdicts_failed", address=self._address)
            reason = StageFailed(f"the coordinator failed on what {self._address} sent: {error!r}")
        self._on_lost(reason)


@contextlib.asynccontextmanager
async def _answer_of(address: str, timeout_s: float) -> AsyncIterator[None]:
    """Wait for the first message of a peer; the error names the peer if none comes."""
    try:
        async with asyncio.timeout(timeout_s):
            yield
    except TimeoutError:
        raise HostUnreachable(f"{address} does not answer within {timeout_s:g} s") from None
    except grpc.aio.AioRpcError as error:
        raise explain(error, address) from None


async def _finish(
    tasks: list[asyncio.Task[None]], outgoing: asyncio.Queue[wire.ControlRequest] | None = None
) -> None:
    if outgoing is not None and tasks:
        emptied = asyncio.ensure_future(outgoing.join())
        # The writing task ends with the stream.
        await asyncio.wait({emptied, tasks[0]}, timeout=0.5, return_when=asyncio.FIRST_COMPLETED)
        emptied.cancel()
    for task in tasks:
        task.cancel()
    for task in tasks:
        with contextlib.suppress(asyncio.CancelledError):
            await task
