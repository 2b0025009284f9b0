"""A whole ring on loopback: real stage files, real llama.cpp, real gRPC; only Ray is left out."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

import grpc

from mesh.coordinator.checkpoint_plan import CheckpointPlug
from mesh.coordinator.coordinator import Coordinator
from mesh.coordinator.disk_prefixes import BLOCK_POSITIONS, DiskPlug
from mesh.coordinator.feature_plug import FeaturePlug
from mesh.coordinator.image_plug import ImagePlug
from mesh.coordinator.options import CoordinatorOptions
from mesh.coordinator.ring import StageAddress
from spanmesh_proto import windows_pb2_grpc as rpc
from speculative.controller import ControllerOptions
from stages.layers import ranges_from_cuts
from stages.runtime.stage_runtime import RuntimeOptions, StageRuntime
from stages.serving.composition import PlugOptions, assistant_beside
from stages.serving.server import StageService
from stages.slicing.model_facts import read_model_facts
from stages.transport.channels import SERVER_OPTIONS
from stages.transport.hidden_codec import HiddenType
from stages.weights.virtual_stages import StageCache
from tests.support.disks import give_disk

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterable, Sequence
    from pathlib import Path

    from mesh.coordinator.disk_prefixes import DiskPrefixes
    from mesh.coordinator.feature_plug import FeatureStreams
    from mesh.coordinator.feature_store import FeatureNeeds
    from mesh.coordinator.plugs import Plug
    from mesh.engine import Committed, GenerationRequest
    from mesh.tuning.recorder import Recorder
    from spanmesh_proto.errors import MeshError
    from speculative.proposer import Proposer
    from stages.grammar.automaton import TokenTexts
    from stages.runtime.assistant import Assistant
    from tests.support.fake_stage import FakeRuntime

MESH_ID = "test-mesh"
MESH_KEY = "test-key"

# Each coordinator has a term of its own, as in a mesh.
_coordinators_before: WeakKeyDictionary[StageService, int] = WeakKeyDictionary()


@dataclass(frozen=True)
class RunningStage:
    service: StageService
    server: grpc.aio.Server
    address: StageAddress


@contextlib.asynccontextmanager
async def running_stages(
    model: Path,
    cuts: tuple[int, ...],
    options: RuntimeOptions,
    cache_dir: Path,
    *,
    hidden_type: HiddenType = HiddenType.F32,
    disk_root: Path | None = None,
    assistant: Path | None = None,
) -> AsyncIterator[list[RunningStage]]:
    """Stages of `model`, linked to each other, stopped at the end.

    They keep blocks in `disk_root`. An assistant drafts beside the last one.
    """
    cache = StageCache(cache_dir)
    ranges = ranges_from_cuts(cuts, read_model_facts(model).n_layers)
    runtimes = (StageRuntime(cache.cut(model, layers).path if cuts else model, options) for layers in ranges)
    async with running_services(
        runtimes, hidden_type=hidden_type, disk_root=disk_root, assistant=assistant
    ) as stages:
        yield stages


def beside(runtime: StageRuntime | FakeRuntime, path: Path | None) -> Assistant | MeshError | None:
    """The assistant of this file beside a tail, or why there is none; None beside other stages."""
    if path is None or not isinstance(runtime, StageRuntime) or not runtime.info.is_tail:
        return None
    return assistant_beside(runtime, path)


@contextlib.asynccontextmanager
async def running_services(
    runtimes: Iterable[StageRuntime | FakeRuntime],
    *,
    hidden_type: HiddenType = HiddenType.F32,
    first_index: int = 0,
    disk_root: Path | None = None,
    assistant: Path | None = None,
) -> AsyncIterator[list[RunningStage]]:
    """Stages around `runtimes`, linked to each other, stopped at the end; see `running_stages`."""
    stages: list[RunningStage] = []
    async with contextlib.AsyncExitStack() as stack:
        for index, runtime in enumerate(runtimes, first_index):
            service = StageService(
                runtime,  # type: ignore[arg-type]  # a fake has all that a stage uses
                stage_index=index,
                mesh_id=MESH_ID,
                mesh_key=MESH_KEY,
                hidden_type=hidden_type,
                # Fakes stand still where a test wants it, and all stages share this event loop.
                computes_in_loop=isinstance(runtime, StageRuntime),
                plug_options=PlugOptions(assistant=beside(runtime, assistant)),
            )
            stack.push_async_callback(service.close)
            if disk_root is not None:
                await give_disk(service, disk_root, index)
            server = grpc.aio.server(interceptors=[service.key_check], options=SERVER_OPTIONS)
            rpc.add_StageServicer_to_server(service, server)
            port = server.add_insecure_port("127.0.0.1:0")
            await server.start()
            stack.push_async_callback(server.stop, 0)
            address = StageAddress("local", f"127.0.0.1:{port}", runtime.info.layers)
            stages.append(RunningStage(service, server, address))
        for stage, following in itertools.pairwise(stages):
            await stage.service.connect(following.address.address)
        yield stages


async def _emptied(stages: Iterable[RunningStage]) -> None:
    """Wait until stages have seen the end of a coordinator's sessions."""
    with contextlib.suppress(TimeoutError):  # stages that are closed see nothing
        async with asyncio.timeout(2):
            while any(  # noqa: ASYNC110 - stages tell nobody
                counts.num_open_sessions or counts.num_queued_windows
                for counts in (stage.service.stats() for stage in stages)
            ):
                await asyncio.sleep(0.002)


