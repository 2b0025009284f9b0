"""Answers of a load, with the times of their parts."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from meshbench.request_record import Record  # noqa: TC001 - restored from JSON by its type
from spanmesh_proto.errors import MeshError

if TYPE_CHECKING:
    from collections.abc import Sequence


@dataclass(frozen=True)
class AnswerRecord:
    """A request and its answer. All times are of `time.perf_counter`, which all processes share."""

    record: Record
    """Times, counts, failure."""
    text: str
    """The answer."""
    token_ids: tuple[int, ...]
    """Its tokens; none if the server does not send them."""
    faults: tuple[str, ...] = ()
    """Violations by the stream, apart from a failure."""
    bytes_s: tuple[float, ...] = ()
    """Arrival of any bytes, comment pings included."""
    timings: dict[str, Any] = field(default_factory=dict)
    """The server's own account, as far as it gives one."""
    ends_apart: bool = False
    """Whether the finish reason came in a chunk without tokens."""

    @property
    def is_refused(self) -> bool:
        """Whether it was rejected with 503 before its answer began."""
        return self.record.failure is not None and self.record.failure.kind == "http_503"

    @property
    def num_tokens(self) -> int:
        """Length of the answer, by the server's count."""
        return self.record.num_output_tokens

    @property
    def arrivals_ms(self) -> tuple[float, ...]:
        """When each part came, counted from the request.

        The chunk with the finish reason counts: it leaves with the last token, which may have no text to
        show.
        """
        times_s = (*self.record.parts_s, *[self.record.last_s] * self.ends_apart)
        return tuple((time_s - self.record.sent_s) * 1e3 for time_s in times_s)

    @property
    def ttft_ms(self) -> float:
        """From the request to the first token."""
        return self.record.ttft_ms

    @property
    def decode_ms(self) -> float:
        """Time from the first token to the last."""
        return self.record.e2el_ms - self.record.ttft_ms

    @property
    def tokens_per_s(self) -> float:
        """Decode rate: the first token belongs to the prefill."""
        return (self.num_tokens - 1) / (self.decode_ms / 1e3)

    def pause_s(self, start_s: float, stop_s: float) -> float:
        """The longest time between two tokens of which a part lies in that time; 0 without any."""
        return _longest(self.record.parts_s, start_s, stop_s)

    def silence_s(self, start_s: float, stop_s: float) -> float:
        """The same between any two bytes."""
        return _longest(self.bytes_s, start_s, stop_s)


@dataclass(frozen=True)
class Outcome:
    """Result of a schedule."""

    answers: tuple[AnswerRecord, ...]
    """One for each request that was sent, in the order sent; of a load in the background, in the order of
    their ends."""
    duration_s: float
    """From the first request to the end of the last answer."""

    @property
    def tokens_per_s(self) -> float:
        """Answered tokens a second, of all requests together."""
        return sum(one.num_tokens for one in self.answers) / self.duration_s

    def complete(self, system: str) -> Outcome:
        """The same, if every request was answered: no figure is to come from half of an answer.

        Raises:
            MeshError: If one was not.
        """
        for one in self.answers:
            if one.record.failure is not None:
                raise MeshError(f"{system}: {one.record.failure.kind}: {one.record.failure.message}")
        return self

    def counted(self, system: str) -> Outcome:
        """Like `complete`, and the server must have counted the tokens of every answer.

        Raises:
            MeshError: Likewise.
        """
        if not all(one.record.has_usage for one in self.complete(system).answers):
            raise MeshError(f"{system}: an answer has no usage")
        return self


def _longest(times_s: Sequence[float], start_s: float, stop_s: float) -> float:
    gaps = (later - earlier for earlier, later in pairwise(times_s) if later > start_s and earlier < stop_s)
    return max(gaps, default=0.0)
