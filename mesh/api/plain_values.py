"""Plain values of requests: numbers in their ranges, stop strings, biases.

A value whose meaning is plain is taken for what it means, in all APIs alike: `16.0` is 16, and what clients
send for "nothing" or "no limit" is that.
"""

from __future__ import annotations

from typing import Annotated, Any, Final, Literal

from pydantic import AfterValidator, BeforeValidator, Field, PlainValidator
from pydantic_core import PydanticCustomError

from spanmesh_proto.errors import InvalidRequest
from stages.sampling.sampler import (
    MAX_BIAS,
    MAX_BIASES,
    MAX_PENALTY,
    MAX_REPETITION_PENALTY,
    MAX_TOP_LOGPROBS,
    MIN_REPETITION_PENALTY,
)

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
