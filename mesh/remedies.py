"""What would make a model fit that does not. Pure."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Final

from stages.runtime.kv_types import KV_TYPES, fits_heads

if TYPE_CHECKING:
    from collections.abc import Callable

    from mesh.stage_sizes import Workload
    from stages.slicing.model_facts import ModelFacts

# Half of f16's size, and of all that are smaller the one that changes a text least.
_COMPACT: Final = "q8_0"
# Caches grow by so many positions.
_CTX_STEP: Final = 256


def remedies(model: ModelFacts, workload: Workload, fits: Callable[[Workload], bool]) -> list[str]:
    """Options, each of which alone makes the model fit, the mildest first.

    Args:
        model: What does not fit.
        workload: With which it does not.
        fits: Whether it would with another.

    Returns:
        As a user types them; none if nothing helps.
    """
    found = []
    compact = KV_TYPES[_COMPACT]
    is_smaller = compact.num_bytes(compact.block_width) < KV_TYPES[workload.kv_type].num_bytes(
        compact.block_width
    )
    if is_smaller and fits_heads(compact, model.head_widths) and fits(replace(workload, kv_type=_COMPACT)):
        found.append(f"--kv-type {_COMPACT}")
    steps = _most((workload.ctx_size - 1) // _CTX_STEP, lambda n: fits(_with_ctx(workload, n * _CTX_STEP)))
    if steps:
        found.append(f"--ctx-size {steps * _CTX_STEP}")
    slots = _most(workload.num_slots - 1, lambda n: fits(replace(workload, num_slots=n)))
    if slots:
        found.append(f"--parallel {slots}")
    return found


def _with_ctx(workload: Workload, ctx_size: int) -> Workload:
    return replace(workload, ctx_size=ctx_size)


def _most(limit: int, holds: Callable[[int], bool]) -> int:
    """The largest number up to `limit` for which `holds`, which must hold for all below one; 0 if none."""
    low, high = 0, limit
    while low < high:
        middle = (low + high + 1) // 2
        if holds(middle):
            low = middle
        else:
            high = middle - 1
    return low
