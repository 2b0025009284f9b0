"""Whether the generic rules are enough for a family that the table does not know."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import TYPE_CHECKING, Final

import structlog

from spanmesh_proto.errors import UncuttableModel

if TYPE_CHECKING:
    from stages.cutting.source_model import SourceModel
    from stages.layers import LayerRange

log = structlog.get_logger()

_TIME_LIMIT_S: Final = 1800


def first_cut(layers: LayerRange, n_layers: int) -> int | None:
    """Where a stage's layers part from the rest: below, else above; None for the whole model."""
    if layers.start > 0:
        return layers.start
    return layers.stop if layers.stop < n_layers else None


def require_exact_cut(model: SourceModel, layers: LayerRange) -> None:
    """Compare an unknown family's model, cut where these layers start (or end), with itself whole.

    In a process of its own: for an architecture that it was not made for, llama.cpp may abort.

    Raises:
        UncuttableModel: If the two differ, or the model's layers have no outputs to tap.
    """
    cut = first_cut(layers, model.n_layers)
    if model.is_known or cut is None:
        return
    name, architecture = model.header.path.name, model.header.architecture
    log.info("self_check_started", model=name, architecture=architecture, cut=cut)
    try:
        child = subprocess.run(
            [sys.executable, "-m", "stages.cutting.certify_child", str(model.header.path), str(cut)],
            capture_output=True,
            text=True,
            # An abort should not start a debugger.
            env={**os.environ, "GGML_NO_BACKTRACE": "1"},
            errors="replace",
            timeout=_TIME_LIMIT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        reason = f"comparing it with the whole model took more than {_TIME_LIMIT_S} s"
    else:
        if child.returncode == 0:
            log.info("self_check_passed", model=name, architecture=architecture, cut=cut)
            return
        reason = _reason(child)
    raise UncuttableModel(
        f"{name} cannot be cut: {architecture!r} has no rules here, and with the generic ones {reason}"
    )


def _reason(child: subprocess.CompletedProcess[str]) -> str:
    if child.returncode < 0:
        return f"llama.cpp ended with signal {-child.returncode}"
    lines = child.stdout.strip().splitlines() or child.stderr.strip().splitlines()
    return lines[-1] if lines else f"the comparison ended with exit code {child.returncode}"
