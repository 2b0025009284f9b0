"""Brings a stage file from the head into this host's cache."""

from __future__ import annotations

import asyncio
import fcntl
import os
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, BinaryIO, Final, Protocol

import grpc
import structlog

from spanmesh_proto import membership_pb2 as wire
from spanmesh_proto import membership_pb2_grpc as rpc
from spanmesh_proto.errors import HostUnreachable, InvalidModel, MeshError
from stages.channels import CLIENT_OPTIONS
from stages.cutting.disk import require_disk, write_error
from stages.link import explain

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Sequence
    from pathlib import Path

log = structlog.get_logger()

# The name in the head's certificate. Hosts know the head by its fingerprint, so any name will do.
SERVER_NAME: Final = "spanmesh-head"
_MAX_FRUITLESS_ATTEMPTS: Final = 3
_PAUSE_S: Final = 0.5


@dataclass(frozen=True)
class FetchSource:
    """Where stage files come from.

    Attributes:
        address: `host:port` of the head's membership service.
        certificate_pem: The only certificate to trust there.
        secret: Proof of membership.
    """

    address: str
    certificate_pem: bytes
    secret: str = field(repr=False)


class Store(Protocol):
    """Where stage files are kept; see `stages.cutting.content_store`."""

    def find(self, sha256: str) -> Path | None:
        """The file with this content, or None."""

    def partial(self, sha256: str) -> Path:
        """Where to gather this content; what lies there may be continued."""

    def adopt(self, partial: Path, sha256: str) -> Path:
        """Take a gathered file in after checking its content; returns its path."""


async def fetch_stage(
    cache: Store,
    sha256: str,
    size_bytes: int,
    source: FetchSource,
    *,
    progress: Callable[[int, int], None] | None = None,
) -> Path:
    """Bring a stage file into `cache`, going on where an earlier try stopped.

    Args:
        cache: This host's cache.
        sha256: Hash of the file, hex: its name at the head, and what the bytes must add up to.
        size_bytes: Its size.
        source: Where it comes from.
        progress: Called with the bytes that are here and the bytes in all.

    Returns:
        The file's path in the cache.

    Raises:
        HostUnreachable: If the head does not answer, three times without a byte in between.
        InvalidModel: If the bytes do not have the hash.
        ModelError: If the disk has no room for it.
    """
    partial = cache.partial(sha256)
    async with _locked(partial) as file:
        # Whoever held the lock before us may have brought it.
        present = await asyncio.to_thread(cache.find, sha256)
        if present is not None:
            return present
        require_disk(partial, size_bytes - file.tell())
        try:
            await _fill(file, sha256, size_bytes, source, progress or _ignore)
        except OSError as error:
            raise write_error(partial, error, size_bytes - partial.stat().st_size) from error
        log.info("stage_fetched", sha256=sha256[:12], size_bytes=size_bytes)
        return await asyncio.to_thread(cache.adopt, partial, sha256)


async def _fill(
    file: BinaryIO, sha256: str, size_bytes: int, source: FetchSource, progress: Callable[[int, int], None]
) -> None:
    num_fruitless = 0
    if file.tell() > size_bytes:
        file.seek(0)
        file.truncate()
    while (offset := file.tell()) < size_bytes:
        progress(offset, size_bytes)
        try:
            await _append(file, sha256, size_bytes, source, progress)
        except grpc.aio.AioRpcError as error:
            reason = explain(error, f"the head at {source.address}")
            num_fruitless = num_fruitless + 1 if file.tell() == offset else 0
            if num_fruitless >= _MAX_FRUITLESS_ATTEMPTS or not isinstance(reason, HostUnreachable):
                raise reason from None
            log.warning(
                "fetch_interrupted", sha256=sha256[:12], have_bytes=file.tell(), reason=reason.message
            )
            await asyncio.sleep(_PAUSE_S)
    progress(size_bytes, size_bytes)


async def _append(
    file: BinaryIO, sha256: str, size_bytes: int, source: FetchSource, progress: Callable[[int, int], None]
) -> None:
    """One call: from the end of `file` to the end of the stage, or as far as the wire holds."""
    request = wire.FetchRequest(secret=source.secret, sha256=sha256, offset=file.tell())
    try:
        async with pinned_channel(source.address, source.certificate_pem) as channel:
            async for chunk in rpc.MembershipStub(channel).FetchStage(request):
                if chunk.total_bytes != size_bytes:
                    raise InvalidModel(
                        f"the head has {chunk.total_bytes} bytes for stage {sha256[:12]}, the plan says "
                        f"{size_bytes}"
                    )
                await asyncio.to_thread(file.write, chunk.data)
                progress(file.tell(), size_bytes)
    finally:
        file.flush()
    if file.tell() < size_bytes:
        raise MeshError(
            f"the head's copy of stage {sha256[:12]} ends after {file.tell()} of {size_bytes} bytes"
        )


def pinned_channel(
    address: str, certificate_pem: bytes, *, options: Sequence[tuple[str, int]] = ()
) -> grpc.aio.Channel:
    """A TLS channel to the head that trusts `certificate_pem` and nothing else.

    Args:
        address: `host:port`.
        certificate_pem: The head's.
        options: Of gRPC, over those that every channel has.
    """
    settings = {**dict(CLIENT_OPTIONS), **dict(options)}
    return grpc.aio.secure_channel(
        address,
        grpc.ssl_channel_credentials(root_certificates=certificate_pem),
        options=(*settings.items(), ("grpc.ssl_target_name_override", SERVER_NAME)),
    )


@asynccontextmanager
async def _locked(partial: Path) -> AsyncIterator[BinaryIO]:
    """The partial file, open for appending; ours alone, also among other processes."""
    while True:
        with partial.open("ab") as file:
            if _try_lock(file) and _is_still(file, partial):
                yield file
                return
        await asyncio.sleep(_PAUSE_S)


def _try_lock(file: BinaryIO) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _is_still(file: BinaryIO, path: Path) -> bool:
    """Whether `path` still names the open file; whoever finished it has moved it away."""
    try:
        return path.stat().st_ino == os.fstat(file.fileno()).st_ino
    except FileNotFoundError:
        return False


def _ignore(_done_bytes: int, _total_bytes: int) -> None:
    """No progress wanted."""
