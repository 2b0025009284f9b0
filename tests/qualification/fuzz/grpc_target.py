"""Target of hostile gRPC messages: two stages in a child process."""

from __future__ import annotations

import asyncio
import contextlib
import multiprocessing
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Self

import grpc
import psutil

from mesh.util.worker_main import return_free_memory
from spanmesh_proto import windows_pb2_grpc as rpc
from spanmesh_proto.errors import MeshError
from stages.certification.certify import cut_stage
from stages.layers import LayerRange
from stages.runtime.process_memory import ALLOCATOR
from stages.runtime.stage_runtime import RuntimeOptions, StageRuntime
from stages.serving.server import StageService
from stages.transport.channels import SERVER_OPTIONS, add_port
from tests.qualification.fuzz.grpc_frames import StageShape

if TYPE_CHECKING:
    from multiprocessing.connection import Connection
    from pathlib import Path

    from stages.transport.channels import Identity

HOST: Final = "fuzzed"
MESH_ID: Final = "fuzz"
MESH_KEY: Final = "known to the fuzzer"
# Lower terms are refused: no damaged Hello can exclude the others.
TERM: Final = 2**64 - 1
OPTIONS: Final = RuntimeOptions(num_slots=4, ctx_size=256, exact=True)
_START_TIMEOUT_S: Final = 60.0
_TRIM_S: Final = 0.5


@dataclass(frozen=True)
class Served:
    """One of the stages."""

    address: str
    """`host:port`."""
    shape: StageShape
    """What fits it."""


class StageProcess:
    """Cuts a model of two layers and serves both halves, over mutual TLS. Use as a context manager.

    Args:
        model: The model.
        folder: For the stage files and the process's log.
        identity: What the stages show.

    Attributes:
        stages: Both, once it is entered.
    """

    def __init__(self, model: Path, folder: Path, identity: Identity) -> None:
        spawning = multiprocessing.get_context("spawn")
        self._receiver, self._sender = spawning.Pipe(duplex=False)
        self._process = spawning.Process(target=_serve, args=(self._sender, model, folder, identity))
        self._log = folder / "stages.log"
        self.stages: tuple[Served, ...] = ()

    def __enter__(self) -> Self:
        for name, value in ALLOCATOR.items():
            # As a stage's process has it; it counts from a process's start only.
            os.environ.setdefault(name, value)
        self._process.start()
        self._sender.close()
        with contextlib.suppress(EOFError):
            if self._receiver.poll(_START_TIMEOUT_S):
                self.stages = self._receiver.recv()
        if not self.stages:
            last_words = self._log.read_text(errors="replace").splitlines()[-1:]
            self.__exit__()
            raise MeshError(f"the stages to be fuzzed did not start: {''.join(last_words) or 'not a word'}")
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.join()
        self._receiver.close()

    @property
    def is_alive(self) -> bool:
        """Whether the process still runs."""
        return self._process.is_alive()

    def memory_bytes(self) -> int:
        """What it holds resident."""
        pid = self._process.pid
        assert pid is not None
        rss: int = psutil.Process(pid).memory_info().rss
        return rss

    def said(self, text: str) -> int:
        """How often its log has this text."""
        return self._log.read_text(errors="replace").count(text)


def _serve(sender: Connection, model: Path, folder: Path, identity: Identity) -> None:
    log = os.open(folder / "stages.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(log, 1)
    os.dup2(log, 2)
    asyncio.run(_serve_both(sender, model, folder, identity))


async def _serve_both(sender: Connection, model: Path, folder: Path, identity: Identity) -> None:
    services, served = [], []
    for index in range(2):
        path = folder / f"stage-{index}.gguf"
        cut_stage(model, LayerRange(index, index + 1), path)
        runtime = StageRuntime(path, OPTIONS)
        info = runtime.info
        service = StageService(
            runtime,
            stage_index=index,
            mesh_id=MESH_ID,
            mesh_key=MESH_KEY,
            identity=lambda: identity,
            term=TERM,
        )
        server = grpc.aio.server(interceptors=[service.key_check], options=SERVER_OPTIONS)
        rpc.add_StageServicer_to_server(service, server)
        port = add_port(server, "127.0.0.1:0", lambda: identity)
        await server.start()
        services.append((service, server))
        shape = StageShape(
            info.is_first, info.n_embd, info.n_vocab, OPTIONS.num_slots, OPTIONS.ctx_size, runtime.max_rows
        )
        served.append(Served(f"127.0.0.1:{port}", shape))
    await services[0][0].connect(served[1].address, HOST)
    sender.send(tuple(served))
    while True:
        await asyncio.sleep(_TRIM_S)
        # What its arenas keep for later is no leak.
        return_free_memory()
