"""The windows protocol against real stages: what is refused, what fails one session, what survives."""

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, Self

import grpc
import numpy as np
import pytest

from mesh.coordinator.ring import StageAddress
from mesh.engine import GenerationRequest
from spanmesh_proto import PROTOCOL_VERSION
from spanmesh_proto import windows_pb2 as wire
from spanmesh_proto import windows_pb2_grpc as rpc
from spanmesh_proto.errors import (
    ContextLengthExceeded,
    HostUnreachable,
    MeshError,
    Overloaded,
    ProtocolVersionMismatch,
    StageFailed,
)
from stages.layers import LayerRange
from stages.runtime.stage_runtime import RuntimeOptions
from stages.transport.channels import key_metadata
from stages.transport.hidden_codec import HiddenType, encode
from stages.transport.links import StageLink
from tests.support.ring_harness import (
    MESH_ID,
    MESH_KEY,
    RunningStage,
    collect,
    running_coordinator,
    running_stages,
)
from tests.support.status_parts import sessions_of

pytestmark = pytest.mark.model
OPTIONS = RuntimeOptions(num_slots=2, ctx_size=256, exact=True)
PROMPT = tuple(range(100, 120))


@pytest.fixture
async def stages(smollm2_path: Path, stage_cache_dir: Path) -> AsyncIterator[list[RunningStage]]:
    async with running_stages(smollm2_path, (15,), OPTIONS, stage_cache_dir) as running:
        yield running


def hello(**changes: Any) -> wire.Hello:
    fields = {
        "protocol_version": PROTOCOL_VERSION,
        "software_version": "0.0.0-test",
        "mesh_id": MESH_ID,
        "sender": "test",
    }
    return wire.Hello(**{**fields, **changes})


class Peer:
    """A coordinator that sends what it likes."""

    def __init__(self, stages: list[RunningStage]) -> None:
        self._channels = [grpc.aio.insecure_channel(stage.address.address) for stage in stages]
        key = key_metadata(MESH_KEY)
        self.link = rpc.StageStub(self._channels[0]).Link(metadata=key)
        self.controls = [rpc.StageStub(channel).Control(metadata=key) for channel in self._channels]
        self.bundled: deque[wire.Verdict] = deque()
        self.times: list[wire.StageTime] = []
        self.verdicts = rpc.StageStub(self._channels[-1]).Verdicts(hello(), metadata=key)

    async def __aenter__(self) -> Self:
        await self.link.write(wire.Frame(hello=hello()))
        await self.link.read()
        for control in self.controls:
            await control.write(wire.ControlRequest(hello=hello()))
            await control.read()
        await self.verdicts.initial_metadata()
        return self

    async def __aexit__(self, *_: object) -> None:
        for call in (self.link, self.verdicts, *self.controls):
            call.cancel()
        for channel in self._channels:
            await channel.close(None)

    async def open(self, session: int, slot: int) -> None:
        await self.link.write(
            wire.Frame(
                open=wire.Open(
                    session=session, slot=slot, sampling=wire.Sampling(top_p=1, repetition_penalty=1)
                )
            )
        )

    async def window(self, *, hidden: bytes = b"", hidden_type: int = 0, **fields: Any) -> None:
        kind: Any = hidden_type
        bundle = wire.WindowBundle(windows=[wire.Window(**fields)], hidden=hidden, hidden_type=kind)
        await self.link.write(wire.Frame(windows=bundle))

    async def verdict(self) -> wire.Verdict:
        async with asyncio.timeout(20):
            while not self.bundled:
                bundle = await self.verdicts.read()
                self.times = list(bundle.times)
                self.bundled.extend(bundle.verdicts)
        return self.bundled.popleft()

    async def failure(self, stage: int = 0) -> wire.Failure:
        async with asyncio.timeout(20):
            reply: wire.ControlReply = await self.controls[stage].read()
        assert reply.WhichOneof("kind") == "failure"
        return reply.failure


@pytest.mark.parametrize(
    ("fields", "code", "text"),
    [
        ({"start": 5, "tokens": [1, 2]}, "invalid_window", "starts at position 5, but slot 0 ends at 0"),
        ({"start": 0, "tokens": []}, "invalid_window", "0 rows"),
        ({"start": 0, "tokens": [1] * 64}, "invalid_window", "64 rows"),
        (
            {"start": 0, "tokens": [1, 2], "verify_rows": 3},
            "invalid_window",
            "3 rows to verify",
        ),
        ({"start": 0, "tokens": [49152]}, "invalid_window", "token 49152 is outside the vocabulary of 49152"),
        ({"session": 99, "tokens": [1]}, "unknown_session", "session 99"),
    ],
)
async def test_a_bad_window_fails_its_session_and_the_stage_lives(
    stages: list[RunningStage], fields: dict[str, Any], code: str, text: str
) -> None:
    async with Peer(stages) as peer:
        await peer.open(1, 0)
        await peer.open(2, 1)
        await peer.window(**{"session": 1, "id": 7, **fields})
        failure = await peer.failure()
        assert (failure.session, failure.window_id, failure.code) == (fields.get("session", 1), 7, code)
        assert text in failure.message
        await peer.window(session=2, tokens=PROMPT, verify_rows=1)
        verdict = await peer.verdict()
        assert (verdict.session, len(verdict.tokens), len(peer.times)) == (2, 1, 2)


