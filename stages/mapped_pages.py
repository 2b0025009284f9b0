"""Gives back pages of a model file that llama.cpp mapped, copied from, and reads no more.

llama.cpp maps a whole file and has all of it read at once. Weights that its CPU kernels want in another order
(the repacked ones), or that lie on a GPU, it then copies; but the pages that they came from stay in the
process as long as the model does, so that its weights lie in memory twice. Such pages can go at any time: the
kernel takes them from the file again, mostly from its page cache, should anybody look. What llama.cpp has yet
to copy, and what it reads in the mapping for ever, such as norms and the rows of the embedding, comes back
that way.
"""

from __future__ import annotations

import ctypes
import sys
from pathlib import Path
from typing import Final

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
