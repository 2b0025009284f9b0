"""Handle of the process with the clients."""

from __future__ import annotations

import json
import threading
import time
from dataclasses import asdict, dataclass
from itertools import pairwise
from queue import Empty, SimpleQueue
from random import Random
from typing import TYPE_CHECKING, Any, Final, Self

from meshbench.datasets import BUILT_IN, made_up_prompts
from meshbench.lab.line_process import LineProcess
from meshbench.stress.answers import NO_HANG_UPS, AnswerRecord
from meshbench.stress.scripts import Turn
from spanmesh_proto.errors import MeshError

if TYPE_CHECKING:
    from collections.abc import Sequence
    from types import TracebackType

    from meshbench.lab.network import Lab
    from meshbench.stress.answers import HangUps

_MADE_UP_TOKENS: Final = (12, 30, 80)
_PENALTIES: Final[tuple[dict[str, float], ...]] = (
    {"frequency_penalty": 0.4, "presence_penalty": 0.2},
    {"repetition_penalty": 1.15},
    {"repeat_penalty": 1.1, "repeat_last_n": 48},
)
_SNAPSHOT_TIMEOUT_S: Final = 15.0


@dataclass(frozen=True)
class Stream:
    """A request and its answer. All times, those of its record too, are seconds of `time.perf_counter`.

    Attributes:
        answer: Question and answer.
        bytes_s: Arrival of any bytes, comment pings included.
    """

    answer: AnswerRecord
    bytes_s: tuple[float, ...]

    @property
    def is_refused(self) -> bool:
        """Whether it was rejected with 503 before its answer began."""
        failure = self.answer.record.failure
        return failure is not None and failure.kind == "http_503"

    def pause_s(self, start_s: float, stop_s: float) -> float:
        """The longest time between two tokens of which a part lies in that time; 0 without any."""
        return _longest(self.answer.record.parts_s, start_s, stop_s)

    def silence_s(self, start_s: float, stop_s: float) -> float:
        """The same between any two bytes."""
        return _longest(self.bytes_s, start_s, stop_s)

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {"told": self.answer.as_dict(), "bytes_s": self.bytes_s}

    @classmethod
    def from_dict(cls, fields: dict[str, Any]) -> Stream:
        """Restores `as_dict`'s result after JSON."""
        return cls(AnswerRecord.from_dict(fields["told"]), tuple(fields["bytes_s"]))


@dataclass(frozen=True)
class Question:
    """A request.

    Attributes:
        id: Distinguishes it from the others.
        turn: Message, and length of the answer.
        fields: How it is sampled.
    """

    id: str
    turn: Turn
    fields: dict[str, Any]

    @property
    def body(self) -> str:
        """A streamed chat with usage and token ids, as JSON."""
        return json.dumps(
            {
                "model": "default",
                "messages": [{"role": "user", "content": self.turn.text}],
                "max_tokens": self.turn.max_tokens,
                "ignore_eos": True,
                "return_token_ids": True,
                "stream": True,
                "stream_options": {"include_usage": True},
                **self.fields,
            }
        )


@dataclass(frozen=True)
class Running:
    """A request under way.

    Attributes:
        sent_s: When it was sent, of `time.perf_counter`.
        last_s: Arrival of its latest token; None before the first.
    """

    sent_s: float
    last_s: float | None


@dataclass(frozen=True)
class MeshSnapshot:
    """State of the mesh at one time.

    Attributes:
        at_s: When, of `time.perf_counter`.
        status: Body of `/mesh/status`; None if the head does not answer.
        running: Of the clients' requests.
    """

    at_s: float
    status: dict[str, Any] | None
    running: tuple[Running, ...]

    @property
    def stage_hosts(self) -> tuple[str, ...]:
        """The host of each stage, in order; none while the ring is not known."""
        return tuple(stage["host"] for stage in (self.status or {}).get("stages", ()))

    @property
    def ready_hosts(self) -> tuple[str, ...]:
        """Hosts that take part or could."""
        return tuple(host["name"] for host in (self.status or {}).get("hosts", ()) if host["ready"])

    @property
    def layers_without_replica(self) -> tuple[str, ...]:
        """Layers of stages that no host has loaded ahead, such as `[0, 10)`."""
        status = self.status or {}
        copies = {layers for host in status.get("hosts", ()) for layers in host.get("copies", ())}
        layers = ("[{}, {})".format(*stage["layers"]) for stage in status.get("stages", ()))
        return tuple(each for each in layers if each not in copies)


