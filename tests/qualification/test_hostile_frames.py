"""Frames from a peer that knows the key and means no good: what the fuzzer feeds, and what it asked for."""

from __future__ import annotations

import asyncio
import threading
from random import Random
from typing import TYPE_CHECKING, Any

import grpc
import numpy as np
import pytest

from spanmesh_proto import windows_pb2 as wire
from spanmesh_proto import windows_pb2_grpc as rpc
from stages.runtime.stage_runtime import RuntimeOptions
from stages.transport.channels import key_metadata
from stages.transport.links import MOST_BUNDLED_WINDOWS
from tests.qualification.fuzz.gguf_fuzz import small_layout, write_layout
from tests.qualification.fuzz.grpc_frames import HostilePeer, StageShape
from tests.qualification.fuzz.grpc_fuzz import fuzz_grpc
from tests.qualification.fuzz.report import FuzzOptions
from tests.stages.serving.test_stage_server import Peer, hello
from tests.support.fake_stage import FakeRuntime
from tests.support.ring_harness import MESH_KEY, RunningStage, running_services, running_stages

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

pytestmark = pytest.mark.model
OPTIONS = RuntimeOptions(num_slots=2, ctx_size=256, exact=True)
N_VOCAB = 512
N_EMBD = 576
EOF: Any = grpc.aio.EOF  # type: ignore[attr-defined]  # not in the stubs


@pytest.fixture(scope="module")
def small_model(smollm2_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("small") / "small.gguf"
    write_layout(smollm2_path, small_layout(smollm2_path, num_layers=2, num_tokens=N_VOCAB), path)
    return path


@pytest.fixture
async def stages(small_model: Path, stage_cache_dir: Path) -> AsyncIterator[list[RunningStage]]:
    async with running_stages(small_model, (1,), OPTIONS, stage_cache_dir) as running:
        yield running


async def end_of(call: Any) -> tuple[grpc.StatusCode, str]:
    """How a call ends."""
    async with asyncio.timeout(10):
        try:
            while await call.read() is not EOF:
                pass
        except grpc.aio.AioRpcError as error:
            return error.code(), error.details() or ""
        return await call.code(), await call.details()


async def raw(channel: Any, method: str, *messages: bytes) -> tuple[grpc.StatusCode, str]:
    call = channel.stream_stream(f"/spanmesh.windows.Stage/{method}")(metadata=key_metadata(MESH_KEY))
    for message in messages:
        await call.write(message)
    return await end_of(call)


async def test_bytes_that_are_no_message_are_the_peer_s_fault(stages: list[RunningStage]) -> None:
    link_hello = wire.Frame(hello=hello()).SerializeToString()
    control_hello = wire.ControlRequest(hello=hello()).SerializeToString()
    async with grpc.aio.insecure_channel(stages[1].address.address) as channel:
        for method, greeting in (
            ("Link", link_hello),
            ("Control", control_hello),
            ("Verdicts", None),
            ("Follow", None),
        ):
            for messages in ((b"\xff\xff",), *([(greeting, b"\xff\xff")] if greeting else [])):
                code, details = await raw(channel, method, *messages)
                assert code is grpc.StatusCode.INVALID_ARGUMENT, (method, details)


async def test_long_words_in_a_greeting_still_get_a_short_answer(stages: list[RunningStage]) -> None:
    async with grpc.aio.insecure_channel(stages[0].address.address) as channel:
        for field in ("mesh_id", "sender", "software_version"):
            frame = wire.Frame(hello=hello(protocol_version=99, **{field: "x\n" * 50_000}))
            code, details = await raw(channel, "Link", frame.SerializeToString())
            assert code is grpc.StatusCode.FAILED_PRECONDITION
            assert len(details) < 400
            assert "\n" not in details


async def test_a_copy_tells_of_no_more_slots_than_there_are_and_few_copies_follow(
    stages: list[RunningStage],
) -> None:
    async with grpc.aio.insecure_channel(stages[1].address.address) as channel:
        follow, key = rpc.StageStub(channel).Follow, key_metadata(MESH_KEY)
        many = wire.FollowRequest(hello=hello(), held=[wire.HeldSlot(num_positions=2**32 - 1)] * 10_000)
        code, details = await end_of(follow(many, metadata=key))
        assert code is grpc.StatusCode.INVALID_ARGUMENT
        assert details == f"a replica names 10000 slots, {OPTIONS.num_slots} exist"
        calls = [follow(wire.FollowRequest(hello=hello()), metadata=key) for _ in range(9)]
        done, waiting = await asyncio.wait([asyncio.create_task(end_of(call)) for call in calls], timeout=2)
        assert len(done) == 1
        assert done.pop().result()[0] is grpc.StatusCode.INVALID_ARGUMENT
        for call in calls:
            call.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)


async def test_a_frame_holds_no_more_windows_than_peers_ever_send(stages: list[RunningStage]) -> None:
    windows = wire.WindowBundle(windows=[wire.Window(session=9)] * (MOST_BUNDLED_WINDOWS + 1))
    async with Peer(stages) as peer:
        await peer.link.write(wire.Frame(windows=windows))
        assert await end_of(peer.link) == (
            grpc.StatusCode.INVALID_ARGUMENT,
            "the peer sent 257 windows in one frame: at most 256 fit",
        )


