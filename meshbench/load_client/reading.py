"""Readings of answers, streamed and whole, that check what they read."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from mesh.util.completion_stream import DONE, error_message
from meshbench.load_client.answers import AnswerRecord
from meshbench.request_record import AnswerReading, Failure, Response

if TYPE_CHECKING:
    from collections.abc import Callable

    from mesh.util.completion_stream import Chunk
    from meshbench.load_client.hang_ups import HangUpTime
    from meshbench.request_record import Record


class CheckedReading(AnswerReading):
    """A reading that is particular: one finish reason, one usage, one `[DONE]`, and nothing after it.

    Attributes:
        text: The answer so far.
        token_ids: Its tokens so far, if the server sends them.
        bytes_s: Arrival of any bytes, comment pings included.
        hang_up_time: When its client hangs up; None waits for the end.
        on_progress: Called after every piece of the body.
    """

    def __init__(self) -> None:
        super().__init__()
        self.text = ""
        self.token_ids: list[int] = []
        self.bytes_s: list[float] = []
        self.hang_up_time: HangUpTime | None = None
        self.on_progress: Callable[[], None] = lambda: None
        self._faults: list[str] = []
        self._ids: set[str] = set()
        self._num_finishes = self._num_usages = self._num_done = 0
        self._num_counted: int | None = None
        self._timings: dict[str, Any] = {}
        self._ends_apart = False

    def on_body(self, data: bytes, now_s: float) -> None:
        """The next bytes of the body."""
        self.bytes_s.append(now_s)
        super().on_body(data, now_s)
        self.on_progress()

    def on_event(self, event: bytes, now_s: float) -> None:
        """The next event."""
        if self._num_done:
            self._faults.append("an event after [DONE]")
        self._num_done += event == DONE
        super().on_event(event, now_s)

    def on_chunk(self, chunk: Chunk, fields: dict[str, Any], now_s: float) -> None:
        """The next chunk."""
        super().on_chunk(chunk, fields, now_s)
        if (chunk.text or chunk.token_ids) and self._num_finishes:
            self._faults.append("tokens after the finish reason")
        if "id" in fields:
            self._ids.add(str(fields["id"]))
        self.text += chunk.text
        self.token_ids += chunk.token_ids
        self._num_finishes += chunk.finish is not None
        self._timings.update(chunk.timings)
        if chunk.finish is not None:
            self._ends_apart = not chunk.has_tokens
        if chunk.usage and not fields.get("choices"):
            self._num_usages += 1
            self._num_counted = chunk.usage.get("completion_tokens")

    def faults(self) -> tuple[str, ...]:
        """Violations by a stream that is complete as HTTP."""
        faults = list(self._faults)
        for what, count in (
            ("finish reason", self._num_finishes),
            ("usage", self._num_usages),
            ("[DONE]", self._num_done),
        ):
            if count != 1:
                faults.append(f"{what} came {count} times, not once")
        if len(self._ids) > 1:
            faults.append(f"chunks of {len(self._ids)} answers in one stream")
        if self.token_ids and self._num_counted is not None and len(self.token_ids) != self._num_counted:
            faults.append(f"{len(self.token_ids)} token ids came, usage counts {self._num_counted}")
        return tuple(faults)

    def answer(self, record: Record) -> AnswerRecord:
        """The request of this record with its answer; a failed request has no faults besides."""
        faults = self.faults() if record.failure is None else ()
        return AnswerRecord(
            record,
            self.text,
            tuple(self.token_ids),
            faults,
            tuple(self.bytes_s),
            self._timings,
            self._ends_apart,
        )


class WholeReading(CheckedReading):
    """Takes an answer that comes in one piece, as JSON."""

    def __init__(self) -> None:
        super().__init__()
        self._body = b""

    def on_body(self, data: bytes, now_s: float) -> None:  # noqa: ARG002 - the protocol's
        """The next bytes of the body."""
        self._body += data

    def response(self, failure: Failure | None = None) -> Response:
        """The result; `text` and `token_ids` are known from then on."""
        if failure is not None:
            return Response(failure=failure)
        if not self.has_begun:
            return Response(failure=Failure(f"http_{self._status}", error_message(self._body)))
        try:
            fields: dict[str, Any] = json.loads(self._body)
            choice, usage = fields["choices"][0], fields["usage"]
            self.text, self.token_ids = choice["message"]["content"] or "", list(choice["token_ids"])
            return Response(
                num_input_tokens=usage["prompt_tokens"],
                num_cached_tokens=usage["prompt_tokens_details"]["cached_tokens"],
                num_output_tokens=usage["completion_tokens"],
                finish=choice["finish_reason"],
            )
        except (ValueError, LookupError, TypeError) as error:
            return Response(failure=Failure("not_an_answer", f"the answer's JSON lacks something: {error!r}"))

    def faults(self) -> tuple[str, ...]:
        """None: JSON that ends too early is a failure."""
        return ()
