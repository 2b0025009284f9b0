"""Byte sizes as text."""

from __future__ import annotations


def format_size(size_bytes: int) -> str:
    """`1.5 GiB`; for messages."""
    size = float(size_bytes)
    for unit in ("B", "KiB", "MiB"):
        if size < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} GiB"
