"""Calls of earlier answers as text, in a format of calls: for templates that leave them out."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from mesh.text.answer_format import CALL_ID, INDEX, NAME, NUMBER, CallForm

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from mesh.text.answer_format import ArgumentTags, CallFormat


def written_calls(calls: CallFormat, made: Sequence[Mapping[str, Any]]) -> str:
    """Calls as an answer has them.

    Args:
        calls: Their format, with tags of arguments that are alike for all types.
        made: One or more calls, in the form of chat templates.
    """
    texts = (_written(calls, call, index) for index, call in enumerate(made))
    return f"{calls.begin}{calls.separator.join(texts)}{calls.end}"


def _written(calls: CallFormat, call: Mapping[str, Any], index: int) -> str:
    name, arguments = call["function"]["name"], call["function"]["arguments"]
    # A text that is no JSON is one argument.
    members = arguments if isinstance(arguments, dict) else {"arguments": arguments}
    if calls.tags is not None:
        text = _tagged(calls.tags, members)
    elif calls.form is CallForm.FUNCTION:
        text = ", ".join(f"{key}={_python(value, calls.quote)}" for key, value in members.items())
    else:
        text = json.dumps(arguments, ensure_ascii=False)
    before, behind, end = (
        _filled(part, call, index) for part in (calls.call, calls.name_end, calls.call_end)
    )
    return f"{before}{name}{behind}{text}{end}"


def _filled(text: str, call: Mapping[str, Any], index: int) -> str:
    slots = (
        (NAME, call["function"]["name"]),
        (CALL_ID, call.get("id") or ""),
        (INDEX, str(index)),
        (NUMBER, str(index + 1)),
    )
    for slot, value in slots:
        text = text.replace(slot, value)
    return text


def _tagged(tags: ArgumentTags, arguments: Mapping[str, Any]) -> str:
    around = "\n" if tags.is_padded else ""
    values = (
        (key, value if isinstance(value, str) else json.dumps(value, ensure_ascii=False))
        for key, value in arguments.items()
    )
    return tags.separator.join(
        f"{tags.key}{key}{tags.key_end}{tags.value}{around}{value}{around}{tags.value_end}"
        for key, value in values
    )


def _python(value: Any, quote: str) -> str:
    """A value as Python writes it.

    Args:
        value: JSON.
        quote: Around texts: Python's one or JSON's.
    """
    if isinstance(value, dict):
        members = (f"{_python(key, quote)}: {_python(each, quote)}" for key, each in value.items())
        return f"{{{', '.join(members)}}}"
    if isinstance(value, list):
        return f"[{', '.join(_python(each, quote) for each in value)}]"
    if value is None or isinstance(value, bool):
        return repr(value)
    text = json.dumps(value, ensure_ascii=False)
    if not isinstance(value, str) or quote == '"':
        return text
    inner = text[1:-1].replace('\\"', '"').replace(quote, f"\\{quote}")
    return f"{quote}{inner}{quote}"