async def test_hidden_states_of_the_wrong_size_are_refused(stages: list[RunningStage]) -> None:
    async with Peer(stages[1:]) as peer:
        await peer.open(1, 0)
        await peer.window(session=1, tokens=[5, 6], hidden=b"\0" * 100, verify_rows=1)
        assert "2 rows need 4608 bytes of hidden states as f32, 100 arrived" in (await peer.failure()).message
        await peer.window(session=1, tokens=[5, 6], hidden=b"\0" * 4608, verify_rows=1)
        assert len((await peer.verdict()).tokens) == 1


async def test_hidden_states_are_read_by_the_type_that_their_bundle_names(stages: list[RunningStage]) -> None:
    hidden = np.random.default_rng(3).standard_normal((2, 576)).astype(np.float32)
    async with Peer(stages[1:]) as peer:
        await peer.open(1, 0)
        for number, hidden_type in enumerate(HiddenType):
            window: dict[str, Any] = {"session": 1, "tokens": [5, 6], "verify_rows": 1, "hidden_type": number}
            await peer.window(**window, hidden=encode(hidden, hidden_type))
            assert len((await peer.verdict()).tokens) == 1
            await peer.window(**window, hidden=b"x")
            needed = f"2 rows need {2 * hidden_type.row_bytes(576)} bytes of hidden states as {hidden_type}"
            assert needed in (await peer.failure()).message
        await peer.window(session=1, tokens=[5], hidden=b"x", hidden_type=9)
        unknown = "hidden states of type 9 are not known here; known are f32, f16, q8"
        assert unknown in (await peer.failure()).message


async def test_a_stage_trims_at_start(stages: list[RunningStage]) -> None:
    """Wrong tokens that were computed and then overwritten leave no trace."""
    async with Peer(stages) as peer:
        await peer.open(1, 0)
        await peer.window(session=1, tokens=PROMPT, verify_rows=1)
        first = (await peer.verdict()).tokens[0]
        await peer.window(session=1, start=20, tokens=[first], verify_rows=1)
        second = (await peer.verdict()).tokens[0]
        wrong = [(second + 1) % 49152, 11, 12]
        await peer.window(session=1, start=20, tokens=[first, *wrong], verify_rows=4)
        assert list((await peer.verdict()).tokens) == [second]
        await peer.window(session=1, start=21, tokens=[second], verify_rows=1)
        third = (await peer.verdict()).tokens[0]

        await peer.open(2, 1)
        await peer.window(session=2, tokens=[*PROMPT, first, second], verify_rows=1)
        assert list((await peer.verdict()).tokens) == [third]


async def test_canceled_epochs_and_closed_sessions_get_no_verdict(stages: list[RunningStage]) -> None:
    async with Peer(stages) as peer:
        await peer.open(1, 0)
        await peer.open(2, 1)
        for control in peer.controls:
            await control.write(wire.ControlRequest(cancel=wire.Cancel(session=1, epoch=3)))
            await control.write(wire.ControlRequest(ping=wire.Ping(sent_us=1)))
            assert (await control.read()).pong.stats.num_open_sessions >= 0
        await peer.window(session=1, epoch=2, id=1, tokens=PROMPT, verify_rows=1)
        await peer.window(session=1, epoch=3, id=2, tokens=PROMPT, verify_rows=1)
        assert (await peer.verdict()).window_id == 2
        for control in peer.controls:
            await control.write(wire.ControlRequest(close=wire.Close(session=1)))
            await control.write(wire.ControlRequest(ping=wire.Ping(sent_us=1)))
            assert (await control.read()).pong.stats.num_open_sessions == 1
        await peer.window(session=1, epoch=3, id=3, start=20, tokens=[1], verify_rows=1)
        await peer.window(session=2, id=4, tokens=PROMPT, verify_rows=1)
        verdict = await peer.verdict()
        assert (verdict.session, verdict.window_id) == (2, 4)


async def test_another_protocol_version_is_refused_with_both_named(stages: list[RunningStage]) -> None:
    link = StageLink(stages[0].address.address, hello(protocol_version=99), MESH_KEY, lambda _error: None)
    with pytest.raises(ProtocolVersionMismatch, match=f"version 99 .* speaks {PROTOCOL_VERSION} "):
        await link.open()


async def test_another_mesh_and_a_wrong_key_are_refused(stages: list[RunningStage]) -> None:
    address = stages[0].address.address
    with pytest.raises(MeshError, match="belongs to mesh 'test-mesh', not to 'other'"):
        await StageLink(address, hello(mesh_id="other"), MESH_KEY, lambda _error: None).open()
    with pytest.raises(MeshError, match="mesh key is missing or wrong"):
        await StageLink(address, hello(), "not the key", lambda _error: None).open()


