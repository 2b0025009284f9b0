"""What a model says as items of a response, and the events that tell of them. Pure: ids come from outside."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from mesh.text.message_parts import CallArguments, CallBegun, Content, Reasoning

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from mesh.text.message_parts import Said

Event = dict[str, Any]

_TEXT: Final = "output_text"
_THOUGHT: Final = "reasoning_text"


class Output:
    """The items of one response so far.

    An item is open until another begins, or the answer ends. Every method returns the events that tell what
    it did, in order; they lack their sequence number.

    Args:
        new_id: Makes an id with the beginning that it is given.
        new_call_id: Makes the id that a call's result will refer to.

    Attributes:
        items: As they are now.
    """

    def __init__(self, new_id: Callable[[str], str], new_call_id: Callable[[], str]) -> None:
        self.items: list[dict[str, Any]] = []
        self._new_id = new_id
        self._new_call_id = new_call_id
        self._open: dict[str, Any] | None = None
        # Of the open item: joined when it is complete.
        self._texts: list[str] = []
        self._logprobs: list[dict[str, Any]] = []
        # Of tokens whose text is still to come.
        self._early_logprobs: list[dict[str, Any]] = []

    def add(self, said: Sequence[Said], logprobs: Sequence[dict[str, Any]] = ()) -> list[Event]:
        """Take what was said.

        Args:
            said: In order.
            logprobs: Of the tokens that made it, if they are wanted; they go with the next text.
        """
        self._early_logprobs += logprobs
        events: list[Event] = []
        for piece in said:
            match piece:
                case Content():
                    told, self._early_logprobs = self._early_logprobs, []
                    events += self._add_text("message", _TEXT, piece.text, told)
                case Reasoning():
                    events += self._add_text("reasoning", _THOUGHT, piece.text, [])
                case CallBegun():
                    events += self._begin_call(piece.name)
                case CallArguments():
                    self._texts.append(piece.text)
                    events.append(self._event("response.function_call_arguments.delta", delta=piece.text))
        return events

    def end(self, *, is_cut: bool) -> list[Event]:
        """No more will be said. An answer without a word is a message without one.

        Args:
            is_cut: Whether the limit ended it: then the last item is not complete.
        """
        events = [] if self.items else self._begin_text("message", _TEXT)
        return events + self._close("incomplete" if is_cut else "completed")

    def _add_text(
        self, item_type: str, part_type: str, text: str, logprobs: list[dict[str, Any]]
    ) -> list[Event]:
        events = []
        if self._open is None or self._open["type"] != item_type:
            events = self._close("completed") + self._begin_text(item_type, part_type)
        self._texts.append(text)
        self._logprobs += logprobs
        more = {"logprobs": logprobs} if part_type == _TEXT else {}
        return [*events, self._event(f"response.{part_type}.delta", content_index=0, delta=text, **more)]

    def _begin_text(self, item_type: str, part_type: str) -> list[Event]:
        prefix = "msg_" if item_type == "message" else "rs_"
        item: dict[str, Any] = {"type": item_type, "id": self._new_id(prefix), "status": "in_progress"}
        item |= (
            {"role": "assistant", "content": []} if item_type == "message" else {"summary": [], "content": []}
        )
        opened = self._begin(item)
        part = _part(part_type, "", [])
        return [opened, self._event("response.content_part.added", content_index=0, part=part)]

    def _begin_call(self, name: str) -> list[Event]:
        events = self._close("completed")
        item = {"type": "function_call", "id": self._new_id("fc_"), "call_id": self._new_call_id()}
        item |= {"name": name, "arguments": "", "status": "in_progress"}
        return [*events, self._begin(item)]

    def _begin(self, item: dict[str, Any]) -> Event:
        self.items.append(item)
        self._open, self._texts, self._logprobs = item, [], []
        return {
            "type": "response.output_item.added",
            "output_index": len(self.items) - 1,
            # It goes on changing.
            "item": {**item, "content": []} if "content" in item else dict(item),
        }

    def _close(self, status: str) -> list[Event]:
        item, text = self._open, "".join(self._texts)
        if item is None:
            return []
        if item["type"] == "function_call":
            item["arguments"] = text
            events = [self._event("response.function_call_arguments.done", name=item["name"], arguments=text)]
        else:
            events = self._close_text(item, text)
        item["status"] = status
        self._open = None
        done = {"type": "response.output_item.done", "output_index": len(self.items) - 1, "item": item}
        return [*events, done]

    def _close_text(self, item: dict[str, Any], text: str) -> list[Event]:
        part_type = _TEXT if item["type"] == "message" else _THOUGHT
        part = _part(part_type, text, self._logprobs)
        item["content"] = [part]
        more = {"logprobs": self._logprobs} if part_type == _TEXT else {}
        return [
            self._event(f"response.{part_type}.done", content_index=0, text=text, **more),
            self._event("response.content_part.done", content_index=0, part=part),
        ]

    def _event(self, type: str, **fields: Any) -> Event:
        assert self._open is not None  # noqa: S101 - events of an item come while it is open
        return {"type": type, "item_id": self._open["id"], "output_index": len(self.items) - 1, **fields}


def _part(part_type: str, text: str, logprobs: list[dict[str, Any]]) -> dict[str, Any]:
    if part_type == _THOUGHT:
        return {"type": part_type, "text": text}
    return {"type": part_type, "text": text, "annotations": [], "logprobs": logprobs}
