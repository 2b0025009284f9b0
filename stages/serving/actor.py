"""Actors of Ray that fetch, load and serve a model file, or one stage, and end when their head is gone.

Ray places, starts and monitors them; tokens never pass through Ray.
"""

from __future__ import annotations

import asyncio
import os
import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Protocol

import grpc
import structlog

from spanmesh_proto.errors import ClusterError, MeshError, ModelDoesNotFit
from stages.cancellable_work import in_own_thread
from stages.runtime.devices import layer_devices
from stages.runtime.kv_types import KV_TYPES
from stages.runtime.process_memory import free_memory_bytes
from stages.runtime.stage_runtime import RuntimeOptions, StageRuntime
from stages.serving.composition import PlugOptions, assistant_beside
from stages.serving.kv_replication import Replication
from stages.serving.rows_identity import RowsOrigin, RowsSetting, store_opener
from stages.serving.sent_rows import max_sent_bytes
from stages.serving.server import StageService
from stages.transport.channels import SERVER_OPTIONS, Identity, NewKey, add_port, listen_within
from stages.transport.hidden_codec import HiddenType
from stages.units import format_size
from stages.weights.assembly import Transfer
from stages.weights.disk_cache import default_root, hold, read_storage_options, stage_store
from stages.weights.fetch import FetchedStage, FetchSource, fetch_stage

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from stages.layers import LayerRange
    from stages.runtime.process_memory import StageMemory
    from stages.transport.channels import HandshakeMonitor, KeyCheck
    from stages.weights.disk_cache import StageStore

log = structlog.get_logger()


@dataclass(frozen=True)
class SecondFile:
    """A second file that a process needs: of an assistant beside a stage, of the model of a projector."""

    sha256: str
    """Hash of the file's recipe; empty for the file as it is."""
    source: FetchSource
    """Source of the file if the host lacks it."""
    whole: str | None = None
    """Absolute path of the file, if it is on the host."""


@dataclass(frozen=True)
class StageConfig:
    """Configuration of a stage."""

    stage_index: int
    """Its place in the pipeline, from 0."""
    layers: LayerRange
    """Its layers, for messages."""
    sha256: str
    """Hash of the recipe of the stage file; empty for the model as it is."""
    source: FetchSource
    """Source of the file if this host's cache lacks it."""
    options: RuntimeOptions
    """Options of the runtime."""
    host: str
    """Name of its host; for messages."""
    memory: StageMemory
    """Memory that it takes."""
    beside_bytes: int
    """Memory of this host that other stages, placed at the same time, are yet to take."""
    mesh_id: str
    """Identifier of the mesh."""
    mesh_key: str = field(repr=False)
    """Key shared by all stages and the coordinator."""
    whole: str | None = None
    """Absolute path of the model's first file, if it is on the stage's host and the stage has all layers.
    Links keep their names: llama.cpp finds the other parts by that of the first."""
    cache_dir: str | None = None
    """The host's cache, or None for the default place."""
    hidden_type: HiddenType = HiddenType.F32
    """Format of its hidden states on the wire to the next stage."""
    term: int = 0
    """Term of its coordinator."""
    orphan_s: float = 600.0
    """Time without a coordinator after which it ends its process, in seconds."""
    beside_gpu_bytes: Mapping[str, int] = field(default_factory=dict)
    """The same for GPUs, by device."""
    kv_disk_bytes: int = 0
    """Limit of blocks of KV rows on its host's disk, unless the host has one of its own; 0 keeps none."""
    second_file: SecondFile | None = None
    """Second file: of what drafts beside a stage, or the model of a projector; None for none."""

    @property
    def cache_root(self) -> Path:
        """Folder of the host's cache."""
        return Path(self.cache_dir) if self.cache_dir else default_root()

    @property
    def content(self) -> StageContent:
        """Request by which a stage loads it."""
        assistant = "" if self.second_file is None else self.second_file.sha256
        is_whole = self.whole is not None
        return StageContent(self.layers, self.sha256, is_whole, self.options, self.memory, assistant)


