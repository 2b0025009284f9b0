"""Parsing of request bodies: what a body is, plain values, unknown and unsupported fields.

A value whose meaning is plain is taken for what it means, in all APIs alike: `16.0` is 16, and what clients
send for "nothing" or "no limit" is that.
"""

from __future__ import annotations

import json
import re
from functools import cache
from types import NoneType, UnionType
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal, TypeVar, Union, get_args, get_origin

import structlog
from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainValidator,
    ValidationError,
    model_validator,
)
from pydantic_core import PydanticCustomError

from mesh.api.foreign_fields import INSTEAD, NEUTRAL, OF_PROMPTS
from spanmesh_proto.errors import InvalidRequest
from stages.sampling.sampler import (
    MAX_BIAS,
    MAX_BIASES,
    MAX_PENALTY,
    MAX_REPETITION_PENALTY,
    MAX_TOP_LOGPROBS,
    MIN_REPETITION_PENALTY,
)

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
SHOWN_CHARS: Final = 32
"""Characters of a client's value in an error."""
MAX_STOPS: Final = 16
MAX_STOP_CHARS: Final = 512
NO_LIMIT: Final = 2**31 - 1
"""A limit on tokens that no answer reaches."""
_MOST_NAMED: Final = 8

_StopString = Annotated[str, Field(max_length=MAX_STOP_CHARS)]
StopList = Annotated[list[_StopString], Field(max_length=MAX_STOPS)]
_Bias = Annotated[float, Field(ge=-MAX_BIAS, le=MAX_BIAS)]
_BiasInput = (
    Annotated[
        dict[Annotated[str, Field(pattern=r"^[0-9]{1,18}$")], _Bias],
        Field(max_length=MAX_BIASES),
    ]
    | Annotated[list[Any], Field(max_length=0)]
    | Literal[""]
    | None
)

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


def as_whole(value: Any) -> Any:
    """A number without a fraction as an integer: languages with one type of number send `16.0`."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def none_if_false(value: Any) -> Any:
    """`false` where a number belongs, as clients of several endpoints send it to ask for nothing."""
    return None if value is False else value


def between(least: float, most: float, note: str = "") -> AfterValidator:
    """A validator for a field with an optional number.

    Args:
        least: Smallest permitted value.
        most: Largest permitted value.
        note: Addition to the error, such as the value that switches the field off.
    """

    def check(value: float | None) -> float | None:
        if value is not None and not least <= value <= most:
            raise PydanticCustomError(
                "range",
                "{value} is out of range: send {least} to {most}{note}",
                {
                    "value": str(value)[:SHOWN_CHARS],
                    "least": f"{least:g}",
                    "most": f"{most:g}",
                    "note": note,
                },
            )
        return value

    return AfterValidator(check)


def parse_logit_bias(value: Any) -> tuple[tuple[int, float], ...]:
    """Pairs of token id and bias; empty for null. Whether the ids exist is checked later.

    Raises:
        PydanticCustomError: Naming the entries at fault.
    """
    if value in (None, [], ""):
        return ()
    if not isinstance(value, dict):
        raise PydanticCustomError("logit_bias", 'must be an object such as {"42": -100}')
    if len(value) > MAX_BIASES:
        raise PydanticCustomError(
            "logit_bias",
            "has {count} entries: at most {most} work",
            {"count": len(value), "most": MAX_BIASES},
        )
    if wrong := [key for key in value if not _is_token(key)]:
        raise PydanticCustomError(
            "logit_bias",
            "{keys} is not a token id: write ids in digits"
            if len(wrong) == 1
            else "{keys} are not token ids: write ids in digits",
            {"keys": _names(wrong)},
        )
    pairs = tuple((int(key), _bias(key, bias)) for key, bias in value.items())
    if len({token for token, _ in pairs}) < len(pairs):
        raise PydanticCustomError("logit_bias", "has a token twice: give each once")
    return pairs


def _is_token(key: str) -> bool:
    digits = key.removeprefix("-")
    return digits.isascii() and digits.isdecimal() and len(digits) < 19


def _names(keys: list[str]) -> str:
    shown = ", ".join(repr(key[:SHOWN_CHARS]) for key in keys[:_MOST_NAMED])
    return shown if len(keys) <= _MOST_NAMED else f"{shown}, …"


def _bias(key: str, bias: Any) -> float:
    is_number = isinstance(bias, int | float) and not isinstance(bias, bool)
    if not is_number or not -MAX_BIAS <= bias <= MAX_BIAS:
        shown = repr(bias)[:SHOWN_CHARS] if is_number else "no number"
        raise PydanticCustomError(
            "logit_bias",
            "of token {key} is {bias}: send a number from -100 (never) to 100 (always)",
            {"key": key, "bias": shown},
        )
    return float(bias)


def parse_stop(value: Any) -> tuple[str, ...]:
    """One stop string or a list of them, as a tuple; empty ones stop nothing."""
    if value is None:
        return ()
    stops = [value] if isinstance(value, str) else value
    if not isinstance(stops, list) or not all(isinstance(stop, str) for stop in stops):
        raise PydanticCustomError("stop", "must be a string or a list of strings")
    stops = [stop for stop in stops if stop]
    if len(stops) > MAX_STOPS:
        raise PydanticCustomError(
            "stop", "holds {count} strings: at most {most} work", {"count": len(stops), "most": MAX_STOPS}
        )
    if any(len(stop) > MAX_STOP_CHARS for stop in stops):
        raise PydanticCustomError(
            "stop", "must hold strings of at most {most} characters", {"most": MAX_STOP_CHARS}
        )
    return tuple(stops)


def _in_document(least: float, most: float) -> Any:
    """Range that a validator of ours checks, for the API's document."""
    return Field(json_schema_extra={"minimum": least, "maximum": most})


