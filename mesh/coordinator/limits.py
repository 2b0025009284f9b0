"""How far one request may speculate: what the server allows, narrowed by what the request says."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mesh.engine import SpeculationLimits
    from speculative.controller import ControllerOptions


def narrowed(options: ControllerOptions, limits: SpeculationLimits) -> ControllerOptions | None:
    """The controller's options for one request; None if nothing may be proposed.

    Args:
        options: The server's.
        limits: The request's; a bound above the server's changes nothing.
    """
    if limits.mode == "off" or limits.max_width == 0 or options.fixed_width == 0:
        return None
    width, depth = limits.max_width, limits.depth
    return replace(
        options,
        max_width=_least(options.max_width, width),
        max_depth=_least(options.max_depth, depth),
        fixed_width=None if options.fixed_width is None else _least(options.fixed_width, width),
        fixed_depth=None if options.fixed_depth is None else _least(options.fixed_depth, depth),
    )


def _least(bound: int, wanted: int | None) -> int:
    return bound if wanted is None else min(bound, wanted)
