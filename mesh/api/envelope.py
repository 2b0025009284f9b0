"""The shapes of the two endpoints' answers, whole and in chunks."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, Protocol

from mesh.api.json_response import json_bytes
from mesh.api.token_ids import ANSWER_FIELD, PROMPT_FIELD, ids_member
from mesh.text.message_parts import Content

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mesh.api.answer import FinishReason
    from mesh.api.answer_tokens import AnswerToken
    from mesh.text.message_parts import Said

_NOTHING: Final = Content("")


class Shape(Protocol):
    """What tells one endpoint's answers from the other's."""

    @property
    def id_prefix(self) -> str:
        """How an answer's id begins."""

    @property
    def whole_object(self) -> str:
        """`object` of a whole answer."""

    @property
    def chunk_object(self) -> str:
        """`object` of a chunk."""

    @property
    def has_prompt_ids_in_choices(self) -> bool:
        """Whether a prompt's token ids are a field of its choice, not of the answer."""

    def choice(
        self, index: int, said: Sequence[Said], finish: FinishReason, logprobs: dict[str, Any] | None
    ) -> dict[str, Any]:
        """A whole answer's choice."""

    def logprobs(self, tokens: Sequence[AnswerToken]) -> dict[str, Any]:
        """What a choice says of the probability of some of its tokens."""

    def opening(self, index: int) -> str:
        """The JSON of a stream's first choice, or nothing."""

    def delta(self, index: int, piece: Said, logprobs_json: str) -> str:
        """The JSON of a choice that adds a piece. Runs for every token."""

    def closing(self, index: int, finish: FinishReason) -> str:
        """The JSON of a choice's last chunk."""


@dataclass(frozen=True)
class Envelope:
    """What surrounds the choices of one answer.

    Attributes:
        shape: The endpoint's.
        answer_id: Such as `chatcmpl-…`.
        created: Unix seconds.
        model: The served id.
        fingerprint: What runs here.
        null_usage: Whether chunks carry `"usage": null`, as they do when a usage chunk will follow.
    """

    shape: Shape
    answer_id: str
    created: int
    model: str
    fingerprint: str
    null_usage: bool = False
    _head: str = field(init=False)
    _tail: str = field(init=False)

    def __post_init__(self) -> None:
        head = json.dumps(self._fields(self.shape.chunk_object), ensure_ascii=False, separators=(",", ":"))
        object.__setattr__(self, "_head", f'data: {head[:-1]},"choices":[')
        object.__setattr__(self, "_tail", '],"usage":null' if self.null_usage else "]")

    def whole(self, choices: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
        """The answer in one piece."""
        return {**self._fields(self.shape.whole_object), "choices": choices, **more}

    def opening_event(self, index: int, prompt_ids: Sequence[int] | None = None) -> bytes:
        """The event before a choice's first text, or nothing.

        Args:
            index: Of the choice.
            prompt_ids: The prompt's token ids, if they are wanted.
        """
        choice = self.shape.opening(index)
        if prompt_ids is None:
            return self._event(choice) if choice else b""
        prompt = ids_member(PROMPT_FIELD, prompt_ids)
        if not self.shape.has_prompt_ids_in_choices:
            return self._event(choice, more=prompt)
        choice = choice or self.shape.delta(index, _NOTHING, "null")
        return self._event(choice, ids_member(ANSWER_FIELD, ()) + prompt)

    def said_events(
        self,
        index: int,
        said: Sequence[Said],
        tokens: Sequence[AnswerToken] | None = None,
        token_ids: Sequence[int] | None = None,
    ) -> bytes:
        """The events that add pieces to a choice: a few string joins, since it runs for every token.

        Args:
            index: Of the choice.
            said: What to add; even nothing makes an event.
            tokens: The text's, if their logprobs are wanted.
            token_ids: What was committed meanwhile, if it is wanted.
        """
        events = b""
        for piece in said or (_NOTHING,):
            logprobs = (
                "null" if tokens is None else json.dumps(self.shape.logprobs(tokens), ensure_ascii=False)
            )
            choice = self.shape.delta(index, piece, logprobs)
            events += self._event(choice, ids_member(ANSWER_FIELD, token_ids))
            # All that belongs to the step goes with its first piece.
            tokens = None
            token_ids = None if token_ids is None else ()
        return events

    def closing_event(
        self,
        index: int,
        finish: FinishReason,
        timings: dict[str, Any] | None,
        token_ids: Sequence[int] | None = None,
    ) -> bytes:
        """The event that ends a choice; arguments as above."""
        more = "" if timings is None else f',"timings":{json.dumps(timings)}'
        return self._event(self.shape.closing(index, finish), ids_member(ANSWER_FIELD, token_ids), more)

    def usage_event(self, usage: dict[str, Any], timings: dict[str, Any] | None) -> bytes:
        """The event that ends a stream whose client asked for the counts. It has no choices."""
        fields = {**self._fields(self.shape.chunk_object), "choices": [], "usage": usage}
        if timings is not None:
            fields["timings"] = timings
        return b"data: " + json_bytes(fields) + b"\n\n"

    def _event(self, choice: str, more_of_choice: str = "", more: str = "") -> bytes:
        if more_of_choice:
            choice = f"{choice[:-1]}{more_of_choice}}}"
        return f"{self._head}{choice}{self._tail}{more}}}\n\n".encode("utf-8", "backslashreplace")

    def _fields(self, kind: str) -> dict[str, Any]:
        return {
            "id": self.answer_id,
            "object": kind,
            "created": self.created,
            "model": self.model,
            "system_fingerprint": self.fingerprint,
        }
