"""Handle of the process that sends requests."""

from __future__ import annotations

import itertools
import threading
import time
from dataclasses import asdict, dataclass
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any, Final, Self

from mesh.status import MeshStatus  # noqa: TC001 - restored from JSON by its type
from meshbench.lab.line_process import LineProcess
from meshbench.load_client.answers import AnswerRecord, Outcome
from meshbench.load_client.json_values import restored
from meshbench.load_client.schedule import Schedule
from spanmesh_proto.errors import MeshError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from types import TracebackType

    from meshbench.lab.network import Lab
    from meshbench.load_client.schedule import Request

_SNAPSHOT_TIMEOUT_S: Final = 15.0
# Of a request whose prompt may have a hundred thousand tokens.
_ANSWER_TIMEOUT_S: Final = 3600.0

# What the process writes about one command; None once it has ended.
_Lines = SimpleQueue[dict[str, Any] | None]


@dataclass(frozen=True)
class RunningRequest:
    """A request under way."""

    sent_s: float
    """When it was sent, of `time.perf_counter`."""
    last_s: float | None
    """Arrival of its latest token; None before the first."""


@dataclass(frozen=True)
class MeshSnapshot:
    """State of the mesh at one time."""

    at_s: float
    """When, of `time.perf_counter`."""
    status: MeshStatus | None
    """None if the head does not answer."""
    running: tuple[RunningRequest, ...]
    """Requests of all loads under way."""

    @property
    def stage_hosts(self) -> tuple[str, ...]:
        """The host of each stage, in order; none while the ring is not known."""
        return () if self.status is None else tuple(stage.host for stage in self.status.stages)

    @property
    def ready_hosts(self) -> tuple[str, ...]:
        """Hosts that take part or could."""
        return () if self.status is None else tuple(host.name for host in self.status.hosts if host.ready)

    @property
    def layers_without_replica(self) -> tuple[str, ...]:
        """Layers of stages that no host has loaded ahead, such as `[0, 10)`."""
        if self.status is None:
            return ()
        copies = {layers for host in self.status.hosts for layers in host.copies}
        layers = ("[{}, {})".format(*stage.layers) for stage in self.status.stages)
        return tuple(each for each in layers if each not in copies)


class RunningLoad:
    """A load in the background. Its methods are for one thread.

    Args:
        lines: What the process writes about it.
        end: Has no more requests sent.
        ended: The error once the process has ended.
    """

    def __init__(self, lines: _Lines, end: Callable[[], None], ended: Callable[[], MeshError]) -> None:
        self._lines = lines
        self._end = end
        self._ended = ended
        self._answers: list[AnswerRecord] = []
        self._duration_s: float | None = None

    @property
    def answers(self) -> list[AnswerRecord]:
        """Those that have ended, in the order of their ends."""
        self._take_all()
        return list(self._answers)

    @property
    def is_over(self) -> bool:
        """Whether all its requests have ended."""
        self._take_all()
        return self._duration_s is not None

    def wait(self, timeout_s: float | None = None) -> Outcome:
        """Wait for the end of all requests; failures of requests are part of the outcome.

        Raises:
            MeshError: If that takes too long, or the process ended.
        """
        deadline_s = time.monotonic() + (timeout_s or 0.0)
        while self._duration_s is None:
            left_s = None if timeout_s is None else max(0.0, deadline_s - time.monotonic())
            try:
                has_line = self._take(left_s)
            except Empty:
                raise MeshError(f"requests have not ended after {timeout_s:g} s") from None
            if not has_line:
                raise self._ended()
        return Outcome(tuple(self._answers), self._duration_s)

    def end(self, *, timeout_s: float) -> Outcome:
        """Send no more, and wait for running requests.

        Raises:
            MeshError: Like `wait`.
        """
        self._end()
        return self.wait(timeout_s)

    def _take_all(self) -> None:
        while not self._lines.empty() and self._take(None):
            pass

    def _take(self, timeout_s: float | None) -> bool:
        """Take the next line; returns whether there is one. Raises Empty if there is none in time."""
        line = self._lines.get(timeout=timeout_s)
        if line is None:
            self._lines.put(None)
        elif "answer" in line:
            self._answers.append(restored(AnswerRecord, line["answer"]))
        else:
            outcome = restored(Outcome, line["outcome"])
            self._answers += outcome.answers
            self._duration_s = outcome.duration_s
        return line is not None


class LoadClient(LineProcess):
    """A process on a lab host or on this machine that sends requests; a context manager.

    Its clock is ours: `time.perf_counter` counts from the machine's start, in every process and namespace.

    Args:
        lab: Where; None is this machine, outside of any lab.
        host: Index of the lab's host.
    """

    def __init__(self, lab: Lab | None, host: int = 0) -> None:
        super().__init__(lab, host, "meshbench.load_client.process")
        self._thread = threading.Thread(target=self._listen, name="load-client", daemon=True)
        self._numbers = itertools.count()
        self._lines: dict[int, _Lines] = {}

    def __enter__(self) -> Self:
        """Start the process."""
        super().__enter__()
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End it: running requests are aborted."""
        self._process.kill()
        self._thread.join()
        super().__exit__(kind, error, trace)

    def run(self, schedule: Schedule) -> Outcome:
        """Have a schedule carried out; failures of requests are part of the outcome.

        Raises:
            MeshError: If the process ended.
        """
        return self._load("run", schedule).wait()

    def start(self, schedule: Schedule) -> RunningLoad:
        """Begin to carry out a schedule in the background, beside others; its answers come as they end.

        Raises:
            MeshError: If the process ended.
        """
        return self._load("start", schedule)

    def answer(
        self, url: str, requests: Sequence[Request], *, num_at_once: int = 1, api_key: str | None = None
    ) -> Outcome:
        """Have each request answered once.

        Raises:
            MeshError: If a request failed, or its answer has no usage.
        """
        schedule = Schedule.once(url, requests, num_at_once, api_keys=(api_key,), timeout_s=_ANSWER_TIMEOUT_S)
        return self.run(schedule).counted(url)

    def snapshot(self, url: str) -> MeshSnapshot:
        """Current state of the mesh at that URL, and of all loads.

        Raises:
            MeshError: If the process does not answer.
        """
        _number, lines = self._command("snapshot", url=url)
        try:
            line = lines.get(timeout=_SNAPSHOT_TIMEOUT_S)
        except Empty:
            raise MeshError(
                f"the clients' process does not answer within {_SNAPSHOT_TIMEOUT_S:g} s"
            ) from None
        if line is None:
            raise self.ended()
        return restored(MeshSnapshot, line["snapshot"])

    def _load(self, do: str, schedule: Schedule) -> RunningLoad:
        number, lines = self._command(do, schedule=asdict(schedule))
        return RunningLoad(lines, lambda: self.send({"number": number, "do": "end"}), self.ended)

    def _command(self, do: str, **fields: Any) -> tuple[int, _Lines]:
        number = next(self._numbers)
        lines: _Lines = SimpleQueue()
        self._lines[number] = lines
        self.send({"number": number, "do": do, **fields})
        return number, lines

    def _listen(self) -> None:
        for line in self.received():
            number = line["number"]
            (self._lines[number] if "answer" in line else self._lines.pop(number)).put(line)
        for lines in list(self._lines.values()):
            lines.put(None)
