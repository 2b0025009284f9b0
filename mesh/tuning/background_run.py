"""One training in the background: its thread, its process, and what comes of it."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING

import structlog

from mesh.tuning.background import judged
from mesh.tuning.tuner import tune
from spanmesh_proto.errors import MeshError, ModelError
from stages.isolated import ProcessHandle

if TYPE_CHECKING:
    from mesh.tuning.background import Verdict
    from mesh.tuning.jobs import TuneJob, TuneOutcome
    from mesh.tuning.tuned_folder import TunedDrafter

log = structlog.get_logger()


@dataclass(frozen=True, eq=False)
class RunResult:
    """What a training has made."""

    outcome: TuneOutcome
    """The candidate."""
    verdict: Verdict
    """Whether it is better than the drafter that it was tuned from."""


class BackgroundRun:
    """A training under way; `stop` and `go_on` may be called from any thread.

    Args:
        drafter: What is to be made.
        job: How.

    Attributes:
        drafter: As given.
        is_resumed: Whether it goes on with an unfinished run.
        step: What is being done, and how far it is.
    """

    def __init__(self, drafter: TunedDrafter, job: TuneJob) -> None:
        self.drafter = drafter
        self.is_resumed = job.is_resumed
        self.step = "starting"
        self._handle = ProcessHandle()
        self._result: RunResult | MeshError | None = None
        # The process ends with this thread.
        self._thread = threading.Thread(target=self._run, args=(job,), name="tuning", daemon=True)
        self._thread.start()

    @property
    def is_stopped(self) -> bool:
        """Whether nothing is computed."""
        return self._handle.is_stopped

    def stop(self) -> None:
        """Compute nothing from now on."""
        if not self._handle.is_stopped:
            self._handle.stop()

    def go_on(self) -> None:
        """Compute again."""
        if self._handle.is_stopped:
            self._handle.go_on()

    def result(self) -> RunResult | MeshError | None:
        """What came of it, or why nothing did; None while it is under way."""
        return self._result

    def end(self) -> None:
        """End the process; what it has saved remains."""
        self._handle.kill()
        self._thread.join()

    def _run(self, job: TuneJob) -> None:
        try:
            outcome = tune(job, self._note, self._handle)
            verdict = judged(outcome.before.answers, outcome.after.answers)
            self._result = RunResult(outcome, verdict)
        except MeshError as error:
            self._result = error
        except Exception as error:
            log.exception("tuning_failed")
            self._result = ModelError(f"tuning failed: {error!r}")

    def _note(self, label: str, share: float) -> None:
        self.step = f"{label}, {share:.0%}"
