"""Byte sizes and times as text."""

from __future__ import annotations


def format_size(size_bytes: int) -> str:
    """`1.5 GiB`; for messages."""
    size = float(size_bytes)
    for unit in ("B", "KiB", "MiB"):
        if size < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} GiB"


def format_duration(seconds: float) -> str:
    """`40 seconds`, `5 minutes`, `3 hours` or `60 days`; for messages."""
    for unit, unit_s in (("day", 86400), ("hour", 3600), ("minute", 60)):
        # Two of a unit at least: 90 minutes say more than an hour.
        if seconds >= 2 * unit_s:
            return f"{seconds / unit_s:.0f} {unit}s"
    return f"{seconds:.0f} seconds"
