"""Fetch of a stage file from this host, the head or a hub, with rate limit and resumption."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections import Counter
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, BinaryIO, Final

import grpc
import structlog

from spanmesh_proto import membership_pb2 as wire
from spanmesh_proto import membership_pb2_grpc as rpc
from spanmesh_proto.errors import HostUnreachable, InvalidModel, MeshError
from stages.cancellable_work import CancellableWork, in_own_thread
from stages.files import require_disk, try_lock, write_error
from stages.transport.channels import CLIENT_OPTIONS
from stages.transport.links import explain
from stages.weights.assembly import Assembly, SentPieces, Transfer
from stages.weights.disk_cache import DEFAULT_STORAGE, StorageOptions, make_room
from stages.weights.piece_sources import KnownFile, take_from_folder, take_from_model, take_from_store
from stages.weights.recipe import Recipe

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
    from pathlib import Path

    from stages.weights.disk_cache import StageStore
    from stages.weights.piece_sources import HubFile
    from stages.weights.recipe import Piece

# Name in the head's certificate. Hosts know the head by its fingerprint, so any name serves.
SERVER_NAME: Final = "spanmesh-head"
# Largest message that the head reads before it has checked a secret.
MAX_REQUEST_BYTES: Final = 256 * 1024
# Ranges of one request, two varints each, at most 24 bytes: within the limit above.
MOST_RANGES: Final = 8192
_MAX_FRUITLESS_ATTEMPTS: Final = 3
# A piece that came this often with a wrong hash is not requested again.
_MOST_WRONG: Final = 3
_PAUSE_S: Final = 0.5

log = structlog.get_logger()


@dataclass(frozen=True)
class FetchSource:
    """Source of stage files."""

    address: str
    """`host:port` of the head's membership service."""
    certificate_pem: bytes
    """The only certificate to trust there."""
    secret: str = field(repr=False)
    """Proof of membership."""
    model: tuple[KnownFile, ...] = ()
    """Files of the model, for stages on the head's own host."""
    hub: tuple[HubFile, ...] = ()
    """Files of the model at its hub, if it came from one."""
    is_hub_first: bool = False
    """Whether to ask the hub before the head."""


@dataclass(frozen=True)
class FetchedStage:
    """A stage file in the cache."""

    path: Path
    """The stage file in the cache."""
    transfer: Transfer
    """Origin of its bytes."""


class _Head:
    """The head as a source."""

    def __init__(self, stub: Any, sha256: str, source: FetchSource) -> None:
        self._stub = stub
        self._sha256 = sha256
        self._source = source

    async def recipe(self) -> bytes:
        """Recipe of the stage, as text."""
        request = wire.FetchRequest(secret=self._source.secret, sha256=self._sha256, recipe=True)
        try:
            return b"".join([chunk.data async for chunk in self._stub.FetchStage(request)])
        except grpc.aio.AioRpcError as error:
            raise explain(error, f"the head at {self._source.address}") from None

    async def pieces(self, pieces: Sequence[Piece]) -> AsyncIterator[bytes]:
        """Bytes of some pieces, one after the other."""
        request = wire.FetchRequest(
            secret=self._source.secret,
            sha256=self._sha256,
            ranges=[wire.ByteRange(start=start, num_bytes=count) for start, count in _stretches(pieces)],
        )
        try:
            async for chunk in self._stub.FetchStage(request):
                yield chunk.data
        except grpc.aio.AioRpcError as error:
            raise explain(error, f"the head at {self._source.address}") from None


