"""What each host of a mesh holds, held against its share. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mesh.bench.report_tools import markdown_table

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mesh.bench.stress.memory import Footprint

_MB = 1e6
_HEADS = ("stage", "host", "layers", "weights", "KV cache", "stage's process", "the rest", "within 300 MB")


def shares_table(found: Sequence[Footprint], layers: Sequence[str]) -> str:
    """A line for each stage; sizes in MB.

    Args:
        found: Stages, in order.
        layers: What each holds, for people.
    """
    return markdown_table(
        _HEADS,
        [
            (
                str(each.index),
                each.host,
                held,
                f"{each.weight_bytes / _MB:.0f}",
                f"{each.cache_bytes / _MB:.0f}",
                f"{each.process_bytes / _MB:.0f}",
                f"{each.overhead_bytes / _MB:.0f}",
                "yes" if each.is_within else "NO",
            )
            for each, held in zip(found, layers, strict=True)
        ],
    )
