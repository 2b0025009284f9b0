"""Memory that the C library keeps for later."""

from __future__ import annotations

import ctypes


def return_free_memory() -> None:
    """Return free memory to the system, where the C library can; takes some milliseconds.

    What a large request has left in the heap would stay there until the next one.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