class _StageFetch:
    """Fills one assembly from all sources of its pieces, the nearest first."""

    def __init__(
        self,
        assembly: Assembly,
        store: StageStore,
        head: _Head,
        source: FetchSource,
        *,
        storage: StorageOptions,
        progress: Callable[[int, int], None] | None,
    ) -> None:
        self._assembly = assembly
        self._store = store
        self._head = head
        self._source = source
        self._storage = storage
        self._progress = progress
        self._work = CancellableWork()
        self._done_bytes = 0
        self._head_bytes = 0
        self._hub_bytes = 0
        self._counting = threading.Lock()
        self._wrong = Counter[int]()

    async def run(self) -> Transfer:
        """Return when every piece is there."""
        assembly = self._assembly
        num_wrong = await self._work.run(self._take_local_pieces)
        reused_bytes = assembly.done_bytes
        self._report_progress(0)
        ways = [self._from_head, self._from_hub] if self._source.hub else [self._from_head]
        if self._source.is_hub_first:
            ways.reverse()
        failure: MeshError | None = None
        for index, way in enumerate(ways):
            if not assembly.missing:
                break
            try:
                await way()
            except MeshError as error:
                if index + 1 == len(ways):
                    raise
                failure = error
                log.warning("weights_from_elsewhere", reason=error.message)
        if assembly.missing and failure is not None:
            raise failure
        return Transfer(reused_bytes, self._head_bytes, self._hub_bytes, num_wrong + self._wrong.total())

    def _take_local_pieces(self) -> int:
        assembly = self._assembly
        num_wrong = assembly.resume()
        self._done_bytes = assembly.done_bytes
        self._report_progress(0)
        if assembly.missing:
            take_from_model(assembly, self._source.model, self._report_progress)
        if assembly.missing:
            take_from_store(assembly, self._store, self._report_progress)
        if assembly.missing and self._storage.models is not None:
            take_from_folder(assembly, self._storage.models, self._report_progress)
        self._done_bytes = assembly.done_bytes
        return num_wrong

    async def _from_head(self) -> None:
        num_fruitless = 0
        while indices := self._assembly.missing:
            pieces = [self._assembly.recipe.pieces[index] for index in indices]
            del pieces[_num_askable(pieces) :]
            sent = SentPieces(self._assembly, indices[: len(pieces)])
            try:
                async for data in self._head.pieces(pieces):
                    # Not in a thread that may outlive this task: the assembly's file would be closed under
                    # it.
                    await self._work.run(partial(sent.take, data))
                    self._report_progress(len(data))
                if not sent.is_complete:
                    raise InvalidModel("the head sent fewer bytes than requested; fetch them again")
            except HostUnreachable as error:
                num_fruitless = 0 if sent.num_bytes else num_fruitless + 1
                if num_fruitless >= _MAX_FRUITLESS_ATTEMPTS:
                    raise
                log.warning("fetch_interrupted", reason=error.message, missing=len(self._assembly.missing))
                await asyncio.sleep(_PAUSE_S)
            finally:
                self._head_bytes += sent.num_bytes
            self._note_wrong(sent.wrong, "the head's copy of the model")

    async def _from_hub(self) -> None:
        from stages.weights.piece_sources import fetch_from_hub, has_hub_pieces  # noqa: PLC0415 - few need HTTP

        while has_hub_pieces(self._assembly):
            fetched = await self._work.run(
                partial(fetch_from_hub, self._assembly, self._source.hub, self._on_hub_bytes)
            )
            self._note_wrong(fetched, "the hub's file")

    def _on_hub_bytes(self, count: int) -> None:
        with self._counting:  # several threads come here
            self._hub_bytes += count
            self._report_progress(count)

    def _note_wrong(self, wrong: Sequence[int], whose: str) -> None:
        for index in wrong:
            piece = self._assembly.recipe.pieces[index]
            self._wrong[index] += 1
            log.warning("piece_damaged", tensor=piece.tensor, at=piece.tensor_offset, bytes=piece.num_bytes)
            self._done_bytes -= piece.num_bytes
            if self._wrong[index] >= _MOST_WRONG:
                raise InvalidModel(
                    f"{piece.num_bytes} bytes of {piece.tensor!r} arrived {_MOST_WRONG} times with a wrong "
                    f"hash: {whose} is damaged; fetch the model again"
                )

    def _report_progress(self, count: int) -> None:
        self._work.check()
        self._done_bytes += count
        if self._progress is not None:
            total_bytes = self._assembly.recipe.weight_bytes
            self._progress(min(self._done_bytes, total_bytes), total_bytes)


