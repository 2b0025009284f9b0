"""Identity of KV rows: a digest of all that they depend on, and the opening of their block files."""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import os
import platform
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from spanmesh_proto import SOFTWARE_VERSION
from spanmesh_proto.errors import InvalidModel
from stages.cancellable_work import in_own_thread
from stages.files import Region
from stages.gguf import part_paths
from stages.runtime.bindings import llama_cpp
from stages.runtime.llama import init_backend
from stages.runtime.llama_libraries import library_folder
from stages.serving.block_store import BlockStore
from stages.weights.disk_cache import read_storage_options
from stages.weights.hashing import ModelHashes, stamps_of

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from stages.runtime.stage_runtime import RuntimeOptions, StageRuntime
    from stages.weights.hashing import FileStamp

# Raised when rows mean something else, or are kept in another form.
_VERSION: Final = 1


@dataclass(frozen=True)
class RowsSetting:
    """Settings of a stage on which its rows depend.

    Rows of a later stage depend on the earlier stages as well: the names of blocks, which the coordinator
    gives, stand for the identities of all stages.
    """

    layers: tuple[int, int, int]
    """First layer, last plus one, and layers of the whole model."""
    options: RuntimeOptions
    """Options of the runtime; those on which rows do not depend are the same in all settings."""
    devices: tuple[str, ...]
    """Descriptions of the devices with layers: their names stay when a card is exchanged."""

    @classmethod
    def of(cls, runtime: StageRuntime, options: RuntimeOptions) -> RowsSetting:
        """Settings of a loaded stage."""
        info = runtime.info
        relevant = replace(
            options,
            # Only exact mode promises the same bits.
            num_threads=options.num_threads if options.exact else 0,
            ctx_size=options.ctx_size if runtime.may_scale_rotations else 0,
            num_checkpoints=0,
        )
        return cls((info.layers.start, info.layers.stop, info.n_layers), relevant, runtime.devices)


@dataclass(frozen=True)
class RowsOrigin:
    """File of which a stage computes its rows."""

    sha256: str
    """Hash of the recipe of the stage file; of no use for the model as it is."""
    whole: str | None
    """Absolute path of the model's first file, if the stage is the model as it is."""
    stamps: tuple[FileStamp, ...]
    """Stamps of all of the model's files, as they were when this was made."""

    @classmethod
    def of(cls, sha256: str, whole: str | None) -> RowsOrigin:
        """The origin of a file that is about to be loaded."""
        return cls(sha256, whole, () if whole is None else stamps_of(part_paths(Path(whole))))


def rows_identity(setting: RowsSetting, weights_sha256: str) -> bytes:
    """Digest of settings, weights, programs and processor, 32 bytes.

    Args:
        setting: Settings of the stage.
        weights_sha256: Hash that determines every byte of the stage's file, hex.
    """
    facts = {"version": _VERSION, "weights": weights_sha256, **asdict(setting), "build": _build()}
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).digest()


@cache
def _build() -> dict[str, Any]:
    """Programs and processor of this host, as far as results depend on them."""
    init_backend()
    folder = library_folder()
    libraries = [] if folder is None else sorted(folder.glob("*"))
    return {
        "spanmesh": SOFTWARE_VERSION,
        "llama_cpp": importlib.metadata.version("llama-cpp-python"),
        # The same version may have been compiled otherwise.
        "libraries": [(path.name, path.stat().st_size, path.stat().st_mtime_ns) for path in libraries],
        # The processor's instructions that the build uses.
        "system": llama_cpp.llama_print_system_info().decode(errors="replace"),
        "machine": platform.machine(),
        # The platform may know no more than the machine's name.
        "processor": _processor() or platform.processor(),
    }


def _processor() -> str:
    """Model of the processor, from Linux; empty elsewhere."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8", errors="replace") as lines:  # noqa: PTH123
            names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
            return next(names, "")
    except OSError:
        return ""


def content_sha256(paths: Sequence[Path], index: Path) -> str:
    """Hash of a model's files, hex, for a stage that is the model as it is; each is read once.

    Args:
        paths: The files, in order.
        index: File in which hashes are kept.

    Raises:
        InvalidModel: If one cannot be read, or changes meanwhile.
        ModelError: If the index cannot be written.
    """
    regions = [Region(number, 0, path.stat().st_size) for number, path in enumerate(paths)]
    hashes = ModelHashes(paths, index).of(regions, lambda _num_bytes: None)
    pieces = [(region.num_bytes, hashes[region]) for region in regions]
    return hashlib.sha256(json.dumps(pieces).encode()).hexdigest()


def store_opener(
    root: Path, setting: RowsSetting, origin: RowsOrigin, most_bytes: int
) -> Callable[[], Awaitable[BlockStore]] | None:
    """A function that finds the block files of a stage: the first time it reads the whole model for that.

    Args:
        root: Folder of the host's cache.
        setting: Settings on which the stage's rows depend.
        origin: Its file.
        most_bytes: Limit of all blocks, unless the host has one of its own.

    Returns:
        The function, which raises a `MeshError` or an OSError; None if the host keeps no blocks.
    """
    own_bytes = read_storage_options().kv_disk_bytes
    most_bytes = most_bytes if own_bytes is None else own_bytes

    async def open_store() -> BlockStore:
        sha256 = await _content_sha256(root, origin)
        identity = await in_own_thread(rows_identity, setting, sha256)
        return BlockStore(root / "kv", identity, most_bytes)

    return open_store if most_bytes else None


async def _content_sha256(root: Path, origin: RowsOrigin) -> str:
    """Hash of what a stage has loaded: of its recipe, or of the model as it is."""
    if origin.whole is None:
        return origin.sha256
    paths = part_paths(Path(origin.whole))
    index = root / "sources" / f"{hashlib.sha256(os.fsencode(origin.whole)).hexdigest()}-files.json"
    sha256 = await in_own_thread(content_sha256, paths, index)
    if stamps_of(paths) != origin.stamps:
        raise InvalidModel(f"{origin.whole} was changed since it was loaded: load the model again")
    return sha256