@contextlib.asynccontextmanager
async def running_coordinator(
    stages: list[RunningStage],
    *,
    context_length: int,
    num_slots: int,
    make_proposer: Callable[[], Proposer] | None = None,
    make_proposers: Callable[[GenerationRequest], Sequence[Proposer]] | None = None,
    controller: ControllerOptions | None = None,
    cancels: bool = True,
    can_trim: bool = True,
    has_windows: bool = False,
    num_checkpoints: int = 0,
    max_rows: int = 63,
    max_waiting: int = 64,
    n_vocab: int = 49152,
    mesh_key: str = MESH_KEY,
    repair_wait_s: float = 2.5,
    clock_s: Callable[[], float] = time.monotonic,
    token_texts: TokenTexts | None = None,
    feature_needs: FeatureNeeds | None = None,
    recorder: Recorder | None = None,
    block_positions: int = BLOCK_POSITIONS,
    plugs: Iterable[Plug] | None = None,
) -> AsyncIterator[Coordinator]:
    """A coordinator connected to `stages`: the next one, if they had others before.

    Its plugs are those given, or those that the options ask for.
    """
    services = [stage.service for stage in stages if stage.service is not None]
    term = max((_coordinators_before.get(service, 0) for service in services), default=0)
    _coordinators_before.update(dict.fromkeys(services, term + 1))
    options = CoordinatorOptions(
        context_length,
        num_slots,
        max_rows,
        n_vocab,
        max_waiting=max_waiting,
        controller=controller or ControllerOptions(),
        can_trim=can_trim,
        cancels=cancels,
        repair_wait_s=repair_wait_s,
        # All of it is in one process: when that gets no processor, no stage is dead.
        ping_timeout_s=30.0,
        token_texts=None if token_texts is None else lambda: token_texts,
    )
    coordinator = Coordinator(
        [stage.address for stage in stages],
        options,
        plugs=plugs_for(
            has_windows=has_windows,
            num_checkpoints=num_checkpoints,
            feature_needs=feature_needs,
            recorder=recorder,
            block_positions=block_positions,
        )
        if plugs is None
        else plugs,
        mesh_id=MESH_ID,
        mesh_key=mesh_key,
        make_proposers=make_proposers if make_proposer is None else lambda _request: [make_proposer()],
        clock_s=clock_s,
        term=term,
    )
    await coordinator.start()
    try:
        yield coordinator
    finally:
        await coordinator.stop()
        await _emptied(stages)


def plugs_for(
    *,
    has_windows: bool = False,
    num_checkpoints: int = 0,
    feature_needs: FeatureNeeds | None = None,
    recorder: Recorder | None = None,
    block_positions: int = BLOCK_POSITIONS,
) -> list[Plug]:
    """New plugs for one coordinator, those that `mesh.coordinator.composition` names."""
    plugs: list[Plug] = [DiskPlug(has_windows=has_windows, block_positions=block_positions), ImagePlug()]
    if num_checkpoints:
        plugs.append(CheckpointPlug(num_checkpoints))
    if feature_needs is not None:
        plugs.append(FeaturePlug(feature_needs, recorder))
    return plugs


def feature_streams(coordinator: Coordinator) -> FeatureStreams | None:
    """Connections for features of the coordinator's ring; None if no drafter reads any."""
    return next((plug.streams for plug in coordinator._plugs if isinstance(plug, FeaturePlug)), None)


def disk_prefixes(coordinator: Coordinator) -> DiskPrefixes:
    """Blocks on the disks of the coordinator's ring."""
    (plug,) = (plug for plug in coordinator._plugs if isinstance(plug, DiskPlug))
    assert plug.prefixes is not None
    return plug.prefixes


async def collect(coordinator: Coordinator, request: GenerationRequest) -> tuple[list[int], Committed]:
    """All tokens of an answer, and its last message."""
    tokens: list[int] = []
    last = None
    async for committed in coordinator.generate(request):
        tokens.extend(committed.tokens)
        last = committed
    assert last is not None
    return tokens, last
