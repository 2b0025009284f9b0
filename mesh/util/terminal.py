"""Terminal: console that escapes control characters, and progress bars, or log events elsewhere."""

from __future__ import annotations

import sys
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final, Protocol

import structlog
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from mesh.util.printable import printable

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from rich.console import ConsoleOptions, RenderableType
    from rich.progress import TaskID
    from rich.segment import Segment
    from rich.text import Text

_SECONDS_BETWEEN_EVENTS: Final = 5.0
log = structlog.get_logger()


class PrintableConsole(Console):
    """Rich's console; only what it draws itself controls the terminal. Arguments are those of `Console`."""

    def render_str(self, text: str, **settings: Any) -> Text:
        """Escape before the text is measured: its column has room for the escapes."""
        return super().render_str(printable(text), **settings)

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """Escape what comes from other renderables, such as `Text` and tracebacks."""
        for segment in super().render(renderable, options):
            yield segment if segment.control else segment._replace(text=printable(segment.text))


class ProgressTask(Protocol):
    """Progress of one task. Thread-safe."""

    def __call__(self, share: float, label: str | None = None) -> None:
        """Report that `share` of the work is done, 0 to 1; `label` replaces the description."""


class ProgressBars(Protocol):
    """Factory of tasks."""

    def add(self, label: str) -> ProgressTask:
        """Begin a task."""


class _Bars:
    def __init__(self, progress: Progress) -> None:
        self._progress = progress

    def add(self, label: str) -> ProgressTask:
        return _Bar(self._progress, self._progress.add_task(label, total=1.0))


class _Bar:
    def __init__(self, progress: Progress, task: TaskID) -> None:
        self._progress = progress
        self._task = task

    def __call__(self, share: float, label: str | None = None) -> None:
        self._progress.update(self._task, completed=share, description=label)


class _Events:
    def __init__(self, clock_s: Callable[[], float]) -> None:
        self._clock_s = clock_s

    def add(self, label: str) -> ProgressTask:
        return EventTask(label, self._clock_s)


class EventTask:
    """Logs progress, at most every few seconds, and the end.

    Args:
        label: Description.
        clock_s: Monotonic clock, seconds.
    """

    def __init__(self, label: str, clock_s: Callable[[], float]) -> None:
        self._label = label
        self._clock_s = clock_s
        self._next_s = clock_s() + _SECONDS_BETWEEN_EVENTS
        self._is_done = False

    def __call__(self, share: float, label: str | None = None) -> None:
        """Report progress."""
        if label is not None and label != self._label:
            self._label, self._is_done = label, False
        is_due = self._clock_s() >= self._next_s
        if self._is_done or not (is_due or share >= 1):
            return
        self._is_done = share >= 1
        self._next_s = self._clock_s() + _SECONDS_BETWEEN_EVENTS
        log.info("progress", task=self._label, percent=round(100 * share))


@contextmanager
def progress_bars() -> Iterator[ProgressBars]:
    """Progress bars for the block if standard error is a terminal, log events otherwise."""
    if not sys.stderr.isatty():
        yield _Events(time.monotonic)
        return
    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        TextColumn("{task.percentage:3.0f} %"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=PrintableConsole(stderr=True), transient=True) as progress:
        yield _Bars(progress)