def none_if_minus_one(value: Any) -> Any:
    """The number by which llama-server and others mean that there is none: no limit, or a random seed."""
    return None if value == -1 and not isinstance(value, bool) else value


AS_WHOLE: Final = BeforeValidator(as_whole)
Whole = Annotated[int, AS_WHOLE]
"""An integer."""
TokenLimit = Annotated[int, Field(ge=-1, json_schema_extra={"not": {"const": 0}}), AS_WHOLE]
"""Most tokens of an answer; -1 sets no limit."""
TokenLimitOr0 = Annotated[int, Field(ge=-1), AS_WHOLE]
"""The same where an answer may have none."""
_Seed = Annotated[int, Field(ge=-(2**63), lt=2**64), AS_WHOLE]
Seed = Annotated[_Seed | None, BeforeValidator(none_if_minus_one)]
Penalty = Annotated[
    float | None,
    between(-MAX_PENALTY, MAX_PENALTY, "; 0 switches it off"),
    _in_document(-MAX_PENALTY, MAX_PENALTY),
]
RepetitionPenalty = Annotated[
    float | None,
    between(MIN_REPETITION_PENALTY, MAX_REPETITION_PENALTY, "; 1 switches it off"),
    _in_document(MIN_REPETITION_PENALTY, MAX_REPETITION_PENALTY),
]
LastN = Annotated[Whole | None, between(-1, NO_LIMIT, "; -1 counts all, 0 none"), _in_document(-1, NO_LIMIT)]
NumTopLogprobs = Annotated[Whole | None, between(0, MAX_TOP_LOGPROBS), _in_document(0, MAX_TOP_LOGPROBS)]
LogitBias = Annotated[
    tuple[tuple[int, float], ...], PlainValidator(parse_logit_bias, json_schema_input_type=_BiasInput)
]
Stops = Annotated[
    tuple[str, ...], PlainValidator(parse_stop, json_schema_input_type=_StopString | StopList | None)
]


def choice_count(most: int) -> Any:
    """Type of a number of answers, from 1."""
    return Annotated[Whole | None, between(1, most), _in_document(1, most)]


def limit_of(name: str, value: int | None, *, permits_none: bool) -> int | None:
    """A limit on tokens as a number; None if the request names none.

    Args:
        name: Name of its field.
        value: Its value, -1 for no limit.
        permits_none: Whether an answer may have no token.

    Raises:
        InvalidRequest: If nothing would be answered.
    """
    if value == 0 and not permits_none:
        raise InvalidRequest(
            f"{name} is 0, so there would be no answer: send at least 1, or echo to have the prompt back",
            param=name,
        )
    return NO_LIMIT if value == -1 else value


def max_values(context_length: int) -> int:
    """Most values of a body: a full context as token ids, and ample fields beside."""
    return min(_LEAST_VALUES + _VALUES_PER_POSITION * context_length, _MOST_VALUES)


def is_simple(data: bytes | bytearray) -> bool:
    """Whether parsing and checking a JSON text takes no more than a few milliseconds, whatever is in it."""
    return len(data) <= _SIMPLE_BYTES and _count(data, _SIMPLE_VALUES) <= _SIMPLE_VALUES


def unknown_names(body: BaseModel) -> Iterator[str]:
    """Fields of a body that nothing here reads; those of messages are for templates."""
    yield from (name for name in body.model_extra or () if name not in neutral_values(type(body)))
    for field, value in vars(body).items():
        for part in value if isinstance(value, list) and field != "messages" else (value,):
            if isinstance(part, BaseModel):
                yield from (f"{field}.{name}" for name in part.model_extra or ())


def has_at_most(data: bytes | bytearray, most: int) -> bool:
    """Whether a JSON text has no more than about this many values and containers.

    Args:
        data: The text, not necessarily valid.
        most: An array of this many numbers still passes.
    """
    if _count(data, most) <= most:
        return True
    # Commas and brackets in strings do not count. Escapes are removed first, so that every remaining quote
    # begins or ends a string.
    bare = data.replace(b"\\\\", b"").replace(b'\\"', b"")
    if bare.count(b'"') > 4 * most:
        return False
    return _count(b"".join(bare.split(b'"')[::2]), most) <= most


def _count(data: bytes | bytearray, most: int) -> int:
    """Commas and opening brackets; of more than `most` of one kind one more is counted."""
    # Where they are rare, as in pictures, this takes a tenth of the time of `bytes.count`, which looks at
    # each byte by itself.
    return sum(len(data) - len(data.replace(mark, b"", most + 1)) for mark in (b",", b"[", b"{"))


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


def parse_body(data: bytes | bytearray, kind: type[Body], most_values: int) -> Body:
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


def _parse(data: bytes | bytearray) -> dict[str, Any]:
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
