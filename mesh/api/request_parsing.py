"""Parsing of request bodies; unknown and unsupported fields."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any, Final, TypeVar

import structlog
from pydantic import BaseModel, ValidationError

from spanmesh_proto.errors import InvalidRequest

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

# A parser makes an object for each value: two mebibytes of nested brackets take most of a second. Text,
# however long, is one value, and costs next to nothing.
_LEAST_VALUES: Final = 16384
_VALUES_PER_POSITION: Final = 4
_MOST_VALUES: Final = 2**18
_SIMPLE_BYTES: Final = 64 * 1024
_SIMPLE_VALUES: Final = 2048
# How pydantic names the types of a value that may have several.
_TYPE_NAME: Final = re.compile(
    r"str|int|float|bool|none|[A-Z]\w*|(list|dict|tuple|literal|constrained|function)[-[].*"
)
_MAX_NAMES: Final = 256
_MAX_NAME_CHARS: Final = 64
# Each with the values that request nothing; null always does.
_HARMLESS: Final[dict[str, tuple[Any, ...]]] = {
    "best_of": (1,),
    # Supported by chats.
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "top_logprobs": (0,),
    "suffix": ("",),
    "modalities": (["text"],),
    "audio": (),
    "web_search_options": (),
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

log = structlog.get_logger()

Body = TypeVar("Body", bound=BaseModel)


class UnknownFields:
    """Names of unknown fields that were logged. Bounded, since clients choose them."""

    def __init__(self) -> None:
        self._seen: set[str] = set()

    def note(self, names: Iterable[str]) -> None:
        """Log the names that are new."""
        for name in names:
            if name not in self._seen and len(self._seen) < _MAX_NAMES and len(name) <= _MAX_NAME_CHARS:
                self._seen.add(name)
                log.info("unknown_field_ignored", field=name)


def max_values(context_length: int) -> int:
    """Most values of a body: a full context as token ids, and ample fields beside."""
    return min(_LEAST_VALUES + _VALUES_PER_POSITION * context_length, _MOST_VALUES)


def is_simple(data: bytes) -> bool:
    """Whether parsing and checking a JSON text takes no more than a few milliseconds, whatever is in it."""
    return len(data) <= _SIMPLE_BYTES and _count(data) <= _SIMPLE_VALUES


def has_at_most(data: bytes, most: int) -> bool:
    """Whether a JSON text has no more than about this many values and containers.

    Args:
        data: The text, not necessarily valid.
        most: An array of this many numbers still passes.
    """
    if _count(data) <= most:
        return True
    # Commas and brackets in strings do not count. Escapes are removed first, so that every remaining quote
    # begins or ends a string.
    bare = data.replace(b"\\\\", b"").replace(b'\\"', b"")
    if bare.count(b'"') > 4 * most:
        return False
    return _count(b"".join(bare.split(b'"')[::2])) <= most


def _count(data: bytes) -> int:
    return data.count(b",") + data.count(b"[") + data.count(b"{")


def describe(schema: dict[str, Any]) -> None:
    """Add these fields to the JSON schema of a request body, each with its permitted values."""
    for name, values in _HARMLESS.items():
        schema["properties"].setdefault(name, {"enum": [None, *values]})


def refuse_unsupported(fields: Mapping[str, Any]) -> None:
    """Check the fields that no schema names.

    Raises:
        InvalidRequest: Naming the first one that requests something.
    """
    for name, value in fields.items():
        if name in _HARMLESS and value is not None and not _is_one_of(value, _HARMLESS[name]):
            raise InvalidRequest(f"{name} is not supported: {_INSTEAD.get(name, 'leave it out')}", param=name)


def _is_one_of(value: Any, harmless: tuple[Any, ...]) -> bool:
    # True == 1 in Python, but `n: true` is a mistake.
    return any(value == known and isinstance(value, bool) == isinstance(known, bool) for known in harmless)


def parse_body(data: bytes, kind: type[Body], most_values: int) -> Body:
    """Parse and check a JSON body.

    Args:
        data: The body.
        kind: Model of the body.
        most_values: Most values that it may hold.

    Raises:
        InvalidRequest: Naming the field at fault, if it is one.
    """
    if not has_at_most(data, most_values):
        raise InvalidRequest(f"the body holds more than {most_values} values: send less")
    fields = _parse(data)
    try:
        body = kind.model_validate(fields)
    except ValidationError as error:
        raise as_invalid_request(error) from None
    refuse_unsupported(body.model_extra or {})
    return body


def _parse(data: bytes) -> dict[str, Any]:
    try:
        fields = json.loads(data)
    except json.JSONDecodeError as error:
        raise InvalidRequest(f"the body is not JSON: {error}") from None
    except UnicodeDecodeError as error:
        raise InvalidRequest(f"the body is not UTF-8: byte {error.start} is invalid") from None
    except (ValueError, RecursionError):
        raise InvalidRequest(
            "the body is not usable JSON: a number is too long, or the nesting is too deep"
        ) from None
    if not isinstance(fields, dict):
        raise InvalidRequest("the body must be a JSON object")
    return fields


def as_invalid_request(error: ValidationError, within: str = "") -> InvalidRequest:
    """The first error, naming the field; of a value that may have several types, the error that lies deepest.

    Args:
        error: Error of a body, or of part of one.
        within: Path of that part in the body.
    """
    # Without the input, which may be part of a prompt.
    errors = error.errors(include_url=False, include_input=False, include_context=False)
    first = errors[0]
    message = first["msg"]
    whole = next((place for place, step in enumerate(first["loc"]) if _is_type_name(step)), None)
    if whole is not None:
        # Where several types are allowed there is an error for each: that of the type that was meant lies
        # furthest within.
        value = first["loc"][:whole]
        errors = [each for each in errors if each["loc"][:whole] == value]
        first = max(errors, key=lambda each: len(each["loc"]))
        same = [each["msg"] for each in errors if len(each["loc"]) == len(first["loc"])]
        message = " or ".join([same[0], *(each.removeprefix("Input should be ") for each in same[1:])])
    param = within
    for step in first["loc"]:
        if _is_type_name(step):
            continue
        param += f"[{step}]" if isinstance(step, int) else f".{step}" if param else str(step)
    if first["type"] == "string_unicode":
        message = "Text has half a surrogate pair: send valid Unicode"
    return InvalidRequest(f"{param}: {message[:1].lower()}{message[1:]}", param=param or None)


def _is_type_name(step: int | str) -> bool:
    return isinstance(step, str) and _TYPE_NAME.fullmatch(step) is not None
