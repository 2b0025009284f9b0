"""Parsing of request bodies; unknown and unsupported fields."""

from __future__ import annotations

import json
import re
from functools import cache
from types import NoneType, UnionType
from typing import TYPE_CHECKING, Annotated, Any, Final, TypeVar, Union, get_args, get_origin

import structlog
from pydantic import BaseModel, ConfigDict, ValidationError, model_validator

from mesh.api.foreign_fields import INSTEAD, NEUTRAL, OF_PROMPTS
from spanmesh_proto.errors import InvalidRequest

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

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
# Request nothing in any field.
_NOTHING: Final[tuple[Any, ...]] = (None, "", [])
_LEAVE_OUT: Final = "leave it out"
log = structlog.get_logger()

Body = TypeVar("Body", bound=BaseModel)


class StrictBody(BaseModel):
    """Types are strict: a number in quotes is an error, as at OpenAI. Other fields land in `model_extra`."""

    model_config = ConfigDict(strict=True, extra="allow", allow_inf_nan=False, frozen=True)


class ExactBody(BaseModel):
    """A part of a request that shapes the answer: what it does not name is refused, unless it is null."""

    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False, frozen=True)

    @model_validator(mode="before")
    @classmethod
    def _without_nothing(cls, value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        known = {field.alias or name for name, field in cls.model_fields.items()}
        fields = {name: each for name, each in value.items() if each is not None or name in known}
        return without_nothing(cls, fields)


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


def unknown_names(body: BaseModel) -> Iterator[str]:
    """Fields of a body that nothing here reads; those of messages are for templates."""
    yield from (name for name in body.model_extra or () if name not in neutral_values(type(body)))
    for field, value in vars(body).items():
        for part in value if isinstance(value, list) and field != "messages" else (value,):
            if isinstance(part, BaseModel):
                yield from (f"{field}.{name}" for name in part.model_extra or ())


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


def neutral_values(kind: type[BaseModel]) -> dict[str, tuple[Any, ...]]:
    """Unsupported fields of a body, each with the values that request nothing beside null, "" and []."""
    generates, own = getattr(kind, "generates", False), getattr(kind, "neutral", {})
    common = NEUTRAL if generates else {name: NEUTRAL[name] for name in OF_PROMPTS}
    return {**common, **own}


def describe(schema: dict[str, Any], kind: type[BaseModel]) -> None:
    """Add to the JSON schema of a request body what its model does not tell.

    Unsupported fields, each with its permitted values; and the empty text, where it means "nothing".
    """
    properties = schema["properties"]
    for name in _optional(kind) & properties.keys():
        whole = properties[name]
        options = whole.pop("anyOf", None) or [{key: whole.pop(key) for key in list(whole)}]
        whole["anyOf"] = [*options, {"const": ""}]
    for name, values in neutral_values(kind).items():
        properties.setdefault(name, {"enum": [*_NOTHING, *values]})


def refuse_unsupported(kind: type[BaseModel], fields: Mapping[str, Any]) -> None:
    """Check the fields that a body does not name.

    Args:
        kind: Model of the body.
        fields: Those fields.

    Raises:
        InvalidRequest: Naming the first one that requests something.
    """
    neutral = neutral_values(kind)
    for name, value in fields.items():
        if name in neutral and not _is_one_of(value, (*_NOTHING, *neutral[name])):
            raise _unsupported(name, name)


def _unsupported(param: str, name: str) -> InvalidRequest:
    return InvalidRequest(f"{param} is not supported: {INSTEAD.get(name, _LEAVE_OUT)}", param=param)


def _is_one_of(value: Any, harmless: tuple[Any, ...]) -> bool:
    # True == 1 in Python, but `n: true` is a mistake.
    return any(value == known and isinstance(value, bool) == isinstance(known, bool) for known in harmless)


def without_nothing(kind: type[BaseModel], fields: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of an object with null for each empty text that can only mean "nothing": where no text belongs.

    Args:
        kind: Model of the object.
        fields: The fields as they came.
    """
    if "" not in fields.values():
        return dict(fields)
    optional = _optional(kind)
    return {name: None if value == "" and name in optional else value for name, value in fields.items()}


@cache
def _optional(kind: type[BaseModel]) -> frozenset[str]:
    found = {field.alias or name: _types(field.annotation) for name, field in kind.model_fields.items()}
    return frozenset(name for name, types in found.items() if NoneType in types and not types & {str, Any})


def _types(annotation: Any) -> set[Any]:
    """Types of an annotation, those of a union one by one."""
    if get_origin(annotation) is Annotated:
        return _types(get_args(annotation)[0])
    if get_origin(annotation) in (Union, UnionType):
        return {found for each in get_args(annotation) for found in _types(each)}
    return {annotation}


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
        body = kind.model_validate(without_nothing(kind, fields))
    except ValidationError as error:
        raise as_invalid_request(error) from None
    refuse_unsupported(kind, body.model_extra or {})
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
    if first["type"] == "extra_forbidden":
        return _unsupported(param, str(first["loc"][-1]))
    if first["type"] == "string_unicode":
        message = "Text has half a surrogate pair: send valid Unicode"
    return InvalidRequest(f"{param}: {message[:1].lower()}{message[1:]}", param=param or None)


def _is_type_name(step: int | str) -> bool:
    return isinstance(step, str) and _TYPE_NAME.fullmatch(step) is not None
