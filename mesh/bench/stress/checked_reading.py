"""Reads an answer and keeps what it says, and whatever is wrong with its stream."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, Final

from mesh.bench.chunk import read_chunk
from mesh.bench.serve.event_stream import EventStream
from mesh.bench.serve.reading import AnswerReading

if TYPE_CHECKING:
    from collections.abc import Callable

    from mesh.bench.stress.moment import Moment

_DONE: Final = b"[DONE]"


class CheckedReading(AnswerReading):
    """A reading that is particular: one finish reason, one usage, one `[DONE]`, and nothing after it.

    Attributes:
        text: The answer so far.
        token_ids: Its tokens so far, if the server sends them.
        moment: When its client hangs up; None waits for the end.
        on_progress: Called after every piece of the body.
    """

    def __init__(self) -> None:
        super().__init__()
        self.text = ""
        self.token_ids: list[int] = []
        self.moment: Moment | None = None
        self.on_progress: Callable[[], None] = lambda: None
        self._stream = EventStream()
        self._faults: list[str] = []
        self._ids: set[str] = set()
        self._num_finishes = self._num_usages = self._num_done = 0
        self._num_counted: int | None = None

    def on_body(self, data: bytes, now_s: float) -> None:
        """The next bytes of the body."""
        super().on_body(data, now_s)
        if self.has_begun:
            for event in self._stream.feed(data):
                self._look_at(event)
        self.on_progress()

    def faults(self) -> tuple[str, ...]:
        """What is wrong with a stream that is complete as far as HTTP goes."""
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

    def _look_at(self, event: bytes) -> None:
        if self._num_done:
            self._faults.append("an event after [DONE]")
        if event == _DONE:
            self._num_done += 1
            return
        try:
            fields: dict[str, Any] = json.loads(event)
            chunk = read_chunk(fields)
        except (ValueError, TypeError, AttributeError):
            return  # the reading itself notes it
        if (chunk.text or chunk.token_ids) and self._num_finishes:
            self._faults.append("tokens after the finish reason")
        if "id" in fields:
            self._ids.add(str(fields["id"]))
        self.text += chunk.text
        self.token_ids += chunk.token_ids
        self._num_finishes += chunk.finish is not None
        if chunk.usage and not fields.get("choices"):
            self._num_usages += 1
            self._num_counted = chunk.usage.get("completion_tokens")
