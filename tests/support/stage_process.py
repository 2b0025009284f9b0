"""A fake stage in a process of its own, which can be frozen and killed."""

from __future__ import annotations

import asyncio
import contextlib
import json
import subprocess
import sys
from typing import TYPE_CHECKING

import grpc

import spanmesh_proto.grpc_tuning  # noqa: F401 - before gRPC is first used
from mesh.coordinator.ring import StageAddress
from spanmesh_proto import windows_pb2_grpc as rpc
from stages.layers import LayerRange
from stages.serving.server import StageService
from stages.transport.channels import SERVER_OPTIONS
from tests.support.fake_stage import FakeRuntime

if TYPE_CHECKING:
    from collections.abc import AsyncIterator


@contextlib.asynccontextmanager
async def stage_process(
    index: int, num_stages: int, mesh_id: str, mesh_key: str, next_address: str
) -> AsyncIterator[tuple[subprocess.Popen[bytes], StageAddress]]:
    """Start one, linked to the next stage; killed at the end."""
    facts = json.dumps([index, num_stages, mesh_id, mesh_key, next_address])
    command = [sys.executable, "-m", "tests.support.stage_process", facts]
    process = await asyncio.to_thread(subprocess.Popen, command, stdout=subprocess.PIPE)
    try:
        assert process.stdout is not None
        port = int(await asyncio.to_thread(process.stdout.readline))
        yield process, StageAddress("apart", f"127.0.0.1:{port}", LayerRange(index, index + 1))
    finally:
        process.kill()
        await asyncio.to_thread(process.communicate)


async def _serve(index: int, num_stages: int, mesh_id: str, mesh_key: str, next_address: str) -> None:
    service = StageService(
        FakeRuntime(index, num_stages),  # type: ignore[arg-type]  # a fake has all that a stage uses
        stage_index=index,
        mesh_id=mesh_id,
        mesh_key=mesh_key,
    )
    server = grpc.aio.server(interceptors=[service.key_check], options=SERVER_OPTIONS)
    rpc.add_StageServicer_to_server(service, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    await service.connect(next_address)
    sys.stdout.write(f"{port}\n")
    sys.stdout.flush()
    await server.wait_for_termination()


if __name__ == "__main__":
    asyncio.run(_serve(*json.loads(sys.argv[1])))