@dataclass(frozen=True)
class StageContent:
    """Facts of a loaded stage."""

    layers: LayerRange
    """Its layers."""
    sha256: str
    """Hash of the recipe of the stage file; empty for the model as it is."""
    is_whole: bool
    """Whether it is the model as it is."""
    options: RuntimeOptions
    """Options of the runtime."""
    memory: StageMemory
    """Memory that it takes."""
    assistant: str = ""
    """Hash of the recipe of the assistant beside it; empty without one."""

    def computes_as(self, other: StageContent) -> bool:
        """Whether one can take the place of the other in a ring, wherever their layers are computed."""
        placed = replace(
            self.options,
            num_threads=other.options.num_threads,
            gpu_layers=other.options.gpu_layers,
            cpu_moe_layers=other.options.cpu_moe_layers,
        )
        return (self.layers, self.sha256, self.is_whole, placed, self.assistant) == (
            other.layers,
            other.sha256,
            other.is_whole,
            other.options,
            other.assistant,
        )


@dataclass(frozen=True)
class StageProgress:
    """Progress of loading a stage."""

    phase: Literal["waiting", "fetching", "loading", "ready"]
    """Current step."""
    share: float
    """Share of the step that is done, 0 to 1."""
    done_bytes: int = 0
    """Weights fetched so far."""
    total_bytes: int = 0
    """All weights to fetch."""

    @property
    def label(self) -> str:
        """Text for the operator."""
        if not self.total_bytes:
            return self.phase
        return f"{self.phase} {format_size(self.done_bytes)} of {format_size(self.total_bytes)}"


class LoadedModel(Protocol):
    """The loaded model of llama.cpp."""

    def close(self) -> None:
        """Free its memory."""


class ModelService(Protocol):
    """Serves a loaded model over gRPC, and frees it."""

    @property
    def key_check(self) -> KeyCheck:
        """Interceptor for its server."""

    @property
    def handshakes(self) -> HandshakeMonitor:
        """Monitor for its server's connections."""

    @property
    def idle_s(self) -> float:
        """Seconds without the head; 0 with it."""

    def add_to(self, server: grpc.aio.Server) -> None:
        """Add the service to a server."""

    async def close(self) -> None:
        """Stop computing and free the memory."""


