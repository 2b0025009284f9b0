"""Tuning and measuring of drafters, each in a process of its own, which alone loads torch."""

from __future__ import annotations

import importlib.util
from typing import TYPE_CHECKING, Any

from mesh.draft.loading import check_drafter
from mesh.tuning.acceptance import gain
from mesh.tuning.run_folder import RunFolder
from spanmesh_proto.errors import ModelError
from speculative.draft.context import DraftOptions
from stages.isolated import ProcessEnded, call

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from mesh.tuning.jobs import MeasuredFolder, MeasureJob, Progress, TuneJob, TuneOutcome


def tune(job: TuneJob, progress: Progress) -> TuneOutcome:
    """Tune a drafter.

    Raises:
        ModelError: If torch is missing, if a recording or a file does not fit, if the drafter foretells no
            more with its features than with others, or if the process ends.
    """
    outcome: TuneOutcome = _in_process(_tune, job, progress)
    return outcome


def measure_drafters(job: MeasureJob, progress: Progress) -> tuple[MeasuredFolder, ...]:
    """Measure drafters on the answers of each recording that none of them has learned from.

    Raises:
        ModelError: If torch is missing, if a recording or a file does not fit, or if the process ends.
    """
    found: tuple[MeasuredFolder, ...] = _in_process(_measure, job, progress)
    return found


def settle(outcome: TuneOutcome, output: Path, target: Path) -> Path:
    """Check a new drafter as serving does, and give it its name; its run's folder is removed.

    Args:
        outcome: What tuning has made.
        output: Where to.
        target: The model's file.

    Returns:
        `output`; with the ending `.rejected.gguf` if it is right less often than before.

    Raises:
        ModelError: If it cannot draft.
    """
    check_drafter(outcome.candidate, target, DraftOptions())
    found = gain(outcome.before.answers, outcome.after.answers)
    is_worse = found is None or found.per_window.value < 0
    path = output.with_suffix(".rejected.gguf") if is_worse else output
    outcome.candidate.replace(path)
    RunFolder(output).remove()
    return path


def require_ready(output: Path, *, is_resumed: bool) -> None:
    """Check what would end a tuning at once, before anything is recorded for it.

    Args:
        output: As in `TuneJob`.
        is_resumed: Likewise.

    Raises:
        ModelError: If torch is missing, or an unfinished run is in the way.
    """
    _require_torch()
    if not is_resumed:
        RunFolder(output).require_new()


def _require_torch() -> None:
    if importlib.util.find_spec("torch") is None:
        raise ModelError(
            "drafters are trained and measured with the package torch: pip install 'spanmesh[tune]', see "
            "docs/installing.md for the build of it"
        )


def _in_process(function: Callable[..., Any], job: TuneJob | MeasureJob, progress: Progress) -> Any:
    _require_torch()
    try:
        return call(function, job, progress=progress)
    except ProcessEnded as ended:
        raise ModelError(
            f"the process that computes with torch ended with exit code {ended.exit_code}: if memory ran "
            "out, give a smaller --batch; an unfinished run goes on with --resume"
        ) from None


def _tune(job: TuneJob, report: Progress) -> TuneOutcome:
    """Work of the process."""
    from mesh.tuning.work import tune_here  # noqa: PLC0415 - torch

    return tune_here(job, report)


def _measure(job: MeasureJob, report: Progress) -> tuple[MeasuredFolder, ...]:
    """Work of the process."""
    from mesh.tuning.work import measure_here  # noqa: PLC0415 - torch

    return measure_here(job, report)
