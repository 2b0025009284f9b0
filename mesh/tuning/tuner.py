"""Tuning and measuring of drafters, each in a process of its own, which alone loads torch."""

from __future__ import annotations

import ctypes
import importlib.util
import multiprocessing
import os
import signal
import sys
from typing import TYPE_CHECKING, Any, Final

from mesh.draft.loading import check_drafter
from mesh.tuning.acceptance import gain
from mesh.tuning.run_folder import RunFolder
from spanmesh_proto.errors import ModelError
from speculative.draft.context import DraftOptions
from stages.files import write_error
from stages.isolated import ProcessEnded, call

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from mesh.tuning.jobs import MeasuredFolder, MeasureJob, Progress, TuneJob, TuneOutcome
    from stages.isolated import ProcessHandle

_NICENESS: Final = 15
_PR_SET_PDEATHSIG: Final = 1


def require_torch() -> None:
    """Check that drafters can be tuned and measured here.

    Raises:
        ModelError: If they cannot.
    """
    if importlib.util.find_spec("torch") is None:
        raise ModelError(
            "drafters are trained and measured with the package torch: pip install 'spanmesh[tune]', see "
            "docs/installing.md for the build of it"
        )


def tune(job: TuneJob, progress: Progress, handle: ProcessHandle | None = None) -> TuneOutcome:
    """Tune a drafter.

    Args:
        job: What is asked for.
        progress: Called while it is made.
        handle: Takes the process, to stop or to end it.

    Raises:
        ModelError: If torch is missing, if a recording or a file does not fit, if the drafter foretells no
            more with its features than with others, or if the process ends.
    """
    outcome: TuneOutcome = _in_process(_tune, job, progress, handle)
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
        ModelError: If it cannot draft, or cannot be moved there.
    """
    check_drafter(outcome.candidate, target, DraftOptions())
    found = gain(outcome.before.answers, outcome.after.answers)
    is_worse = found is None or found.per_window.value < 0
    path = output.with_suffix(".rejected.gguf") if is_worse else output
    try:
        outcome.candidate.replace(path)
    except OSError as error:
        raise write_error(path, error) from error
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
    require_torch()
    if not is_resumed:
        RunFolder(output).require_new()


def _in_process(
    function: Callable[..., Any],
    job: TuneJob | MeasureJob,
    progress: Progress,
    handle: ProcessHandle | None = None,
) -> Any:
    require_torch()
    try:
        return call(function, job, progress=progress, handle=handle)
    except ProcessEnded as ended:
        raise ModelError(
            f"the process that computes with torch ended with exit code {ended.exit_code}: if memory ran "
            "out, give a smaller --batch; an unfinished run goes on with --resume"
        ) from None


def _tune(job: TuneJob, report: Progress) -> TuneOutcome:
    """Work of the process."""
    if job.is_background:
        _give_way()
    # It may be stopped from now on.
    report("starting", 0.0)
    from mesh.tuning.work import tune_here  # noqa: PLC0415 - torch

    return tune_here(job, report)


def _measure(job: MeasureJob, report: Progress) -> tuple[MeasuredFolder, ...]:
    """Work of the process."""
    from mesh.tuning.work import measure_here  # noqa: PLC0415 - torch

    return measure_here(job, report)


def _give_way() -> None:
    """Compute behind all else, and end with the parent, in which state ever this process is.

    A stopped process cannot look whether its parent still lives. Linux kills it then. Elsewhere the group of
    its own is continued with SIGHUP by the system once the parent is gone.
    """
    os.nice(_NICENESS)
    os.setpgid(0, 0)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    parent = multiprocessing.parent_process()
    if parent is not None and parent.pid != os.getppid():
        sys.exit(1)
