"""Pictures for reports, if matplotlib is there: the extra `bench`."""

from __future__ import annotations

import importlib.util
from typing import Any

import structlog

log = structlog.get_logger()


def can_draw() -> bool:
    """Whether matplotlib is there; if not, a line in the log says how to get it."""
    if importlib.util.find_spec("matplotlib") is None:
        log.warning("no_pictures", remedy="pip install 'spanmesh[bench]'")
        return False
    return True


def new_figure(across: str, up: str) -> tuple[Any, Any]:
    """A figure and its axes with two titles, without pyplot, which would look for a screen."""
    from matplotlib.figure import Figure  # noqa: PLC0415 - optional

    figure = Figure(figsize=(9, 5), layout="constrained")
    axes = figure.subplots()
    axes.set_xlabel(across)
    axes.set_ylabel(up)
    axes.grid(alpha=0.3)
    return figure, axes
