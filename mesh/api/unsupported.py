"""Fields that would change the answer and that this server cannot honour: refused, never ignored."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from spanmesh_proto.errors import InvalidRequest

if TYPE_CHECKING:
    from collections.abc import Mapping

# Each with the values that ask for nothing; null always does.
_HARMLESS: Final[dict[str, tuple[Any, ...]]] = {
    "best_of": (1,),
    # Chats have these two.
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "top_logprobs": (0,),
    "suffix": ("",),
    "modalities": (["text"],),
    "audio": (),
    "min_tokens": (0,),
    "stop_token_ids": ([],),
    "guided_json": (),
    "guided_regex": (),
    "guided_choice": (),
    "guided_grammar": (),
    "structured_outputs": (),
}
_INSTEAD: Final = {"functions": "send tools", "function_call": "send tool_choice"}

NAMES: Final = frozenset(_HARMLESS)


def describe(schema: dict[str, Any]) -> None:
    """Add these fields to the JSON schema of a request body, each with what it may hold."""
    for name, values in _HARMLESS.items():
        schema["properties"].setdefault(name, {"enum": [None, *values]})


def refuse_unsupported(fields: Mapping[str, Any]) -> None:
    """Check the fields that no schema names.

    Raises:
        InvalidRequest: Naming the first one that asks for something.
    """
    for name, value in fields.items():
        if name in _HARMLESS and value is not None and not _is_one_of(value, _HARMLESS[name]):
            raise InvalidRequest(f"{name} is not supported: {_INSTEAD.get(name, 'leave it out')}", param=name)


def _is_one_of(value: Any, harmless: tuple[Any, ...]) -> bool:
    # True == 1 in Python, but `n: true` is a slip.
    return any(value == known and isinstance(value, bool) == isinstance(known, bool) for known in harmless)
