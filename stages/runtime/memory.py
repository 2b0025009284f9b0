"""Memory of a stage: free, needed and resident bytes, and the return of mapped pages."""

from __future__ import annotations

import ctypes
import sys
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

import psutil

from stages.units import format_size

if TYPE_CHECKING:
    from collections.abc import Iterator


class _GroupFiles(NamedTuple):
    """Where one version of Linux control groups says what it allows."""

    limit: str
    used: str
    file_pages: tuple[str, ...]


_VERSION_1: Final = _GroupFiles(
    "memory.limit_in_bytes", "memory.usage_in_bytes", ("total_inactive_file", "total_active_file")
)
_VERSION_2: Final = _GroupFiles("memory.max", "memory.current", ("inactive_file", "active_file"))
_ROOT: Final = Path("/")


def free_memory_bytes() -> int:
    """What new processes may take before the host swaps or a control group's limit is met."""
    return min([psutil.virtual_memory().available, *free_in_groups_bytes()])


def free_in_groups_bytes(root: Path = _ROOT) -> list[int]:
    """What each control group with a limit leaves free, from this process's own upwards.

    A container's limit is one of these; the host's own memory says nothing of it. Pages of files count as
    free: the kernel drops them before it kills anybody.

    Args:
        root: Of the file system that holds `proc` and `sys`.
    """
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return []
    free = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        mount = root / "sys/fs/cgroup" / ("memory" if controllers else "")
        files = _VERSION_1 if controllers else _VERSION_2
        free += [left for folder in _upwards(mount, path) if (left := _free_in(folder, files)) is not None]
    return free


def _upwards(mount: Path, path: str) -> Iterator[Path]:
    """The group's folder and all above it. Inside a container the first may not be visible."""
    folder = mount / path.lstrip("/")
    while folder != mount:
        yield folder
        folder = folder.parent
    yield mount


def _free_in(folder: Path, files: _GroupFiles) -> int | None:
    try:
        limit = (folder / files.limit).read_text().strip()
        used_bytes = int((folder / files.used).read_text())
        stat = (folder / "memory.stat").read_text()
    except OSError:
        return None
    if limit == "max":
        return None
    pages = dict(line.split() for line in stat.splitlines())
    dropped_bytes = sum(int(pages.get(name, 0)) for name in files.file_pages)
    return max(0, int(limit) - used_bytes + dropped_bytes)


def resident_bytes() -> int:
    """Bytes in memory, those of files that it maps included."""
    return int(_own().memory_info().rss)


@cache
def _own() -> psutil.Process:
    return psutil.Process()


@dataclass(frozen=True)
class StageMemory:
    """What a stage takes, in bytes; never less than it will really take.

    Attributes:
        weight_bytes: Weights, with embedding and head where it holds them.
        cache_bytes: The KV cache, and the state of recurrent layers.
        buffer_bytes: What llama.cpp computes in, and logits.
        process_bytes: The process around it.
        gpus: What of the weights and of the cache lies on GPUs, in the order of layers. Layers before those
            are computed by the processor.
    """

    weight_bytes: int
    cache_bytes: int
    buffer_bytes: int
    process_bytes: int
    gpus: tuple[GpuShare, ...] = ()

    @property
    def total_bytes(self) -> int:
        """All that it takes of the host's own memory."""
        return self.loading_bytes + self.process_bytes

    @property
    def loading_bytes(self) -> int:
        """What of that comes on top once the process runs."""
        elsewhere = sum(
            -gpu.buffer_bytes if gpu.shares_host_memory else gpu.weight_bytes + gpu.cache_bytes
            for gpu in self.gpus
        )
        return self.weight_bytes + self.cache_bytes + self.buffer_bytes - elsewhere

    @property
    def gpu_layers(self) -> tuple[tuple[str, int], ...]:
        """Devices with how many layers each holds, as `RuntimeOptions` takes them."""
        return tuple((gpu.device, gpu.num_layers) for gpu in self.gpus)

    def __str__(self) -> str:
        on_gpus = "".join(
            f", of which {format_size(gpu.weight_bytes + gpu.cache_bytes)} on {gpu.device}"
            for gpu in self.gpus
        )
        return (
            f"{format_size(self.weight_bytes)} for weights, {format_size(self.cache_bytes)} for the KV "
            f"cache, {format_size(self.buffer_bytes)} for buffers{on_gpus}"
        )


