"""The clients, seen from the bench: told what to ask, heard what came of it."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from dataclasses import asdict
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any, Final, Self

from mesh.bench.chaos.look import Look, Running
from mesh.bench.chaos.stream import Stream
from mesh.bench.stress.answers import NO_HANG_UPS
from spanmesh_proto.errors import MeshError

if TYPE_CHECKING:
    from collections.abc import Sequence
    from types import TracebackType

    from mesh.bench.chaos.question import Question
    from mesh.bench.stress.answers import HangUps
    from mesh.lab.network import Lab

_LOOK_TIMEOUT_S: Final = 15.0


class Crowd:
    """A process on the head's host that asks the mesh; a context manager.

    Its clock is ours: `time.perf_counter` counts from the machine's start, in every process and namespace.

    Args:
        lab: Its host 0 is the head.
        port: Of the API there.

    Attributes:
        streams: Requests that have ended, newcomers apart, in the order of their ends.
        probes: What became of newcomers, by number.
    """

    def __init__(self, lab: Lab, port: int) -> None:
        self._lab = lab
        self._port = port
        self._process: subprocess.Popen[bytes]
        self._thread = threading.Thread(target=self._listen, name="crowd", daemon=True)
        self._looks: SimpleQueue[Look] = SimpleQueue()
        self._is_through = threading.Event()
        self.streams: list[Stream] = []
        self.probes: dict[int, Stream] = {}

    def __enter__(self) -> Self:
        """Start the process."""
        argv = [sys.executable, "-m", "mesh.bench.chaos.crowd_process", str(self._port)]
        self._process = self._lab.run(0, argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End it: what is under way breaks off."""
        self._process.kill()
        self._process.wait()
        self._thread.join()

    @property
    def pid(self) -> int:
        """Of the process, out here."""
        return self._process.pid

    def ask_all(self, questions: Sequence[Question], num_at_once: int, *, timeout_s: float) -> list[Stream]:
        """Have each question answered once, so many at once; what is wrong with answers is part of them.

        Raises:
            MeshError: If that takes too long.
        """
        already = len(self.streams)
        self._begin("ask_all", questions, num_at_once)
        self._wait_through(timeout_s)
        return self.streams[already:]

    def keep_asking(
        self, questions: Sequence[Question], num_at_once: int, hang_ups: HangUps = NO_HANG_UPS
    ) -> None:
        """Ask all over again from now on, so many at once; some clients may hang up."""
        self._begin("keep_asking", questions, num_at_once, hang_ups=asdict(hang_ups))

    def let_end(self, *, timeout_s: float) -> None:
        """Ask no more, and wait for what is under way.

        Raises:
            MeshError: If that takes too long.
        """
        self._tell({"do": "let_end"})
        self._wait_through(timeout_s)

    def probe(self, number: int, question: Question) -> None:
        """Have a newcomer ask; see `probes`."""
        self._tell({"do": "probe", "number": number, "question": [question.id, question.body]})

    def wait_probe(self, number: int, *, timeout_s: float) -> Stream:
        """What became of a newcomer.

        Raises:
            MeshError: If that takes too long.
        """
        deadline_s = time.monotonic() + timeout_s
        while number not in self.probes:
            if time.monotonic() > deadline_s:
                raise MeshError(f"request {number} has no end after {timeout_s:g} s")
            time.sleep(0.05)
        return self.probes[number]

    def look(self) -> Look:
        """How mesh and clients stand now.

        Raises:
            MeshError: If the process does not answer.
        """
        while not self._looks.empty():  # answers that came too late for those who asked
            self._looks.get()
        self._tell({"do": "look"})
        try:
            return self._looks.get(timeout=_LOOK_TIMEOUT_S)
        except Empty:
            raise MeshError(f"the clients' process does not answer within {_LOOK_TIMEOUT_S:g} s") from None

    def _begin(self, do: str, questions: Sequence[Question], num_at_once: int, **more: Any) -> None:
        self._is_through.clear()
        bodies = [[question.id, question.body] for question in questions]
        self._tell({"do": do, "questions": bodies, "num_at_once": num_at_once, **more})

    def _wait_through(self, timeout_s: float) -> None:
        if not self._is_through.wait(timeout_s):
            raise MeshError(f"the clients' streams have not ended after {timeout_s:g} s")

    def _tell(self, order: dict[str, Any]) -> None:
        stdin = self._process.stdin
        assert stdin is not None  # noqa: S101 - a pipe, see above
        try:
            stdin.write(json.dumps(order).encode() + b"\n")
            stdin.flush()
        except BrokenPipeError:
            raise MeshError(f"the clients' process ended with code {self._process.wait()}") from None

    def _listen(self) -> None:
        stdout = self._process.stdout
        assert stdout is not None  # noqa: S101 - a pipe, see above
        for line in stdout:
            said = json.loads(line)
            match said["what"]:
                case "stream":
                    self.streams.append(Stream.from_dict(said["stream"]))
                case "probe":
                    self.probes[said["number"]] = Stream.from_dict(said["stream"])
                case "look":
                    look = said["look"]
                    running = tuple(Running(**each) for each in look["running"])
                    self._looks.put(Look(look["at_s"], look["status"], running))
                case "asked":
                    self._is_through.set()
