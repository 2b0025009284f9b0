"""Disks for stages in tests: what is written and read at once, what is damaged, and what was kept of whom."""

from __future__ import annotations

import hashlib
from concurrent.futures import Executor, Future
from typing import TYPE_CHECKING, Any, Final

from stages.serving.block_store import BlockStore
from stages.serving.kv_disk import KvDisk

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from pathlib import Path

    from stages.serving.server import StageService

PLENTY: Final = 2**30


class InlineExecutor(Executor):
    """Does at once what is submitted, in the thread that submits it."""

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()
        try:
            future.set_result(fn(*args, **kwargs))
        except BaseException as error:  # noqa: BLE001 - it is for whoever waits
            future.set_exception(error)
        return future


def identity_of(stage: int) -> bytes:
    return hashlib.sha256(f"stage {stage}".encode()).digest()


def disk_of(service: StageService) -> KvDisk:
    disk = service.plug_of(KvDisk)
    assert disk is not None
    return disk


async def give_disk(
    service: StageService,
    root: Path,
    stage: int,
    *,
    most_bytes: int = PLENTY,
    identity: bytes | None = None,
    is_inline: bool = False,
) -> None:
    """Have a stage keep blocks in a folder, if it has a plug that does."""
    disk = service.plug_of(KvDisk)
    if disk is None:
        return
    store = BlockStore(root, identity or identity_of(stage), most_bytes)
    if is_inline:
        await disk.open(store, writer=InlineExecutor(), reader=InlineExecutor())
    else:
        await disk.open(store)


def block_files(roots: Iterable[Path]) -> list[Path]:
    """All block files of these roots, in order."""
    return sorted(path for root in roots for path in root.glob("*/*") if path.suffix in {".rows", ".state"})


def damage(path: Path, how: str, at: int) -> None:
    """Change a file.

    Args:
        path: The file.
        how: `flip` a byte, `cut` it off, `grow` it, `swap` its halves, or `remove` it.
        at: Where, by the remainder of its size.
    """
    content = bytearray(path.read_bytes())
    at %= max(1, len(content))
    match how:
        case "flip":
            content[at] ^= 1 + at % 255
        case "cut":
            del content[at:]
        case "grow":
            content += bytes(1 + at % 50)
        case "swap":
            half = len(content) // 2
            content = content[half:] + content[:half]
        case "remove":
            path.unlink()
            return
    path.write_bytes(content)
