"""Host report for `mesh doctor`: versions, devices, memory, disk and clock.

Run as a program: sha256 digests of recipes of stage files as arguments; prints the report as JSON.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import shutil
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import structlog

from spanmesh_proto import PROTOCOL_VERSION, SOFTWARE_VERSION
from stages.cancellable_work import in_own_thread
from stages.host.cpu_latency import DEVICE
from stages.host.gpu_backends import builds_beside, vendors_here
from stages.process_limits import num_bound, processor_quota
from stages.runtime.devices import Device, list_devices
from stages.runtime.llama import init_backend
from stages.runtime.llama_libraries import attention_name, attention_version, gpu_backends, loaded_kernels
from stages.runtime.process_memory import free_memory_bytes
from stages.weights.assembly import wrong_pieces
from stages.weights.disk_cache import StageStore, default_root

if TYPE_CHECKING:
    from collections.abc import Iterable

_PACKAGES = {"llama_cpp": "llama-cpp-python", "ray": "ray", "grpc": "grpcio"}


@dataclass(frozen=True)
class HostSelfReport:
    """Report of one host."""

    versions: dict[str, str]
    """Versions of spanmesh, its protocol, Python, and the relevant packages, and what computes attention."""
    platform: str
    """System and architecture."""
    devices: tuple[Device, ...]
    """Devices of llama.cpp; layers go to those that are no CPU first."""
    backends: tuple[str, ...]
    """Backends of llama.cpp besides the processor's, as far as its files show them."""
    cards: tuple[str, ...]
    """Vendors of the GPUs of this host, whether llama.cpp can use them or not."""
    builds_beside: dict[str, str]
    """Folders with other builds of llama.cpp in this environment, by backend."""
    free_memory_bytes: int
    """Memory for new processes."""
    free_disk_bytes: int
    """Free space for stage files."""
    cache_dir: str
    """Folder of the stage files."""
    can_stay_awake: bool
    """Whether processors can be kept out of idle states while requests run, see `stages.host.cpu_latency`."""
    has_latency_device: bool
    """Whether there is a device for that, which only Linux has."""
    num_processors: int
    """Logical processors that its processes may run on."""
    processor_quota: float | None
    """Processors whose time a control group allows them; None for all of these."""
    files: dict[str, bool | None]
    """By the sha256 of its recipe, whether a stage file is intact; None if it is missing."""
    unix_s: float
    """This host's clock at the end."""


class HostReporter:
    """Ray actor that reports on one host."""

    async def report(self, hashes: list[str]) -> dict[str, Any]:
        """See `report_host`; JSON-serialisable."""
        return asdict(await in_own_thread(report_host, hashes))

    async def clock_s(self) -> float:
        """Unix time of this host."""
        return time.time()


def report_host(hashes: Iterable[str] = ()) -> HostSelfReport:
    """Report of this host; reads the named stage files completely.

    Args:
        hashes: sha256 digests of the recipes of stage files, hex.
    """
    init_backend()
    root = default_root()
    versions = {"spanmesh": SOFTWARE_VERSION, "protocol": str(PROTOCOL_VERSION)}
    versions["python"] = platform.python_version()
    versions |= {name: importlib.metadata.version(package) for name, package in _PACKAGES.items()}
    versions["attention"] = attention_name(attention_version(loaded_kernels()))
    return HostSelfReport(
        versions=versions,
        platform=f"{platform.system()} {platform.machine()}",
        devices=list_devices(),
        backends=gpu_backends() or (),
        cards=vendors_here(),
        builds_beside=builds_beside(Path(sys.prefix)),
        free_memory_bytes=free_memory_bytes(),
        free_disk_bytes=shutil.disk_usage(_nearest_folder(root)).free,
        cache_dir=str(root),
        can_stay_awake=_is_writable(DEVICE),
        has_latency_device=DEVICE.exists(),
        num_processors=num_bound(),
        processor_quota=processor_quota(),
        files={sha256: _is_whole(root / "stages", sha256) for sha256 in hashes},
        unix_s=time.time(),
    )


def _nearest_folder(path: Path) -> Path:
    """The path, or the nearest parent that exists."""
    return next(folder for folder in (path, *path.parents) if folder.is_dir())


def _is_writable(device: Path) -> bool:
    """Whether it can be written; it is not created, as `open` would do where it is absent."""
    try:
        os.close(os.open(device, os.O_WRONLY | os.O_CLOEXEC))
    except OSError:
        return False
    return True


def _is_whole(folder: Path, sha256: str) -> bool | None:
    path, recipe = folder / f"{sha256}.gguf", StageStore(folder).recipe(sha256)
    try:
        return wrong_pieces(recipe, path) == [] if recipe is not None else None
    except FileNotFoundError:
        return None
    except OSError:
        return False  # unreadable


def main() -> None:
    """Print the report."""
    structlog.configure(logger_factory=structlog.PrintLoggerFactory(file=sys.stderr))
    sys.stdout.write(json.dumps(asdict(report_host(sys.argv[1:]))) + "\n")


if __name__ == "__main__":
    main()
