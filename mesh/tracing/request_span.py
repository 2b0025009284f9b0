"""The span of the request that runs now."""

from __future__ import annotations

from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterator

    from opentelemetry.trace import Span

_CURRENT: Final[ContextVar[RequestSpan | None]] = ContextVar("request_span", default=None)


def current_span() -> RequestSpan | None:
    """The span of the request that this code runs for; None if it is not traced."""
    return _CURRENT.get()


class RequestSpan:
    """What happens to one request, by the names of OpenTelemetry's conventions where they have one.

    Prompts, answers and keys never go in.

    Args:
        span: OpenTelemetry's own.
    """

    def __init__(self, span: Span) -> None:
        self._span = span
        self._reasons: tuple[str, ...] = ()
        self._num_prompt_tokens = 0
        self._num_answer_tokens = 0

    @contextmanager
    def as_current(self) -> Iterator[None]:
        """Within the block, and in tasks that begin there, `current_span` finds it."""
        token = _CURRENT.set(self)
        try:
            yield
        finally:
            _CURRENT.reset(token)

    def asks(self, model: str) -> None:
        """The request means another model than the first."""
        self._span.set_attribute("gen_ai.request.model", model)

    def event(self, name: str, **counts: int) -> None:
        """Something happened now."""
        self._span.add_event(name, {f"spanmesh.{key}": value for key, value in counts.items()})

    def finished(self, reason: str, *, num_prompt_tokens: int, num_answer_tokens: int) -> None:
        """An answer is over; a request may have several."""
        self.event("finish", num_answer_tokens=num_answer_tokens)
        self._reasons = (*self._reasons, reason)
        self._num_prompt_tokens += num_prompt_tokens
        self._num_answer_tokens += num_answer_tokens
        self._span.set_attributes(
            {
                "gen_ai.response.finish_reasons": self._reasons,
                "gen_ai.usage.input_tokens": self._num_prompt_tokens,
                "gen_ai.usage.output_tokens": self._num_answer_tokens,
            }
        )

    def responded(self, status: int) -> None:
        """The response's head is out."""
        self._span.set_attribute("http.response.status_code", status)