class WrittenTooLate:
    """A call that the stage has ended before the first message is written, as gRPC tells it at times."""

    def __init__(self, call: Any) -> None:
        self._call = call

    async def write(self, _frame: wire.Frame) -> None:
        await self._call.code()
        details = "Internal error from Core"
        raise grpc.aio.AioRpcError(
            grpc.StatusCode.INTERNAL, grpc.aio.Metadata(), grpc.aio.Metadata(), details, details
        )

    def cancel(self) -> None:
        self._call.cancel()


async def test_a_refusal_is_told_though_grpc_has_replaced_its_status(
    stages: list[RunningStage], monkeypatch: pytest.MonkeyPatch
) -> None:
    link = StageLink(stages[0].address.address, hello(), "not the key", lambda _error: None)
    monkeypatch.setattr(link, "_call", WrittenTooLate(link._call))
    with pytest.raises(MeshError, match="mesh key is missing or wrong"):
        await link.open()


async def test_garbage_on_the_port_harms_nobody(stages: list[RunningStage]) -> None:
    host, port = stages[0].address.address.split(":")
    for garbage in (
        b"GET / HTTP/1.1\r\n\r\n",
        b"\x00" * 4096,
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\xff\xff\xff\xff",
    ):
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(garbage)
        await writer.drain()
        await asyncio.wait_for(reader.read(256), timeout=5)
        writer.close()
    async with running_coordinator(stages, context_length=256, num_slots=2) as coordinator:
        tokens, _ = await collect(coordinator, GenerationRequest(PROMPT, max_tokens=4))
        assert len(tokens) == 4


async def test_an_address_without_a_stage_is_named() -> None:
    nowhere = RunningStage(None, None, StageAddress("gone", "127.0.0.1:9", LayerRange(0, 30)))  # type: ignore[arg-type]
    with pytest.raises(HostUnreachable, match=r"127\.0\.0\.1:9 does not answer"):
        async with running_coordinator([nowhere], context_length=64, num_slots=1):
            pass


async def test_stages_in_the_wrong_order_are_noticed(stages: list[RunningStage]) -> None:
    with pytest.raises(MeshError, match=r"not the tail|holds layers"):
        async with running_coordinator(stages[::-1], context_length=256, num_slots=1):
            pass


async def test_closing_an_answer_frees_its_slot_at_every_stage(stages: list[RunningStage]) -> None:
    async with running_coordinator(stages, context_length=256, num_slots=2) as coordinator:
        answer = coordinator.generate(GenerationRequest(PROMPT, max_tokens=100))
        await anext(answer)
        assert [stage.service.stats().num_open_sessions for stage in stages] == [1, 1]
        await answer.aclose()
        for _ in range(100):
            if [stage.service.stats().num_open_sessions for stage in stages] == [0, 0]:
                break
            await asyncio.sleep(0.02)
        assert [stage.service.stats().num_open_sessions for stage in stages] == [0, 0]
        assert sessions_of(coordinator).running == 0


async def test_more_requests_than_slots_wait_and_too_many_are_turned_away(stages: list[RunningStage]) -> None:
    async with running_coordinator(stages, context_length=256, num_slots=2, max_waiting=2) as coordinator:
        request = GenerationRequest(PROMPT, max_tokens=6)
        answers = await asyncio.gather(
            *(collect(coordinator, request) for _ in range(6)), return_exceptions=True
        )
        refused = [answer for answer in answers if isinstance(answer, Overloaded)]
        given = [answer[0] for answer in answers if not isinstance(answer, BaseException)]
        assert len(refused) == 2
        assert "2 slots are busy and 2 requests wait" in refused[0].message
        assert len(given) == 4
        assert all(tokens == given[0] for tokens in given)


async def test_over_long_prompts_are_refused_and_long_answers_end_at_the_context(
    stages: list[RunningStage],
) -> None:
    async with running_coordinator(stages, context_length=256, num_slots=2) as coordinator:
        with pytest.raises(ContextLengthExceeded, match="256 tokens"):
            await collect(coordinator, GenerationRequest(tuple(range(256)), max_tokens=1))
        tokens, last = await collect(coordinator, GenerationRequest(tuple(range(250)), max_tokens=100))
        assert (len(tokens), last.finish) == (6, "length")


async def test_a_stage_that_is_lost_for_good_fails_its_sessions_with_the_reason(
    smollm2_path: Path, stage_cache_dir: Path
) -> None:
    async with (
        running_stages(smollm2_path, (15,), OPTIONS, stage_cache_dir) as stages,
        running_coordinator(stages, context_length=256, num_slots=2) as coordinator,
    ):
        answer = coordinator.generate(GenerationRequest(PROMPT, max_tokens=200))
        await anext(answer)
        await stages[1].server.stop(0)
        loss = await coordinator.broken()
        assert loss.suspects == (1,)
        assert not coordinator.is_ready
        coordinator.give_up(StageFailed(f"layers [15, 30) are lost: {loss.reason}"))
        with pytest.raises(StageFailed, match=r"layers \[15, 30\) are lost: "):
            async for _ in answer:
                pass
        with pytest.raises(StageFailed, match=r"layers \[15, 30\) are lost: "):
            await collect(coordinator, GenerationRequest(PROMPT, max_tokens=2))
