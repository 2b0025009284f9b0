"""What this process has in memory now."""

from __future__ import annotations

from functools import cache

import psutil


def resident_bytes() -> int:
    """Bytes in memory, those of files that it maps included."""
    return int(_own().memory_info().rss)


@cache
def _own() -> psutil.Process:
    return psutil.Process()