class ModelActor:
    """Base of actors that hold one file on this host.

    Any method may be called at any time; `stop` undoes all.

    Args:
        config: Configuration of the stage, or of the whole model.
        end_process: Ends this process at once.
    """

    def __init__(self, config: StageConfig, end_process: Callable[[], None] = lambda: os._exit(0)) -> None:
        self._config = config
        self._end_process = end_process
        self._orphan_watch: asyncio.Task[None] | None = None
        self._last_call_s = time.monotonic()
        self._progress = StageProgress("waiting", 0.0)
        self._runtime: LoadedModel | None = None
        self._service: ModelService | None = None
        self._server: grpc.aio.Server | None = None
        self._key: NewKey | None = None
        self._identity: Identity | None = None
        self._held: list[int] = []
        self._second_path: Path | None = None
        self._settling: asyncio.Task[None] | None = None

    async def check_memory(self) -> None:
        """Check that everything to be loaded on this host fits. Before any stage loads.

        Raises:
            ModelDoesNotFit: If it does not.
        """
        self._require_free(self._config.beside_bytes)
        await in_own_thread(self._require_free_on_gpus, self._config.beside_gpu_bytes)

    async def load(self) -> Transfer:
        """Bring the stage file, and the one beside it, to this host where they are missing, and load both.

        Returns:
            Sources of the weights that were not in the file.

        Raises:
            InvalidModel: If llama.cpp does not load it.
            ModelDoesNotFit: If there is not enough memory for it.
            HostUnreachable: If the head does not answer.
        """
        config = self._config
        cache, transfer = stage_store(config.cache_root), Transfer()
        if (second_file := config.second_file) is not None:
            second = await self._bring(cache, second_file.sha256, second_file.source, second_file.whole)
            self._second_path, transfer = second.path, second.transfer
        fetched = await self._bring(cache, config.sha256, config.source, config.whole)
        self._require_free(0)
        await in_own_thread(self._require_free_on_gpus, {})
        self._runtime = await in_own_thread(self._load_file, fetched.path)
        self._progress = StageProgress("ready", 1.0)
        if fetched.transfer != Transfer():
            self._settling = asyncio.create_task(_settle(cache, config.sha256))
        return transfer + fetched.transfer

    def _load_file(self, path: Path) -> LoadedModel:
        """Load the file with llama.cpp; in a thread."""
        raise NotImplementedError

    def _make_service(self, loaded: LoadedModel) -> ModelService:
        """Service of what `_load_file` returned, which it owns from now on."""
        raise NotImplementedError

    async def _bring(
        self, cache: StageStore, sha256: str, source: FetchSource, whole: str | None
    ) -> FetchedStage:
        if whole is not None:
            fetched = FetchedStage(Path(whole), Transfer())
        else:
            fetched = await fetch_stage(
                cache, sha256, source, storage=read_storage_options(), progress=self._on_fetched
            )
        self._held.append(hold(fetched.path))
        return fetched

    async def progress(self) -> StageProgress:
        """Progress of `load`."""
        self._last_call_s = time.monotonic()
        return self._progress

    async def content(self) -> StageContent | None:
        """Facts of its loaded stage, for a head that takes it over; None before that."""
        self._last_call_s = time.monotonic()
        return self._config.content if self._progress.phase == "ready" else None

    async def certificate_request(self) -> bytes:
        """Generate a key for connections to come; returns the certificate request, PEM."""
        self._key = NewKey()
        return self._key.request_pem()

    async def take_certificate(self, certificate_pem: bytes, authority_pem: bytes) -> None:
        """Use the certificate of the latest request, and the authority, for new connections.

        Open connections are kept.
        """
        if self._key is None:
            raise ClusterError(f"stage {self._config.stage_index} got a certificate that it did not request")
        self._identity = self._key.identity(certificate_pem, authority_pem)

    async def start(self, bind_address: str, ports: Sequence[int] = ()) -> int:
        """Serve to peers of the same mesh only.

        Args:
            bind_address: Address of this host to listen at.
            ports: Ports of which the first free one is taken; empty for any free one.

        Returns:
            The port.

        Raises:
            ClusterError: If nothing can be bound there.
        """
        config = self._config
        if self._runtime is None or self._identity is None:
            raise ClusterError(f"stage {config.stage_index} was started before it was loaded and certified")
        self._service = self._make_service(self._runtime)
        self._runtime = None  # the service owns and frees it now
        self._server = grpc.aio.server(interceptors=[self._service.key_check], options=SERVER_OPTIONS)
        self._service.add_to(self._server)
        server, on_connection = self._server, self._service.handshakes.connected
        try:
            port = listen_within(
                bind_address, ports, lambda address: add_port(server, address, self._shown, on_connection)
            )
        except RuntimeError as error:
            wider = ", and is its --port-range wide enough" if ports else ""
            raise ClusterError(
                f"stage {config.stage_index} cannot listen on {bind_address}: {error}; is --advertise an "
                f"address of that host{wider}?"
            ) from None
        await self._server.start()
        self._last_call_s = time.monotonic()
        self._orphan_watch = asyncio.create_task(self._end_if_orphaned(self._service))
        return port

    async def stop(self) -> None:
        """Stop serving and free all memory."""
        if self._orphan_watch is not None and self._orphan_watch is not asyncio.current_task():
            self._orphan_watch.cancel()
        if self._server is not None:
            await self._server.stop(grace=0)
            self._server = None
        if self._service is not None:
            await self._service.close()
            self._service = None
        if self._runtime is not None:
            self._runtime.close()
            self._runtime = None
        if self._settling is not None:
            await asyncio.wait([self._settling])
            self._settling = None
        while self._held:
            os.close(self._held.pop())

    async def _end_if_orphaned(self, service: ModelService) -> None:
        """End the process after the loss of its head: a killed head cannot release its stages."""
        orphan_s = self._config.orphan_s
        await orphaned(lambda: min(service.idle_s, time.monotonic() - self._last_call_s), orphan_s)
        log.error(
            "stage_orphaned",
            stage=self._config.stage_index,
            layers=str(self._config.layers),
            after_s=orphan_s,
        )
        await self.stop()
        self._end_process()

    def _on_failed(self, reason: MeshError) -> None:
        """End the process, in which nothing can be computed any more: a lost process is replaced at once."""
        log.error(
            "process_ends",
            stage=self._config.stage_index,
            layers=str(self._config.layers),
            reason=reason.message,
        )
        self._end_process()

    def _shown(self) -> Identity:
        if self._identity is None:
            raise ClusterError(f"stage {self._config.stage_index} has no certificate")
        return self._identity

    def _require_free(self, beside_bytes: int) -> None:
        """Check the free memory, which may have shrunk since the host joined, to avoid an OOM kill."""
        config, free_bytes = self._config, free_memory_bytes()
        needed_bytes = config.memory.loading_bytes + beside_bytes
        if needed_bytes <= free_bytes:
            return
        beside = f", {format_size(beside_bytes)} for other stages there" if beside_bytes else ""
        raise ModelDoesNotFit(
            f"stage {config.stage_index} ({config.layers}) does not fit on {config.host} now: it needs "
            f"{format_size(needed_bytes)} ({config.memory}{beside}), {format_size(free_bytes)} are free; "
            f"{self._less}, stop other programs there, or join more hosts"
        )

    @property
    def _less(self) -> str:
        """Options with which less memory is needed."""
        return "lower --ctx-size"

    def _require_free_on_gpus(self, beside_bytes: Mapping[str, int]) -> None:
        """Check the free memory of each GPU, where the device reports it."""
        config = self._config
        if not config.memory.gpus:
            return
        free = {device.name: device.free_bytes for device in layer_devices() if device.total_bytes}
        for share in config.memory.gpus:
            needed_bytes = share.total_bytes + beside_bytes.get(share.device, 0)
            if needed_bytes > free.get(share.device, needed_bytes):
                raise ModelDoesNotFit(
                    f"stage {config.stage_index} ({config.layers}) does not fit on {config.host}'s "
                    f"{share.device} now: {share.num_layers} layers there need {format_size(needed_bytes)}, "
                    f"{format_size(free[share.device])} are free; stop other programs that use it, "
                    f"{self._less}, or put fewer layers there with --gpu-layers"
                )

    def _on_fetched(self, done_bytes: int, total_bytes: int) -> None:
        share = done_bytes / total_bytes if total_bytes else 1.0
        self._progress = StageProgress("fetching", share, done_bytes, total_bytes)

    def _on_loaded(self, share: float) -> None:
        self._progress = StageProgress("loading", share)