class RateLimit:
    """Bandwidth limit, shared by all senders.

    Args:
        bytes_per_s: Limit; None for no limit.
        clock_s: Monotonic clock, seconds.
        sleep: Waits for seconds.
    """

    def __init__(
        self,
        bytes_per_s: float | None,
        *,
        clock_s: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._bytes_per_s = bytes_per_s
        self._clock_s = clock_s
        self._sleep = sleep
        self._free_at_s = clock_s()

    async def take(self, num_bytes: int) -> None:
        """Return when this many bytes may be sent; in the order of the calls."""
        if self._bytes_per_s is None:
            return
        now_s = self._clock_s()
        begins_s = max(now_s, self._free_at_s)
        self._free_at_s = begins_s + num_bytes / self._bytes_per_s
        if begins_s > now_s:
            await self._sleep(begins_s - now_s)


async def fetch_stage(
    store: StageStore,
    sha256: str,
    source: FetchSource,
    *,
    storage: StorageOptions = DEFAULT_STORAGE,
    progress: Callable[[int, int], None] | None = None,
) -> FetchedStage:
    """Bring a stage into `store`, continuing an earlier try.

    Args:
        store: Store of this host.
        sha256: Hash of the stage's recipe, hex.
        source: Source of the stage.
        storage: Other sources of this host, and the limit of its cache.
        progress: Called with the number of bytes of weights that are here and of all.

    Raises:
        HostUnreachable: If the head does not answer in three tries without a byte in between.
        InvalidModel: If pieces have a wrong hash three times.
        ModelError: If the disk is full.
    """
    present = await in_own_thread(store.find, sha256)
    if present is not None:
        return FetchedStage(present, Transfer())
    path = store.partial(sha256)
    async with _locked(path):
        # The former holder of the lock may have brought it.
        present = await in_own_thread(store.find, sha256)
        if present is not None:
            path.unlink()  # made a moment ago, to be locked
            return FetchedStage(present, Transfer())
        async with pinned_channel(source.address, source.certificate_pem) as channel:
            head = _Head(rpc.MembershipStub(channel), sha256, source)
            recipe = await _recipe(store, head, sha256)
            missing_bytes = max(0, recipe.weight_bytes - path.stat().st_blocks * 512)
            await in_own_thread(_make_room, store, recipe, missing_bytes, storage)
            require_disk(path, missing_bytes)
            try:
                with Assembly(recipe, path) as assembly:
                    transfer = await _StageFetch(
                        assembly, store, head, source, storage=storage, progress=progress
                    ).run()
            except OSError as error:
                raise write_error(path, error, missing_bytes) from error
        log.info(
            "stage_fetched",
            sha256=sha256[:12],
            layers=str(recipe.layers),
            size_bytes=recipe.size_bytes,
            reused_bytes=transfer.reused_bytes,
            head_bytes=transfer.head_bytes,
            hub_bytes=transfer.hub_bytes,
            wrong_pieces=transfer.wrong_pieces,
        )
        adopted = await in_own_thread(store.adopt, path, recipe)
        await in_own_thread(make_room, store, 0, storage.cache_bytes, keep={sha256})
        return FetchedStage(adopted, transfer)


def _make_room(store: StageStore, recipe: Recipe, needed_bytes: int, storage: StorageOptions) -> None:
    """Keeps other stages with pieces of this one until they are copied."""
    donors = store.donors({piece.sha256 for piece in recipe.pieces})
    keep = {recipe.sha256, *(path.stem for path, _ in donors)}
    make_room(store, needed_bytes, storage.cache_bytes, keep=keep)


async def _recipe(store: StageStore, head: _Head, sha256: str) -> Recipe:
    recipe = await in_own_thread(store.recipe, sha256)
    if recipe is None:
        num_fruitless = 0
        while recipe is None:
            try:
                recipe = Recipe.from_bytes(await head.recipe(), sha256)
            except HostUnreachable:
                num_fruitless += 1
                if num_fruitless >= _MAX_FRUITLESS_ATTEMPTS:
                    raise
                await asyncio.sleep(_PAUSE_S)
        await in_own_thread(store.keep, recipe)
    return recipe


def _num_askable(pieces: Sequence[Piece]) -> int:
    """Number of these pieces, from the first, that fit into one request."""
    num_stretches = end = 0
    for index, piece in enumerate(pieces):
        num_stretches += not index or piece.at != end
        if num_stretches > MOST_RANGES:
            return index
        end = piece.at + piece.num_bytes
    return len(pieces)


def _stretches(pieces: Sequence[Piece]) -> Iterator[tuple[int, int]]:
    """Ranges of the stage file with exactly these pieces: first byte and length of each."""
    start = count = 0
    for piece in pieces:
        if count and piece.at != start + count:
            yield start, count
            count = 0
        if not count:
            start = piece.at
        count += piece.num_bytes
    if count:
        yield start, count


def pinned_channel(
    address: str, certificate_pem: bytes, *, options: Sequence[tuple[str, int]] = ()
) -> grpc.aio.Channel:
    """A TLS channel to the head that trusts `certificate_pem` and nothing else.

    Args:
        address: `host:port`.
        certificate_pem: Certificate of the head.
        options: Options of gRPC, over the common ones.
    """
    settings = {**dict(CLIENT_OPTIONS), **dict(options)}
    return grpc.aio.secure_channel(
        address,
        grpc.ssl_channel_credentials(root_certificates=certificate_pem),
        options=(*settings.items(), ("grpc.ssl_target_name_override", SERVER_NAME)),
    )


@asynccontextmanager
async def _locked(partial: Path) -> AsyncIterator[BinaryIO]:
    """The partial file, locked against other tasks and processes."""
    while True:
        with partial.open("ab") as file:
            if try_lock(file.fileno()) and _is_still(file, partial):
                yield file
                return
        await asyncio.sleep(_PAUSE_S)


def _is_still(file: BinaryIO, path: Path) -> bool:
    """Whether `path` still names the open file, which is moved when it is complete."""
    try:
        return path.stat().st_ino == os.fstat(file.fileno()).st_ino
    except FileNotFoundError:
        return False
