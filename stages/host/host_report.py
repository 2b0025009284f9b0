"""Host report for `mesh doctor`: versions, devices, memory, disk and clock.

Run as a program: sha256 of recipes of stage files as arguments, the findings as JSON on standard output.
"""

from __future__ import annotations

import asyncio
import importlib.metadata
import json
import platform
import shutil
import sys
import time
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import llama_cpp
import structlog

from spanmesh_proto import PROTOCOL_VERSION, SOFTWARE_VERSION
from stages.host.cpu_latency import DEVICE
from stages.runtime.devices import Device, list_devices
from stages.runtime.llama import init_backend
from stages.runtime.memory import free_memory_bytes
from stages.weights.assembly import wrong_pieces
from stages.weights.store import StageStore, default_root

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

_PACKAGES = {"llama_cpp": "llama-cpp-python", "ray": "ray", "grpc": "grpcio"}


@dataclass(frozen=True)
class HostSelfReport:
    """What was found.

    Attributes:
        versions: Of spanmesh, its protocol, Python, and the packages that matter.
        platform: System and architecture.
        devices: What llama.cpp finds; layers go to those that are no CPU first.
        can_offload: Whether llama.cpp was built for something else than the CPU.
        free_memory_bytes: What new processes may take.
        free_disk_bytes: Where stage files are kept.
        cache_dir: That place.
        can_stay_awake: Whether processors can be kept awake while requests run, see
            `stages.host.cpu_latency`.
        files: By the sha256 of its recipe, whether a stage file is what that says; None if it is not there.
        unix_s: This host's clock when it was done.
    """

    versions: dict[str, str]
    platform: str
    devices: tuple[Device, ...]
    can_offload: bool
    free_memory_bytes: int
    free_disk_bytes: int
    cache_dir: str
    can_stay_awake: bool
    files: dict[str, bool | None]
    unix_s: float


def report_host(hashes: Iterable[str] = ()) -> HostSelfReport:
    """Look around; reads the stage files named, whole.

    Args:
        hashes: sha256 of the recipes of stage files, hex.
    """
    init_backend()
    root = default_root()
    versions = {"spanmesh": SOFTWARE_VERSION, "protocol": str(PROTOCOL_VERSION)}
    versions["python"] = platform.python_version()
    versions |= {name: importlib.metadata.version(package) for name, package in _PACKAGES.items()}
    return HostSelfReport(
        versions=versions,
        platform=f"{platform.system()} {platform.machine()}",
        devices=list_devices(),
        can_offload=bool(llama_cpp.llama_supports_gpu_offload()),
        free_memory_bytes=free_memory_bytes(),
        free_disk_bytes=shutil.disk_usage(_nearest_folder(root)).free,
        cache_dir=str(root),
        can_stay_awake=_is_writable(DEVICE),
        files={sha256: _is_whole(root / "stages", sha256) for sha256 in hashes},
        unix_s=time.time(),
    )


def _nearest_folder(path: Path) -> Path:
    """The path, or the first above it that exists."""
    return next(folder for folder in (path, *path.parents) if folder.is_dir())


def _is_writable(device: Path) -> bool:
    try:
        with device.open("wb", buffering=0):
            return True
    except OSError:
        return False


def _is_whole(folder: Path, sha256: str) -> bool | None:
    path, recipe = folder / f"{sha256}.gguf", StageStore(folder).recipe(sha256)
    try:
        return wrong_pieces(recipe, path) == [] if recipe is not None else None
    except FileNotFoundError:
        return None
    except OSError:
        return False  # the disk does not give it any more


class HostReporter:
    """The Ray actor that looks around on one host."""

    async def report(self, hashes: list[str]) -> dict[str, Any]:
        """See `report`; fit for JSON."""
        return asdict(await asyncio.to_thread(report_host, hashes))

    async def clock_s(self) -> float:
        """Unix time here, now."""
        return time.time()


def main() -> None:
    """Look and print."""
    structlog.configure(logger_factory=structlog.PrintLoggerFactory(file=sys.stderr))
    sys.stdout.write(json.dumps(asdict(report_host(sys.argv[1:]))) + "\n")


if __name__ == "__main__":
    main()