@dataclass(frozen=True)
class GpuShare:
    """Consecutive layers of a stage on one device, the head with the stage's last layer if it is the tail.

    Attributes:
        device: As llama.cpp calls it.
        num_layers: How many layers.
        weight_bytes: Their weights.
        cache_bytes: Their KV cache.
        buffer_bytes: What llama.cpp computes in there, and what the backend takes for itself.
        shares_host_memory: Whether all that is taken from the host's own memory.
    """

    device: str
    num_layers: int
    weight_bytes: int
    cache_bytes: int
    buffer_bytes: int
    shares_host_memory: bool = False

    @property
    def total_bytes(self) -> int:
        """All of it."""
        return self.weight_bytes + self.cache_bytes + self.buffer_bytes


# glibc gives threads memory pools of their own, and what one of gRPC's threads freed in its pool is of no use
# to the others: a stage that was sent 100,000 hostile frames came to 162 to 178 MiB and still grew, with one
# pool it stayed at 117. Nothing that is in a hurry allocates. Other C libraries ignore it.
ALLOCATOR: Final = {"MALLOC_ARENA_MAX": "1"}


# llama.cpp maps a whole file and has all of it read at once. Weights that its CPU kernels want in another
# order (the repacked ones), or that lie on a GPU, it then copies; but the pages that they came from stay in
# the process as long as the model does, so that its weights lie in memory twice. Such pages can go at any
# time: the kernel takes them from the file again, mostly from its page cache, should anybody look. What
# llama.cpp has yet to copy, and what it reads in the mapping for ever, such as norms and the rows of the
# embedding, comes back that way.
_MADV_DONTNEED: Final = 4
_SELF: Final = Path("/proc/self")
# Of what is loaded: if more than that was copied, the pages of the file are not what is computed with.
_MUCH: Final = 0.125
# Looked at after each such share of the file.
_STEP: Final = 0.05


class CopiedPages:
    """Watches a model being loaded, and gives back pages as soon as they have been copied.

    Args:
        path: Of the file that is about to be loaded.
        on_gpu: Whether layers go to a GPU, where nobody sees them arrive.
    """

    def __init__(self, path: Path, *, on_gpu: bool) -> None:
        self._path = path
        self._on_gpu = on_gpu
        self._size_bytes = path.stat().st_size if path.is_file() else 0
        self._before_bytes = anonymous_bytes()
        self._next_share = _STEP

    def loaded(self, share: float) -> None:
        """Note how much is loaded, 0 to 1; at the end this is to be said once more."""
        if share < min(self._next_share, 1.0):
            return
        self._next_share = share + _STEP
        copied_bytes = anonymous_bytes() - self._before_bytes
        if self._on_gpu or copied_bytes > _MUCH * share * self._size_bytes:
            give_back_mapped_pages(self._path)


def anonymous_bytes() -> int:
    """What this process holds of memory that no file stands behind; 0 where there is no Linux to tell."""
    if sys.platform != "linux":
        return 0
    for line in (_SELF / "status").read_text(encoding="ascii", errors="replace").splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    return 0


def give_back_mapped_pages(path: Path) -> int:
    """Have this process hold no page of a file that it has mapped, until it looks at one again.

    Args:
        path: Of the file.

    Returns:
        How many bytes of address space that concerned; 0 where there is no Linux.
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
    """Where this process has mapped a file to read it, addresses half-open."""
    name = str(path.resolve())
    found = []
    for line in (_SELF / "maps").read_text(encoding="utf-8", errors="surrogateescape").splitlines():
        # Addresses, rights, offset, device, inode, and a name that may have spaces in it.
        fields = line.split(maxsplit=5)
        # What may be written to must stay: it need not be what the file holds.
        if len(fields) == 6 and fields[5] == name and "w" not in fields[1]:
            start, _, stop = fields[0].partition("-")
            found.append((int(start, 16), int(stop, 16)))
    return found
