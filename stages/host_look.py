"""What a host finds when it looks at itself: versions, devices, memory, disk, clock, files. Measures nothing.

Run as a program: sha256 of stage files as arguments, the findings as JSON on standard output.
"""

from __future__ import annotations

import asyncio
import ctypes
import importlib.metadata
import json
import platform
import shutil
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import llama_cpp
import structlog

from spanmesh_proto import PROTOCOL_VERSION, SOFTWARE_VERSION
from stages.cutting.digest import file_sha256
from stages.cutting.places import default_root
from stages.free_memory import free_memory_bytes
from stages.llama import init_backend
from stages.wakefulness import DEVICE

if TYPE_CHECKING:
    from collections.abc import Iterable

_PACKAGES = {"llama_cpp": "llama-cpp-python", "ray": "ray", "grpc": "grpcio"}


@dataclass(frozen=True)
class Device:
    """Something that llama.cpp computes on.

    Attributes:
        name: As llama.cpp calls it, such as `CPU` or `CUDA0`.
        description: The hardware's name.
        total_bytes: Its memory, as far as llama.cpp says.
    """

    name: str
    description: str
    total_bytes: int


@dataclass(frozen=True)
class HostLook:
    """What was found.

    Attributes:
        versions: Of spanmesh, its protocol, Python, and the packages that matter.
        platform: System and architecture.
        devices: What llama.cpp finds; layers go to those that are no CPU first.
        can_offload: Whether llama.cpp was built for something else than the CPU.
        free_memory_bytes: What new processes may take.
        free_disk_bytes: Where stage files are kept.
        cache_dir: That place.
        can_stay_awake: Whether processors can be kept awake while requests run, see `stages.wakefulness`.
        files: By sha256, whether a stage file that is there has that content; None if it is not there.
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


def look(hashes: Iterable[str] = ()) -> HostLook:
    """Look around; reads the stage files named, whole.

    Args:
        hashes: sha256 of stage files, hex.
    """
    init_backend()
    root = default_root()
    versions = {"spanmesh": SOFTWARE_VERSION, "protocol": str(PROTOCOL_VERSION)}
    versions["python"] = platform.python_version()
    versions |= {name: importlib.metadata.version(package) for name, package in _PACKAGES.items()}
    return HostLook(
        versions=versions,
        platform=f"{platform.system()} {platform.machine()}",
        devices=_devices(),
        can_offload=bool(llama_cpp.llama_supports_gpu_offload()),
        free_memory_bytes=free_memory_bytes(),
        free_disk_bytes=shutil.disk_usage(_nearest_folder(root)).free,
        cache_dir=str(root),
        can_stay_awake=_is_writable(DEVICE),
        files={sha256: _is_whole(root / "stages" / f"{sha256}.gguf", sha256) for sha256 in hashes},
        unix_s=time.time(),
    )


def _devices() -> tuple[Device, ...]:
    """llama.cpp's own list, by `ggml_backend_dev_count` and its like, which the Python package leaves out."""
    library = _ggml()
    library.ggml_backend_dev_count.restype = ctypes.c_size_t
    library.ggml_backend_dev_get.restype = ctypes.c_void_p
    library.ggml_backend_dev_get.argtypes = [ctypes.c_size_t]
    for name in ("ggml_backend_dev_name", "ggml_backend_dev_description"):
        getattr(library, name).restype = ctypes.c_char_p
        getattr(library, name).argtypes = [ctypes.c_void_p]
    size_pointer = ctypes.POINTER(ctypes.c_size_t)
    library.ggml_backend_dev_memory.restype = None
    library.ggml_backend_dev_memory.argtypes = [ctypes.c_void_p, size_pointer, size_pointer]
    found = []
    for index in range(library.ggml_backend_dev_count()):
        device = library.ggml_backend_dev_get(index)
        free, total = ctypes.c_size_t(), ctypes.c_size_t()
        library.ggml_backend_dev_memory(device, ctypes.byref(free), ctypes.byref(total))
        name = library.ggml_backend_dev_name(device).decode(errors="replace")
        description = library.ggml_backend_dev_description(device).decode(errors="replace")
        found.append(Device(name, description, total.value))
    return tuple(found)


def _ggml() -> Any:
    """The library that has the list. It is loaded already; this finds it again beside llama.cpp's."""
    folder = Path(llama_cpp.__file__).parent / "lib"
    for path in sorted(folder.glob("*ggml.*")):
        return ctypes.CDLL(str(path))
    raise OSError(f"no ggml library lies in {folder}")


def _nearest_folder(path: Path) -> Path:
    """The path, or the first above it that exists."""
    return next(folder for folder in (path, *path.parents) if folder.is_dir())


def _is_writable(device: Path) -> bool:
    try:
        with device.open("wb", buffering=0):
            return True
    except OSError:
        return False


def _is_whole(path: Path, sha256: str) -> bool | None:
    return file_sha256(path) == sha256 if path.is_file() else None


class LookingHost:
    """The Ray actor that looks around on one host."""

    async def look(self, hashes: list[str]) -> dict[str, Any]:
        """See `look`; fit for JSON."""
        return asdict(await asyncio.to_thread(look, hashes))

    async def clock_s(self) -> float:
        """Unix time here, now."""
        return time.time()


def main() -> None:
    """Look and print."""
    structlog.configure(logger_factory=structlog.PrintLoggerFactory(file=sys.stderr))
    sys.stdout.write(json.dumps(asdict(look(sys.argv[1:]))) + "\n")


if __name__ == "__main__":
    main()
