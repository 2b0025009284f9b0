"""Fuzzing of gRPC, beside a session that must continue."""

from __future__ import annotations

import asyncio
import contextlib
import datetime as dt
import tempfile
import time
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any, Final

import grpc
from google.protobuf.message import DecodeError

from mesh.cluster.certificates import Authority, make_certificate
from mesh.coordinator.stage_streams import BatchTimes, ControlStream, VerdictStream
from spanmesh_proto import PROTOCOL_VERSION
from spanmesh_proto import windows_pb2 as wire
from spanmesh_proto.errors import MeshError
from stages.sampling.sampler import SamplingParams
from stages.sampling.session_spec import SessionSpec
from stages.transport.channels import key_metadata, open_channel
from stages.transport.links import StageLink
from tests.qualification.fuzz.gguf_fuzz import small_layout, write_layout
from tests.qualification.fuzz.grpc_frames import HostilePeer
from tests.qualification.fuzz.grpc_target import HOST, MESH_ID, MESH_KEY, TERM, Served, StageProcess
from tests.qualification.fuzz.report import Tally

if TYPE_CHECKING:
    from stages.transport.channels import Identity
    from tests.qualification.fuzz.report import FuzzOptions, FuzzReport

_PROMPT: Final = (5, 300, 7, 900, 11, 12, 13, 500)
_NUM_STEPS: Final = 4
_SAMPLING: Final = SamplingParams(temperature=0.7, top_k=40, seed=17, frequency_penalty=0.5)
_LINK: Final = "/spanmesh.windows.Stage/Link"
_CONTROL: Final = "/spanmesh.windows.Stage/Control"
_FOLLOW: Final = "/spanmesh.windows.Stage/Follow"
_HELLO: Final = wire.Hello(protocol_version=PROTOCOL_VERSION, mesh_id=MESH_ID, sender="fuzz", term=TERM)
_GREETINGS: Final = {
    _LINK: wire.Frame(hello=_HELLO).SerializeToString(),
    _CONTROL: wire.ControlRequest(hello=_HELLO).SerializeToString(),
}
_EOF: Final[Any] = grpc.aio.EOF  # type: ignore[attr-defined]  # not in the stubs
_PATIENCE_S: Final = 20.0
# A replica gets what exists at once, and then waits for more.
_FOLLOWED_S: Final = 0.1
# Frames of one stream; and of every so many messages one goes to Control instead of the Link.
_STREAM_FRAMES: Final = 100
_CONTROL_EVERY: Final = 8
_NUM_CHECKS: Final = 40
# Memory that the last streams needed is handed back little by little.
_SETTLE_S: Final = 0.5
_NUM_LOOKS: Final = 3
# What a peer is never to blame for.
_FAULTS: Final = (grpc.StatusCode.INTERNAL, grpc.StatusCode.UNKNOWN)


