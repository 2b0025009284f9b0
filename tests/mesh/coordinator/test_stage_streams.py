"""Streams between the coordinator and a stage that end since what came over them could not be taken."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest

from mesh.coordinator.stage_streams import ControlStream, VerdictStream
from spanmesh_proto import windows_pb2 as wire
from spanmesh_proto import windows_pb2_grpc as rpc
from spanmesh_proto.errors import MeshError, StageFailed

KEY = "key"


class OneAnswer(rpc.StageServicer):
    """A stage that sends a verdict, or a failure, and then nothing more."""

    async def Verdicts(  # noqa: N802
        self, request: wire.Hello, context: grpc.aio.ServicerContext[Any, Any]
    ) -> AsyncIterator[wire.VerdictBundle]:
        await context.send_initial_metadata(())
        yield wire.VerdictBundle(verdicts=[wire.Verdict(session=1)])
        await asyncio.Event().wait()

    async def Control(  # noqa: N802
        self,
        request_iterator: AsyncIterator[wire.ControlRequest],
        context: grpc.aio.ServicerContext[Any, Any],
    ) -> AsyncIterator[wire.ControlReply]:
        yield wire.ControlReply(welcome=wire.Welcome())
        yield wire.ControlReply(failure=wire.Failure(session=1))
        await asyncio.Event().wait()


def broken(*_given: object) -> None:
    raise ValueError("no such session")


@pytest.mark.parametrize("kind", ["verdicts", "control"])
async def test_an_error_in_what_came_is_the_loss_of_the_stream(kind: str) -> None:
    server = grpc.aio.server()
    rpc.add_StageServicer_to_server(OneAnswer(), server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    lost: asyncio.Queue[MeshError] = asyncio.Queue()
    address = f"127.0.0.1:{port}"
    stream: VerdictStream | ControlStream
    if kind == "verdicts":
        stream = VerdictStream(
            address,
            wire.Hello(),
            KEY,
            on_verdict=broken,
            on_bundle=broken,
            on_lost=lost.put_nowait,
        )
    else:
        stream = ControlStream(
            address,
            wire.Hello(),
            KEY,
            on_failure=broken,
            on_reply=broken,
            on_lost=lost.put_nowait,
            clock_us=lambda: 0,
        )
    try:
        await stream.open()
        async with asyncio.timeout(10):
            error = await lost.get()
        assert isinstance(error, StageFailed)
        assert address in error.message
        assert "no such session" in error.message
    finally:
        await stream.close()
        await server.stop(None)
