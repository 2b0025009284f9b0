"""The field `logit_bias`: token ids, as JSON has them, to biases."""

from __future__ import annotations

from typing import Any

from pydantic_core import PydanticCustomError

from stages.sampling.sampler import MAX_BIAS, MAX_BIASES

_SHOWN_CHARS = 32


def parse_logit_bias(value: Any) -> tuple[tuple[int, float], ...]:
    """Pairs of token id and bias; none for null. Whether the ids exist is for whoever knows the vocabulary.

    Raises:
        PydanticCustomError: Naming the entry at fault.
    """
    if value is None:
        return ()
    if not isinstance(value, dict):
        raise PydanticCustomError("logit_bias", 'must be an object such as {"42": -100}')
    if len(value) > MAX_BIASES:
        raise PydanticCustomError(
            "logit_bias",
            "has {count} entries: at most {most} work",
            {"count": len(value), "most": MAX_BIASES},
        )
    pairs = tuple((_token(key), _bias(key, bias)) for key, bias in value.items())
    if len({token for token, _ in pairs}) < len(pairs):
        raise PydanticCustomError("logit_bias", "names a token twice: name each once")
    return pairs


def _token(key: str) -> int:
    digits = key.removeprefix("-")
    if not (digits.isascii() and digits.isdecimal() and len(digits) < 19):
        raise PydanticCustomError(
            "logit_bias", "{key} is not a token id: write ids in digits", {"key": repr(key[:_SHOWN_CHARS])}
        )
    return int(key)


def _bias(key: str, bias: Any) -> float:
    is_number = isinstance(bias, int | float) and not isinstance(bias, bool)
    if not is_number or not -MAX_BIAS <= bias <= MAX_BIAS:
        shown = repr(bias)[:_SHOWN_CHARS] if is_number else "no number"
        raise PydanticCustomError(
            "logit_bias",
            "of token {key} is {bias}: send a number from -100 (never) to 100 (always)",
            {"key": key, "bias": shown},
        )
    return float(bias)
