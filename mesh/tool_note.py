"""Functions for models whose chat template knows none: a note in the system prompt, calls as Hermes has them.

The format is that of Hermes Function Calling (Nous Research): models that were never shown tools by their
template follow it better than any other, since it is JSON between tags.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

_BEFORE: Final = (
    "These are functions that you can call, each with the JSON schema of its parameters:\n<tools>\n"
)
_AFTER: Final = (
    "\n</tools>\nTo call one, write nothing but its name and its arguments as JSON between these tags:\n"
    '<tool_call>\n{"name": "…", "arguments": {…}}\n</tool_call>\n'
    "You will be told the result between <tool_response> and </tool_response>."
)


def with_tool_note(
    messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]]
) -> list[dict[str, Any]]:
    """A conversation with its tools, calls and results written out as text.

    Results of one turn become one message of the user, as templates want turns that alternate.

    Args:
        messages: As chat templates know them.
        tools: Likewise; with none, only calls and results are written out.
    """
    found: list[dict[str, Any]] = []
    was_result = False
    for message in messages:
        is_result = message["role"] == "tool"
        if is_result:
            text = f"<tool_response>\n{message['content']}\n</tool_response>"
            if was_result:
                found[-1]["content"] += f"\n{text}"
            else:
                found.append({"role": "user", "content": text})
        else:
            found.append(_written_out(message))
        was_result = is_result
    return _noted(found, tools) if tools else found


def _noted(messages: list[dict[str, Any]], tools: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    lines = "\n".join(json.dumps(tool["function"], ensure_ascii=False) for tool in tools)
    note = f"{_BEFORE}{lines}{_AFTER}"
    if messages and messages[0]["role"] == "system":
        first = messages[0]
        return [{**first, "content": f"{first['content']}\n\n{note}".lstrip()}, *messages[1:]]
    return [{"role": "system", "content": note}, *messages]


def _written_out(message: Mapping[str, Any]) -> dict[str, Any]:
    calls = message.get("tool_calls")
    if not calls:
        return dict(message)
    texts = [message["content"]] if message["content"] else []
    for call in calls:
        function = {name: call["function"][name] for name in ("name", "arguments")}
        texts.append(f"<tool_call>\n{json.dumps(function, ensure_ascii=False)}\n</tool_call>")
    rest = {name: value for name, value in message.items() if name != "tool_calls"}
    return {**rest, "content": "\n".join(texts)}
