"""Memory of a stage: free, needed and resident bytes, and the return of mapped pages."""

from __future__ import annotations

import ctypes
import resource
import sys
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

import psutil

from stages.process_limits import ROOT, groups_with
from stages.units import format_size

if TYPE_CHECKING:
    from stages.process_limits import ControlGroup

# glibc gives threads memory pools of their own, and memory freed in one pool is not used by others: a stage
# that was sent 100,000 malformed frames grew to 162 to 178 MiB and still grew, with one pool it stayed at
# 117. No time-critical code allocates. Other C libraries ignore it.
ALLOCATOR: Final = {"MALLOC_ARENA_MAX": "1"}
_MADV_DONTNEED: Final = 4
_SELF: Final = Path("/proc/self")
# Share of copied weights from which the pages of the file are not those computed with.
_MUCH: Final = 0.125
# Checked after each such share of the file.
_STEP: Final = 0.05


class _GroupFiles(NamedTuple):
    """Files with the limits of one version of Linux control groups."""

    limit: str
    used: str
    file_pages: tuple[str, ...]


_VERSION_1: Final = _GroupFiles(
    "memory.limit_in_bytes", "memory.usage_in_bytes", ("total_inactive_file", "total_active_file")
)
_VERSION_2: Final = _GroupFiles("memory.max", "memory.current", ("inactive_file", "active_file"))


@dataclass(frozen=True)
class StageMemory:
    """Memory of a stage, in bytes; an upper bound."""

    weight_bytes: int
    """Weights, with embedding and head where it holds them."""
    cache_bytes: int
    """The KV cache, and the state of recurrent layers."""
    buffer_bytes: int
    """llama.cpp's compute buffers, and logits."""
    process_bytes: int
    """The rest of its process."""
    gpus: tuple[GpuShare, ...] = ()
    """Shares of weights and cache on GPUs, in the order of layers. Layers before those are on the processor.
    """
    cpu_moe_layers: int = 0
    """First layers of the stage whose experts are no part of these shares."""

    @property
    def total_bytes(self) -> int:
        """All of the host's own memory."""
        return self.loading_bytes + self.process_bytes

    @property
    def loading_bytes(self) -> int:
        """The part that is added once the process runs."""
        elsewhere = sum(
            -gpu.buffer_bytes if gpu.shares_host_memory else gpu.weight_bytes + gpu.cache_bytes
            for gpu in self.gpus
        )
        return self.weight_bytes + self.cache_bytes + self.buffer_bytes - elsewhere

    @property
    def gpu_layers(self) -> tuple[tuple[str, int], ...]:
        """Devices with their numbers of layers, as `RuntimeOptions` takes them."""
        return tuple((gpu.device, gpu.num_layers) for gpu in self.gpus)

    def __str__(self) -> str:
        on_gpus = "".join(
            f", of which {format_size(gpu.weight_bytes + gpu.cache_bytes)} on {gpu.device}"
            for gpu in self.gpus
        )
        experts = f", experts of {self.cpu_moe_layers} layers on the processor" if self.cpu_moe_layers else ""
        return (
            f"{format_size(self.weight_bytes)} for weights, {format_size(self.cache_bytes)} for the KV "
            f"cache, {format_size(self.buffer_bytes)} for buffers{on_gpus}{experts}"
        )


@dataclass(frozen=True)
class GpuShare:
    """Consecutive layers of a stage on one device, the head with the stage's last layer if it is the tail."""

    device: str
    """llama.cpp's name of the device."""
    num_layers: int
    """How many layers."""
    weight_bytes: int
    """Their weights."""
    cache_bytes: int
    """Their KV cache."""
    buffer_bytes: int
    """llama.cpp's compute buffers there, the backend's own memory, and in a first stage the head that nothing
    is computed with."""
    shares_host_memory: bool = False
    """Whether all that is the host's own memory."""

    @property
    def total_bytes(self) -> int:
        """Sum of its parts."""
        return self.weight_bytes + self.cache_bytes + self.buffer_bytes


