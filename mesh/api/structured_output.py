"""Structured output: response format, grammar and tools of a request as one grammar."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Final

from mesh.structured_output.converter import Converter, check_size
from mesh.structured_output.gbnf import SchemaError, chars, either, seq, times, to_gbnf
from mesh.structured_output.json_schema import checked_grammar, json_object_grammar, schema_grammar
from mesh.structured_output.strings import quoted
from mesh.text.message_parts import CallFormat
from spanmesh_proto.errors import InvalidRequest
from stages.grammar.gbnf_parser import Chars, Expression, Ref, complement

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from mesh.api.protocol import FunctionBody, GenerationBody, ResponseFormatBody


# Bound for a model that never stops calling.
MAX_CALLS: Final = 16
_CALL: Final = Ref("call")
_SPACES: Final = times(chars(" ", "\n"), 0, 4)


@dataclass(frozen=True)
class AlternativeSchema:
    """JSON schema of an answer in place of calls.

    Attributes:
        schema: The schema.
        param: The request's field with the schema, for errors.
    """

    schema: Any
    param: str


def call_grammar(
    functions: tuple[Mapping[str, Any], ...],
    call_format: CallFormat,
    *,
    has_one_call: bool,
    thought_end: str | None = None,
    alternative: AlternativeSchema | None = None,
) -> str:
    """GBNF of one or more calls.

    Args:
        functions: Each with `name` and `parameters`, a JSON schema.
        call_format: Format of calls.
        has_one_call: Whether there is only one call.
        thought_end: End mark of the reasoning that the prompt begins, if it does: the calls follow it.
        alternative: Alternative to calls, if there is one.

    Raises:
        InvalidRequest: If a schema cannot be expressed as a grammar.
    """
    rules: dict[str, Expression] = {}
    calls = []
    for index, function in enumerate(functions):
        arguments, more = _value(
            function["parameters"],
            f"f{index}-",
            f"the parameters of the function {function['name']}",
            "tools",
        )
        rules |= more
        key = "parameters" if call_format is CallFormat.LLAMA else "arguments"
        calls.append(seq(f'{{"name": {quoted(function["name"])}, "{key}": ', arguments, "}"))
    root = _in_format(call_format, 0 if has_one_call else MAX_CALLS - 1)
    if alternative is not None:
        answer, more = _value(alternative.schema, "answer-", alternative.param, alternative.param)
        rules |= more
        root = either(root, answer)
    if thought_end is not None:
        root = seq(_thoughts(thought_end), thought_end, _SPACES, root)
    rules["call"] = either(*calls)
    try:
        grammar = to_gbnf({"root": root, **rules})
    except RecursionError:
        raise InvalidRequest(
            "tools: their schemas are nested too deep: make them flatter", param="tools"
        ) from None
    return checked_grammar(grammar, param="tools")


def _value(schema: Any, prefix: str, what: str, param: str) -> tuple[Expression, dict[str, Expression]]:
    converter = Converter(schema, prefix)
    try:
        check_size(schema)
        expression = converter.expression(schema)
    except SchemaError as error:
        where = f" at `{error.where}`" if error.where else ""
        raise InvalidRequest(f"{what}{where}: {error.reason}", param=param) from None
    except RecursionError:
        raise InvalidRequest(f"{what}: it is nested too deep: make it flatter", param=param) from None
    if expression is None:
        raise InvalidRequest(f"{what}: it allows no value at all", param=param)
    return expression, converter.rules


def _in_format(call_format: CallFormat, most_more: int) -> Expression:
    match call_format:
        case CallFormat.HERMES:
            one = seq("<tool_call>\n", _CALL, "\n</tool_call>")
            return _several(one, "\n", most_more)
        case CallFormat.LLAMA:
            return _several(_CALL, "; ", most_more)
        case CallFormat.MISTRAL:
            return seq("[TOOL_CALLS][", _several(_CALL, ", ", most_more), "]")


def _several(one: Expression, between: str, most_more: int) -> Expression:
    return seq(one, times(seq(between, one), 0, most_more)) if most_more else one


def _thoughts(end: str) -> Expression:
    """Any text without the beginning of the end mark."""
    first, second = (_but(letter) for letter in end[:2])
    return times(either(first, seq(end[0], second)), 0, None)


def _but(letter: str) -> Chars:
    return Chars(complement(((ord(letter), ord(letter)),)))


# Requests repeat their schemas.
_MAX_CACHED: Final = 64


def grammar_of(body: GenerationBody) -> str | None:
    """GBNF that an answer must match; None if it is free.

    A large schema takes a second: not to be called in the event loop.

    Args:
        body: The checked body.

    Raises:
        InvalidRequest: If a schema cannot be expressed as a grammar, a grammar is invalid, or two are given.
    """
    found = {
        "response_format": _of_format(body.response_format),
        "json_schema": None if body.json_schema is None else _of_schema(body.json_schema, "json_schema"),
        "grammar": _checked(body.grammar) if body.grammar else None,
    }
    given = [name for name, grammar in found.items() if grammar is not None]
    if len(given) > 1:
        raise InvalidRequest(
            f"{given[1]} and {given[0]} both give a format for the answer: send one of them",
            param=given[1],
        )
    return found[given[0]] if given else None


def schema_of(body: GenerationBody) -> AlternativeSchema | None:
    """The schema that an answer must match; None if the body has a grammar instead."""
    if body.json_schema is not None:
        return AlternativeSchema(body.json_schema, "json_schema")
    wanted = body.response_format
    if wanted is None or wanted.type == "text":
        return None
    if wanted.json_schema is None or wanted.type == "json_object":
        return AlternativeSchema({"type": "object"}, "response_format")
    return AlternativeSchema(wanted.json_schema.schema_, "response_format.json_schema.schema")


def _of_format(wanted: ResponseFormatBody | None) -> str | None:
    if wanted is None or wanted.type == "text":
        return None
    if wanted.type == "json_object":
        return json_object_grammar()
    param = "response_format.json_schema"
    if wanted.json_schema is None:
        raise InvalidRequest(f"{param} is missing: response_format.type json_schema needs it", param=param)
    if "schema_" not in wanted.json_schema.model_fields_set:
        raise InvalidRequest(f"{param}.schema is missing: send a JSON Schema", param=f"{param}.schema")
    return _of_schema(wanted.json_schema.schema_, f"{param}.schema")


def _of_schema(schema: Any, param: str) -> str:
    try:
        # Properties of an answer come in the schema's order: it distinguishes schemas.
        return _converted(json.dumps(schema), param)
    except RecursionError:
        raise InvalidRequest(f"{param}: it is nested too deep: make it flatter", param=param) from None


@lru_cache(_MAX_CACHED)
def _checked(grammar: str) -> str:
    return checked_grammar(grammar, param="grammar")


@lru_cache(_MAX_CACHED)
def _converted(schema_json: str, param: str) -> str:
    return schema_grammar(json.loads(schema_json), param=param)


@dataclass(frozen=True)
class ToolUse:
    """Functions that an answer may call.

    Attributes:
        functions: Each with `name`, `description` if it has one, and `parameters`, a JSON schema.
        is_forced: Whether at least one call is required.
        has_one_call: Whether the answer ends with its first call.
    """

    functions: tuple[Mapping[str, Any], ...]
    is_forced: bool = False
    has_one_call: bool = False

    @property
    def names(self) -> frozenset[str]:
        """Names of the functions."""
        return frozenset(function["name"] for function in self.functions)

    def for_template(self) -> list[dict[str, Any]]:
        """The functions in the form of chat templates."""
        return [{"type": "function", "function": dict(function)} for function in self.functions]


def tool_use_of(
    functions: Sequence[FunctionBody],
    choice: str | tuple[str] | None,
    *,
    is_parallel: bool | None,
    name_param: str,
) -> ToolUse | None:
    """Functions that a request allows its answer to call; None for none.

    A function that is named is the only one that the model sees.

    Args:
        functions: All functions of the request.
        choice: `none`, `auto`, `required`, or the name of the one to call, as a tuple of one.
        is_parallel: Whether several calls are allowed; None is yes.
        name_param: Field of a function's name, with `{}` for the function's number.

    Raises:
        InvalidRequest: If two have the same name, or the choice names another one.
    """
    seen: set[str] = set()
    for index, function in enumerate(functions):
        if function.name in seen:
            param = name_param.format(index)
            raise InvalidRequest(
                f"{param}: two functions are named {function.name}: give each another name", param=param
            )
        seen.add(function.name)
    if not functions:
        if choice in (None, "auto", "none"):
            return None
        raise InvalidRequest("tool_choice asks for a call, but tools has no function", param="tool_choice")
    if choice == "none":
        return None
    shown = [_described(function) for function in functions]
    if isinstance(choice, tuple):
        if choice[0] not in seen:
            raise InvalidRequest(
                f"tool_choice names {choice[0]!r}, but tools has {', '.join(sorted(seen))}: name one of them",
                param="tool_choice",
            )
        shown = [function for function in shown if function["name"] == choice[0]]
        return ToolUse(tuple(shown), is_forced=True, has_one_call=True)
    return ToolUse(tuple(shown), is_forced=choice == "required", has_one_call=is_parallel is False)


def _described(function: FunctionBody) -> dict[str, Any]:
    found: dict[str, Any] = {"name": function.name}
    if function.description is not None:
        found["description"] = function.description
    found["parameters"] = function.parameters or {"type": "object", "properties": {}}
    return found
