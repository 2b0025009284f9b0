"""Identity of KV rows: a digest of everything besides tokens that makes a stage's rows what they are."""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import platform
from dataclasses import asdict, dataclass, replace
from functools import cache
from typing import TYPE_CHECKING, Any, Final

import llama_cpp

from spanmesh_proto import SOFTWARE_VERSION
from stages.gguf.file_io import Region
from stages.runtime.llama import init_backend
from stages.runtime.llama_libraries import library_folder
from stages.weights.hashing import ModelHashes

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from stages.runtime.stage_runtime import RuntimeOptions, StageRuntime

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