# llama.cpp maps a whole file and reads all of it at once. Weights that its CPU kernels need in another layout
# (repacked), or that go to a GPU, are then copied; but the original pages stay in the process as long as the
# model does, so that its weights are in memory twice. Such pages can be dropped at any time: the kernel reads
# them again on access, mostly from its page cache. So do weights that llama.cpp has yet to copy, and those
# that it reads in the mapping, such as norms and rows of the embedding.
class CopiedPages:
    """Drops pages of a model file as soon as llama.cpp has copied them.

    Args:
        path: File that is about to be loaded.
        on_gpu: Whether layers go to a GPU, where copies cannot be observed.
    """

    def __init__(self, path: Path, *, on_gpu: bool) -> None:
        self._path = path
        self._on_gpu = on_gpu
        self._size_bytes = path.stat().st_size if path.is_file() else 0
        self._before_bytes = anonymous_bytes()
        self._next_share = _STEP

    def loaded(self, share: float) -> None:
        """Report the loaded share, 0 to 1; once more at the end."""
        if share < min(self._next_share, 1.0):
            return
        self._next_share = share + _STEP
        copied_bytes = anonymous_bytes() - self._before_bytes
        if self._on_gpu or copied_bytes > _MUCH * share * self._size_bytes:
            give_back_mapped_pages(self._path)


def free_memory_bytes() -> int:
    """Memory for new processes before the host swaps or a control group's limit is reached."""
    return min([psutil.virtual_memory().available, *free_in_groups_bytes()])


def free_in_groups_bytes(root: Path = ROOT) -> list[int]:
    """Memory left by each control group with a limit, from this process's own upwards.

    A container's limit is one of these; the host's own memory does not show it. Pages of files count as free:
    the kernel drops them before it kills a process.

    Args:
        root: Of the file system that holds `proc` and `sys`.
    """
    return [left for group in groups_with("memory", root) if (left := _free_in(group)) is not None]


def _free_in(group: ControlGroup) -> int | None:
    files = _VERSION_1 if group.version == 1 else _VERSION_2
    limit, used, stat = group.read(files.limit), group.read(files.used), group.read("memory.stat")
    if limit is None or used is None or stat is None or limit == "max":
        return None
    pages = dict(line.split() for line in stat.splitlines())
    dropped_bytes = sum(int(pages.get(name, 0)) for name in files.file_pages)
    return max(0, int(limit) - int(used) + dropped_bytes)


def resident_bytes() -> int:
    """Resident memory of this process, mapped files included."""
    return int(_own().memory_info().rss)


def peak_resident_bytes() -> int:
    """The most resident memory that this process has had, mapped files included."""
    if sys.platform == "linux":
        # `getrusage` counts what the process that started this one had, too.
        return _status_bytes("VmHWM")
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


@cache
def _own() -> psutil.Process:
    return psutil.Process()


def anonymous_bytes() -> int:
    """Anonymous memory of this process; 0 without Linux."""
    return _status_bytes("RssAnon") if sys.platform == "linux" else 0


def _status_bytes(name: str) -> int:
    """A line of this process's status in Linux; 0 without it."""
    for line in (_SELF / "status").read_text(encoding="ascii", errors="replace").splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    return 0


def give_back_mapped_pages(path: Path) -> int:
    """Drop all pages of a mapped file from this process, until the next access.

    Args:
        path: The file.

    Returns:
        Bytes of its address space; 0 without Linux.
    """
    if sys.platform != "linux":
        return 0
    libc = ctypes.CDLL(None, use_errno=True)
    libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    given_back = 0
    for start, stop in _mappings(path):
        if libc.madvise(start, stop - start, _MADV_DONTNEED) == 0:
            given_back += stop - start
    return given_back


def _mappings(path: Path) -> list[tuple[int, int]]:
    """Address ranges, half-open, where this process maps a file for reading."""
    name = str(path.resolve())
    found = []
    for line in (_SELF / "maps").read_text(encoding="utf-8", errors="surrogateescape").splitlines():
        # Addresses, rights, offset, device, inode, and a name that may contain spaces.
        fields = line.split(maxsplit=5)
        # Writable pages must stay: they may differ from the file.
        if len(fields) == 6 and fields[5] == name and "w" not in fields[1]:
            start, _, stop = fields[0].partition("-")
            found.append((int(start, 16), int(stop, 16)))
    return found