class ClientFleet(LineProcess):
    """A process on the head's host that sends requests; a context manager.

    Its clock is ours: `time.perf_counter` counts from the machine's start, in every process and namespace.

    Args:
        lab: Its host 0 is the head.
        port: Of the API there.

    Attributes:
        streams: Requests that have ended, newcomers apart, in the order of their ends.
        probes: What became of newcomers, by number.
    """

    def __init__(self, lab: Lab, port: int) -> None:
        super().__init__(lab, 0, "meshbench.chaos.client_process", str(port))
        self._thread = threading.Thread(target=self._listen, name="crowd", daemon=True)
        self._snapshots: SimpleQueue[MeshSnapshot] = SimpleQueue()
        self._is_through = threading.Event()
        self.streams: list[Stream] = []
        self.probes: dict[int, Stream] = {}

    def __enter__(self) -> Self:
        """Start the process."""
        super().__enter__()
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End it: running requests are aborted."""
        super().__exit__(kind, error, trace)
        self._thread.join()

    def ask_all(self, questions: Sequence[Question], num_at_once: int, *, timeout_s: float) -> list[Stream]:
        """Have each question answered once, this many at once; violations are part of the answers.

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
        """Begin to send questions over and over, this many at once; some clients may hang up."""
        self._begin("keep_asking", questions, num_at_once, hang_ups=asdict(hang_ups))

    def let_end(self, *, timeout_s: float) -> None:
        """Send no more, and wait for running requests.

        Raises:
            MeshError: If that takes too long.
        """
        self.send({"do": "let_end"})
        self._wait_through(timeout_s)

    def probe(self, number: int, question: Question) -> None:
        """Send a newcomer's question; see `probes`."""
        self.send({"do": "probe", "number": number, "question": [question.id, question.body]})

    def wait_probe(self, number: int, *, timeout_s: float) -> Stream:
        """Result of a newcomer's question.

        Raises:
            MeshError: If that takes too long.
        """
        deadline_s = time.monotonic() + timeout_s
        while number not in self.probes:
            if time.monotonic() > deadline_s:
                raise MeshError(f"request {number} has no end after {timeout_s:g} s")
            time.sleep(0.05)
        return self.probes[number]

    def snapshot(self) -> MeshSnapshot:
        """Current state of mesh and clients.

        Raises:
            MeshError: If the process does not answer.
        """
        while not self._snapshots.empty():  # late answers to earlier calls
            self._snapshots.get()
        self.send({"do": "look"})
        try:
            return self._snapshots.get(timeout=_SNAPSHOT_TIMEOUT_S)
        except Empty:
            raise MeshError(
                f"the clients' process does not answer within {_SNAPSHOT_TIMEOUT_S:g} s"
            ) from None

    def _begin(self, do: str, questions: Sequence[Question], num_at_once: int, **more: Any) -> None:
        self._is_through.clear()
        bodies = [[question.id, question.body] for question in questions]
        self.send({"do": do, "questions": bodies, "num_at_once": num_at_once, **more})

    def _wait_through(self, timeout_s: float) -> None:
        if not self._is_through.wait(timeout_s):
            raise MeshError(f"the clients' streams have not ended after {timeout_s:g} s")

    def _listen(self) -> None:
        for said in self.received():
            match said["what"]:
                case "stream":
                    self.streams.append(Stream.from_dict(said["stream"]))
                case "probe":
                    self.probes[said["number"]] = Stream.from_dict(said["stream"])
                case "look":
                    look = said["look"]
                    running = tuple(Running(**each) for each in look["running"])
                    self._snapshots.put(MeshSnapshot(look["at_s"], look["status"], running))
                case "asked":
                    self._is_through.set()


def _longest(times_s: Sequence[float], start_s: float, stop_s: float) -> float:
    gaps = (later - earlier for earlier, later in pairwise(times_s) if later > start_s and earlier < stop_s)
    return max(gaps, default=0.0)


def questions(count: int, answer_tokens: Sequence[int], seed: int) -> tuple[Question, ...]:
    """Every other one greedy, the others drawn at temperature 0.8 with a seed and penalties.

    Args:
        count: How many.
        answer_tokens: Lengths of answers, of which each gets one.
        seed: The same seed, the same questions.
    """
    random = Random(seed)  # noqa: S311 - questions, not secrets
    found = []
    for index in range(count):
        if index < len(BUILT_IN):
            text = BUILT_IN[index]
        else:
            text = made_up_prompts(1, random.choice(_MADE_UP_TOKENS), random.randrange(2**31))[0].text
        fields: dict[str, Any] = {"temperature": 0}
        if index % 2:
            fields = {"temperature": 0.8, "seed": random.randrange(2**31), **random.choice(_PENALTIES)}
        found.append(Question(f"question {index}", Turn(text, random.choice(answer_tokens)), fields))
    return tuple(found)


def short_question(seed: int) -> Question:
    """Short question of a client that arrives during a fault."""
    return Question("newcomer", Turn(f"Say hello, {seed}.", 4), {"temperature": 0})


def what_is_missing(
    snapshot: MeshSnapshot, *, since_s: float, num_hosts: int, with_replicas: bool
) -> str | None:
    """Reason why a mesh is not yet as before; None if it is.

    Args:
        snapshot: At it.
        since_s: Every request sent before must have got a token since; of `time.perf_counter`.
        num_hosts: So many must be ready, spare ones included.
        with_replicas: Whether spare hosts must have loaded every stage ahead.
    """
    status = snapshot.status
    if status is None:
        return "the head does not answer"
    if not status["ready"]:
        return f"not ready: {status['phase']}"
    if len(snapshot.ready_hosts) < num_hosts:
        return f"{len(snapshot.ready_hosts)} of {num_hosts} hosts are ready"
    if with_replicas and (cold := snapshot.layers_without_replica):
        return f"layers {cold[0]} have no replica"
    waiting = [each for each in snapshot.running if each.sent_s < since_s and (each.last_s or 0.0) < since_s]
    if waiting:
        return f"{len(waiting)} of {len(snapshot.running)} streams have not gone on"
    return None