@pytest.mark.parametrize(
    "frame",
    [
        wire.Frame(open=wire.Open(slot=0)),
        wire.Frame(windows=wire.WindowBundle(windows=[wire.Window(tokens=[1])])),
    ],
)
async def test_nobody_can_have_a_stage_declared_dead(stages: list[RunningStage], frame: wire.Frame) -> None:
    """A failure of session 0 would be that of the whole stage."""
    async with Peer(stages) as peer:
        await peer.link.write(frame)
        code, details = await end_of(peer.link)
        assert (code, details) == (
            grpc.StatusCode.INVALID_ARGUMENT,
            "the peer named session 0: ids begin at 1",
        )
        await peer.controls[0].write(wire.ControlRequest(ping=wire.Ping(sent_us=1)))
        assert (await peer.controls[0].read()).WhichOneof("kind") == "pong"


async def test_what_waits_at_a_stage_is_bounded() -> None:
    may_compute = threading.Event()

    def wait(_spans: object) -> None:
        may_compute.wait(60)

    runtime = FakeRuntime(0, 1, num_slots=2, on_decode=wait)
    async with running_services([runtime]) as stages, Peer(stages) as peer:
        await peer.open(1, 0)
        await peer.window(session=1, id=1, tokens=[5], verify_rows=1)
        window = wire.Window(session=1, id=2, start=1, tokens=[6], verify_rows=1)
        for _ in range(5):
            bundle = wire.WindowBundle(windows=[window] * MOST_BUNDLED_WINDOWS)
            await peer.link.write(wire.Frame(windows=bundle))
        failure = await peer.failure()
        assert (failure.window_id, failure.code) == (2, "invalid_window")
        assert failure.message == "1024 windows wait at this stage: it takes no more"
        may_compute.set()
        assert (await peer.verdict()).window_id == 1


async def test_the_tail_looks_up_no_token_that_does_not_exist(stages: list[RunningStage]) -> None:
    async with Peer(stages[1:]) as peer:
        penalised = wire.Sampling(top_p=1, repetition_penalty=1, frequency_penalty=1)
        opening = wire.Open(session=1, slot=0, sampling=penalised)
        await peer.link.write(wire.Frame(open=opening))
        await peer.window(session=1, tokens=[2**32 - 1], hidden=bytes(4 * N_EMBD), verify_rows=1)
        told = "a window at 0 has rows that are no tokens; its session has none"
        assert (await peer.failure()).message == told
        await peer.window(session=1, tokens=[2**31 - 1], hidden=bytes(4 * N_EMBD), verify_rows=1)
        assert "token 2147483647 is outside the vocabulary of 512" in (await peer.failure()).message
        opening.cached_tokens.append(N_VOCAB)
        await peer.link.write(wire.Frame(open=opening))
        assert "token 512 is outside the vocabulary of 512" in (await peer.failure()).message


async def test_hidden_states_that_are_no_numbers_fail_one_session_of_a_batch(
    stages: list[RunningStage],
) -> None:
    poison = np.full((1, N_EMBD), np.nan, np.float32).tobytes()
    async with Peer(stages[1:]) as peer:
        for session in (1, 2):
            await peer.open(session, session - 1)
        # A chunk alone keeps the stage busy while the two wait to share a batch.
        windows = [
            wire.Window(session=1, tokens=[5] * 60),
            wire.Window(session=1, start=60, tokens=[5], verify_rows=1),
            wire.Window(session=2, id=8, tokens=[5], verify_rows=1),
        ]
        hidden = bytes(4 * N_EMBD * 60) + poison + bytes(4 * N_EMBD)
        await peer.link.write(wire.Frame(windows=wire.WindowBundle(windows=windows, hidden=hidden)))
        failure = await peer.failure()
        assert (failure.session, failure.code) == (1, "stage_failed")
        verdicts = [await peer.verdict() for _ in range(2)]
        assert sorted((verdict.session, len(verdict.tokens)) for verdict in verdicts) == [(1, 0), (2, 1)]


def test_a_short_siege_leaves_the_stages_as_they_were(smollm2_path: Path, tmp_path: Path) -> None:
    report = fuzz_grpc(FuzzOptions(400, 5, smollm2_path, tmp_path))
    assert (report.num_crashes, report.num_hangs, report.num_faults) == (0, 0, 0)
    assert report.num_cases == 400
    assert report.outcomes["taken"] > 200
    assert report.outcomes["INVALID_ARGUMENT"] > 10


def test_the_seed_decides() -> None:
    shape = StageShape(is_first=False, n_embd=32, n_vocab=100, num_slots=2, ctx_size=64, max_rows=63)
    first, second = (HostilePeer(shape, Random(3)) for _ in range(2))
    frames = [first.frame() for _ in range(300)]
    assert frames == [second.frame() for _ in range(300)]