class _GrpcAttack:
    """One run against one process."""

    def __init__(self, options: FuzzOptions, process: StageProcess, identity: Identity) -> None:
        self._options = options
        self._process = process
        self._identity = identity
        self._tally = Tally("grpc", options, time.monotonic)
        # Not for secrets: the same seed must make the same frames.
        self._random = Random(options.seed)
        self._num_sessions = 1_000_000
        self._latest = b""
        self._watches = [self._watch(stage) for stage in process.stages]
        self._channels = {
            stage.address: open_channel(stage.address, HOST, identity) for stage in process.stages
        }

    async def run(self) -> FuzzReport:
        for watch in self._watches:
            await watch.open()
        try:
            await self._attack()
        finally:
            for watch in self._watches:
                await watch.close()
            for channel in self._channels.values():
                await channel.close(None)
        return self._tally.report()

    async def _attack(self) -> None:
        options, tally = self._options, self._tally
        expected = await self._answers()
        check_every = max(options.num_cases // _NUM_CHECKS, _STREAM_FRAMES)
        next_check = check_every
        while tally.num_cases < options.num_cases:
            stage = self._random.choice(self._process.stages)
            await self._stream(stage, min(_STREAM_FRAMES, options.num_cases - tally.num_cases))
            if not self._process.is_alive:
                tally.fail("crash", self._latest, "the stages' process is gone")
                return
            if tally.num_cases >= next_check:
                next_check += check_every
                if not await self._are_well(expected):
                    return
                tally.sample_memory(await self._settled_bytes())

    async def _settled_bytes(self) -> int:
        """Least of several measurements: memory of streams is freed, leaks stay."""
        looks = []
        for _ in range(_NUM_LOOKS):
            await asyncio.sleep(_SETTLE_S)
            looks.append(self._process.memory_bytes())
        return min(looks)

    async def _stream(self, stage: Served, num_frames: int) -> None:
        """Some frames over one Link, requests over one Control beside it, and a copy at the end."""
        peer = HostilePeer(stage.shape, self._random)
        channel = self._channels[stage.address]
        link, control = await self._open(channel, _LINK), await self._open(channel, _CONTROL)
        for number in range(num_frames - 1):
            if number % _CONTROL_EVERY == _CONTROL_EVERY - 1:
                control = await self._feed(channel, control, _CONTROL, peer.control())
            else:
                link = await self._feed(channel, link, _LINK, peer.frame())
        await self._follow(channel, peer.follow(_HELLO))
        for call in (link, control):
            await call.done_writing()
            await self._ended(call)

    async def _follow(self, channel: Any, data: bytes) -> None:
        """One replica that connects and leaves."""
        self._latest = data
        call = channel.unary_stream(_FOLLOW)(data, metadata=key_metadata(MESH_KEY))
        try:
            async with asyncio.timeout(_FOLLOWED_S):
                while await call.read() is not _EOF:
                    pass
        except TimeoutError:
            call.cancel()
            self._tally.count("taken")
        except grpc.aio.AioRpcError:
            self._tally.count(await self._ended(call))
        else:
            self._tally.count(await self._ended(call))

    async def _feed(self, channel: Any, call: Any, method: str, data: bytes) -> Any:
        """One message; the call to go on with, a new one if the message ended it."""
        self._latest = data
        with contextlib.suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
            await call.write(data)
        if call.done() or _ends_stream(method, data):
            self._tally.count(await self._ended(call))
            return await self._open(channel, method)
        self._tally.count("taken")
        return call

    async def _open(self, channel: Any, method: str) -> Any:
        """A stream of raw bytes, with the greeting behind it."""
        call = channel.stream_stream(method)(metadata=key_metadata(MESH_KEY))
        await call.write(_GREETINGS[method])
        async with asyncio.timeout(_PATIENCE_S):
            await call.read()
        return call

    async def _ended(self, call: Any) -> str:
        """The status that a call ends with, by name."""
        try:
            async with asyncio.timeout(_PATIENCE_S):
                while await call.read() is not _EOF:
                    pass
                code = await call.code()
        except grpc.aio.AioRpcError as error:
            code = error.code()
        except TimeoutError:
            self._tally.fail("hang", self._latest, f"the stream did not end within {_PATIENCE_S:g} s")
            return "hang"
        if code in _FAULTS:
            self._tally.fail("fault", self._latest, f"{code.name}: {await call.details()}")
        return str(code.name)

    def _watch(self, stage: Served) -> ControlStream:
        return ControlStream(
            stage.address,
            _HELLO,
            MESH_KEY,
            on_failure=self._on_failure,
            on_reply=lambda: None,
            on_lost=lambda _reason: None,
            clock_us=lambda: int(time.monotonic() * 1e6),
            host=HOST,
            identity=self._identity,
        )

    def _on_failure(self, failure: wire.Failure) -> None:
        if failure.code == "internal_error" or failure.message.startswith("stage failed:"):
            self._tally.fail("fault", self._latest, f"{failure.code}: {failure.message}")

    async def _are_well(self, expected: bytes) -> bool:
        try:
            answers = await self._answers()
        except (MeshError, TimeoutError) as error:
            self._tally.fail("hang", self._latest, f"a good session gets no answer: {error!r}")
            return False
        if answers != expected:
            self._tally.fail("crash", self._latest, f"a good session is told {answers!r}, not {expected!r}")
        return answers == expected

    async def _answers(self) -> bytes:
        self._num_sessions += 1
        first, tail = (stage.address for stage in self._process.stages)
        for watch in self._watches:
            await watch.ping(_PATIENCE_S)
        return await good_session(
            first,
            tail,
            _HELLO,
            self._identity,
            session=self._num_sessions,
            slot=self._num_sessions % self._process.stages[0].shape.num_slots,
            patience_s=_PATIENCE_S,
        )


async def good_session(
    first: str,
    tail: str,
    hello: wire.Hello,
    identity: Identity,
    *,
    session: int,
    slot: int,
    patience_s: float,
) -> bytes:
    """Open a session, decode a few windows, some with proposals that are rejected, and close it.

    Args:
        first: `host:port` of the first stage.
        tail: `host:port` of the tail.
        hello: First message of each stream.
        identity: TLS identity for the stages.
        session: Its id; never used before.
        slot: Where it runs.
        patience_s: For each answer.

    Returns:
        All tokens and log probabilities, serialised: the same while the stages work.

    Raises:
        MeshError: If a stream breaks.
        TimeoutError: If an answer does not come.
    """
    verdicts: asyncio.Queue[wire.Verdict | MeshError] = asyncio.Queue()

    def take(verdict: wire.Verdict, _times: BatchTimes) -> None:
        if verdict.session == session:
            verdicts.put_nowait(verdict)

    stream = VerdictStream(
        tail,
        hello,
        MESH_KEY,
        on_verdict=take,
        on_bundle=lambda _bundle: None,
        on_lost=verdicts.put_nowait,
        host=HOST,
        identity=identity,
    )
    link = StageLink(first, hello, MESH_KEY, verdicts.put_nowait, host=HOST, identity=identity)
    try:
        async with asyncio.timeout(patience_s):
            await stream.open()
            await link.open()
        link.send(SessionSpec(session, slot, _SAMPLING, len(_PROMPT), num_top_logprobs=3).to_wire())
        tokens, start = list(_PROMPT), 0
        answers = []
        for number in range(_NUM_STEPS):
            window = wire.Window(
                session=session,
                epoch=number,
                id=number,
                start=start,
                tokens=tokens,
                verify_rows=1 if number == 0 else len(tokens),
            )
            link.send(wire.WindowBundle(windows=[window]))
            async with asyncio.timeout(patience_s):
                verdict = await verdicts.get()
            if isinstance(verdict, MeshError):
                raise verdict
            answers.append(
                b"".join(
                    [
                        bytes(str(list(verdict.tokens)), "ascii"),
                        *(entry.SerializeToString(deterministic=True) for entry in verdict.logprobs),
                    ]
                )
            )
            start += len(tokens) if number == 0 else len(verdict.tokens)
            # The second proposal is hardly ever right.
            tokens = [verdict.tokens[-1], 1, 2]
        return b"\n".join(answers)
    finally:
        await link.close()
        await stream.close()


def fuzz_grpc(options: FuzzOptions) -> FuzzReport:
    """Whatever a peer sends, the stages run, answer, and compute for others as before.

    Args:
        options: Options of the run; the stages hold the first layers of its model.
    """
    with tempfile.TemporaryDirectory(prefix="spanmesh-fuzz-") as name:
        folder = Path(name)
        model = folder / "model.gguf"
        write_layout(options.model, small_layout(options.model, num_layers=2, num_tokens=1024), model)
        identity = Authority(make_certificate(dt.datetime.now(dt.UTC))).own_identity([HOST], "127.0.0.1")
        with StageProcess(model, folder, identity) as process:
            return asyncio.run(_attack_stages(options, process, identity))


async def _attack_stages(options: FuzzOptions, process: StageProcess, identity: Identity) -> FuzzReport:
    return await _GrpcAttack(options, process, identity).run()


def _ends_stream(method: str, data: bytes) -> bool:
    """Whether a stage hangs up on a message: on one that it cannot parse, or that names session 0.

    Writing to a stream that has ended raises an error that hides the stage's status.
    """
    try:
        if method == _CONTROL:
            wire.ControlRequest.FromString(data)
            return False
        frame = wire.Frame.FromString(data)
    except DecodeError:
        return True
    if frame.HasField("open"):
        return not frame.open.session
    return not all(window.session for window in frame.windows.windows)