class StageActor(ModelActor):
    """One stage on this host; see `ModelActor`."""

    _rows_origin: RowsOrigin | None = None
    _plug_options = PlugOptions()

    async def rejoin(
        self,
        stage_index: int,
        mesh_id: str,
        mesh_key: str,
        term: int,
        hidden_type: HiddenType | None = None,
    ) -> None:
        """Take a place in another ring, with the same layers; see `StageService.rejoin`.

        Returns when the current batch is done.

        Raises:
            ClusterError: If it is not serving.
            ProtocolError: If a coordinator of a higher term took over meanwhile.
        """
        self._last_call_s = time.monotonic()
        stage = self._stage
        if stage is None:
            raise ClusterError(f"stage {self._config.stage_index} was moved before it was started")
        await stage.rejoin(stage_index, mesh_id, mesh_key, term, hidden_type=hidden_type)
        self._config = replace(
            self._config, stage_index=stage_index, mesh_id=mesh_id, mesh_key=mesh_key, term=term
        )

    async def start(self, bind_address: str, ports: Sequence[int] = ()) -> int:
        """Serve to peers of the same mesh only; see `ModelActor.start`."""
        port = await super().start(bind_address, ports)
        if self._stage is not None:
            self._stage.serving()
        return port

    async def connect(self, next_address: str, next_host: str) -> None:
        """Link this stage to the next one.

        Args:
            next_address: Its `host:port`.
            next_host: Name of the host that must answer there.

        Raises:
            HostUnreachable: Naming the address that does not answer.
        """
        stage = self._stage
        if stage is None:
            raise ClusterError(f"stage {self._config.stage_index} was connected before it was started")
        await stage.connect(next_address, next_host)

    async def follow(self, address: str, host: str, mesh_id: str, mesh_key: str, term: int) -> None:
        """Follow a stage as its replica; see `Replication.follow`.

        Raises:
            ClusterError: If it is not serving.
        """
        stage = self._stage
        if stage is None:
            raise ClusterError(
                f"the replica of {self._config.layers} was asked to follow before it was started"
            )
        if (replication := stage.plug_of(Replication)) is not None:
            await replication.follow(address, host, mesh_id, mesh_key, term)

    @property
    def _stage(self) -> StageService | None:
        return self._service if isinstance(self._service, StageService) else None

    def _load_file(self, path: Path) -> StageRuntime:
        # Before the first byte is read: what is identified later must be what was loaded.
        self._rows_origin = RowsOrigin.of(self._config.sha256, self._config.whole)
        runtime = StageRuntime(path, self._config.options, progress=self._on_loaded)
        if self._second_path is not None:
            self._plug_options = PlugOptions(assistant=assistant_beside(runtime, self._second_path))
        return runtime

    def _make_service(self, loaded: LoadedModel) -> StageService:
        config, origin = self._config, self._rows_origin
        assert isinstance(loaded, StageRuntime) and origin is not None  # noqa: S101, PT018 - of `_load_file`
        setting = RowsSetting.of(loaded, config.options)
        open_store = store_opener(config.cache_root, setting, origin, config.kv_disk_bytes)
        return StageService(
            loaded,
            stage_index=config.stage_index,
            mesh_id=config.mesh_id,
            mesh_key=config.mesh_key,
            hidden_type=config.hidden_type,
            identity=self._shown,
            term=config.term,
            most_sent_bytes=max_sent_bytes(config.memory.cache_bytes),
            plug_options=replace(self._plug_options, open_store=open_store),
            on_ended=self._on_failed,
        )

    @property
    def _less(self) -> str:
        is_quantised = KV_TYPES[self._config.options.kv_type].is_quantised
        return "lower --ctx-size or --parallel" + ("" if is_quantised else ", use --kv-type q8_0")


async def orphaned(alone_s: Callable[[], float], orphan_s: float) -> None:
    """Wait until the stage has been without a coordinator for this long.

    Args:
        alone_s: Returns for how long it has been without one, in seconds; 0 with one.
        orphan_s: The longest time without one, in seconds.
    """
    while (left_s := orphan_s - alone_s()) > 0:  # noqa: ASYNC110 - nothing tells that no head came
        await asyncio.sleep(left_s)


async def _settle(store: StageStore, sha256: str) -> None:
    """Write the file to disk while the stage already computes."""
    try:
        await in_own_thread(store.settle, sha256)
    except (MeshError, OSError) as error:
        # It is verified again when it is next used, nothing else.
        log.warning("stage_not_settled", sha256=sha256[:12], reason=str(error))
