"""Structured output: response format, grammar and tools of a request as one grammar."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Final

from mesh.api.protocol import AllowedTools
from mesh.structured_output.free_text import behind_thoughts, text_rules
from mesh.structured_output.gbnf import SchemaError, either, maybe, seq, times, to_gbnf
from mesh.structured_output.json_schema import (
    Converter,
    check_size,
    checked_grammar,
    json_object_grammar,
    schema_grammar,
)
from mesh.structured_output.objects import TagForm
from mesh.structured_output.strings import quoted
from mesh.text.message_parts import CallFormat
from spanmesh_proto.errors import InvalidRequest
from stages.grammar.gbnf_parser import Expression, Ref, parse_gbnf

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from mesh.api.protocol import ChosenTools, FunctionBody, GenerationBody, ResponseFormatBody
    from mesh.text.message_parts import CallTags

# Bound for a model that never stops calling.
MAX_CALLS: Final = 16
_CALL: Final = Ref("call")
_TEXT: Final = Ref("text")
# Keywords of a schema that constrain nothing.
_NOTES: Final = frozenset({"$schema", "$id", "title", "description", "$defs", "definitions"})
_MOST_LEFT_OUT: Final = 16
# Requests repeat their schemas. Each client's are kept apart: how long one takes shows whether it is known.
_MAX_CACHED: Final = 64


@dataclass(frozen=True)
class AlternativeSchema:
    """JSON schema of an answer in place of calls."""

    schema: Any
    """The schema."""
    param: str
    """The request's field with the schema, for errors."""


@dataclass(frozen=True)
class CallGrammar:
    """Grammar of calls."""

    gbnf: str
    """The grammar."""
    left_out: tuple[str, ...] = ()
    """What it does not enforce of the schemas of functions that are not strict: place and reason."""


@dataclass(frozen=True)
class ToolUse:
    """Functions that an answer may call."""

    functions: tuple[Mapping[str, Any], ...]
    """Each with `name`, `description` if it has one, and `parameters`, a JSON schema."""
    is_forced: bool = False
    """Whether at least one call is required."""
    has_one_call: bool = False
    """Whether the answer ends with its first call."""
    strict_names: frozenset[str] = frozenset()
    """Names of functions whose schema must be enforced as a whole."""

    @property
    def names(self) -> frozenset[str]:
        """Names of the functions."""
        return frozenset(function["name"] for function in self.functions)

    @property
    def parameters(self) -> dict[str, Mapping[str, Any]]:
        """JSON schema of each function's parameters, by its name."""
        return {function["name"]: function["parameters"] for function in self.functions}

    def for_template(self) -> list[dict[str, Any]]:
        """The functions in the form of chat templates."""
        return [{"type": "function", "function": dict(function)} for function in self.functions]


def call_grammar(
    tools: ToolUse,
    call_format: CallFormat,
    *,
    has_one_call: bool,
    thought_end: str | None = None,
    alternative: AlternativeSchema | None = None,
) -> CallGrammar:
    """Grammar of one or more calls.

    Args:
        tools: Functions to call.
        call_format: Format of calls.
        has_one_call: Whether there is only one call.
        thought_end: End mark of the reasoning that the prompt begins, if it does: the calls follow it.
        alternative: Alternative to calls, if there is one.

    Raises:
        InvalidRequest: If a schema is invalid, or that of a strict function cannot be expressed as a grammar.
    """
    rules: dict[str, Expression] = {}
    form = None if call_format.tags is None else _form_of(call_format.tags)
    if form is not None:
        rules |= text_rules(_TEXT.name, call_format.marks)
    calls = []
    left_out: list[str] = []
    for index, function in enumerate(tools.functions):
        what = f"the parameters of the function {function['name']}"
        is_strict = function["name"] in tools.strict_names
        arguments: Expression | str = "{}" if form is None else ""
        if not _takes_nothing(function["parameters"]):
            arguments, converter = _value(
                function["parameters"], f"f{index}-", what, "tools", is_lenient=not is_strict, form=form
            )
            rules |= converter.rules
            left_out += [f"{what}, {each}" for each in converter.left_out]
        calls.append(_call_of(function["name"], arguments, call_format))
    most_calls = 1 if has_one_call else MAX_CALLS
    if all(_takes_nothing(function["parameters"]) for function in tools.functions):
        # No call differs from an earlier one of the same function, and small models never stop by themselves.
        most_calls = min(most_calls, len(tools.functions))
    root = _in_format(call_format, most_calls - 1)
    if alternative is not None:
        answer, converter = _value(
            alternative.schema, "answer-", alternative.param, alternative.param, is_lenient=False
        )
        rules |= converter.rules
        root = either(root, answer)
    rules = {"root": root, **rules, "call": either(*calls)}
    if thought_end is not None:
        rules = behind_thoughts(rules, thought_end)
    try:
        grammar = to_gbnf(rules)
    except RecursionError:
        raise InvalidRequest(
            "tools: their schemas are nested too deep: make them flatter", param="tools"
        ) from None
    if (num_more := len(left_out) - _MOST_LEFT_OUT) > 0:
        left_out[_MOST_LEFT_OUT:] = [f"{num_more} more parts of schemas"]
    return CallGrammar(checked_grammar(grammar, param="tools"), tuple(left_out))


def _takes_nothing(parameters: Mapping[str, Any]) -> bool:
    """Whether the schema of a function's parameters names none, and permits no others by name."""
    is_object = parameters.get("type", "object") in ("object", ["object"])
    others = parameters.get("additionalProperties", False)
    beside = parameters.keys() - {"type", "properties", "required", "additionalProperties", *_NOTES}
    is_empty = parameters.get("properties", {}) == {} and parameters.get("required", []) == []
    return is_object and others is False and not beside and is_empty


def _value(
    schema: Any, prefix: str, what: str, param: str, *, is_lenient: bool, form: TagForm | None = None
) -> tuple[Expression, Converter]:
    converter = Converter(schema, prefix, is_lenient=is_lenient)
    try:
        check_size(schema)
        expression = converter.expression(schema) if form is None else converter.tagged(schema, form)
    except SchemaError as error:
        where = f" at `{error.where}`" if error.where else ""
        raise InvalidRequest(f"{what}{where}: {error.reason}", param=param) from None
    except RecursionError:
        raise InvalidRequest(f"{what}: it is nested too deep: make it flatter", param=param) from None
    if expression is None:
        raise InvalidRequest(f"{what}: it allows no value at all", param=param)
    return expression, converter


def _call_of(name: str, arguments: Expression | str, call_format: CallFormat) -> Expression:
    """One call without the marks around it."""
    tags = call_format.tags
    if tags is not None:
        return seq(f"{tags.call}{name}{tags.name_end}", maybe("\n"), arguments, tags.call_end)
    key = "parameters" if call_format is CallFormat.LLAMA else "arguments"
    return seq(f'{{"name": {quoted(name)}, "{key}": ', arguments, "}")


def _form_of(tags: CallTags) -> TagForm:
    value = seq(tags.key_end, maybe("\n"), tags.value) if tags.value else seq(tags.key_end)
    return TagForm(tags.key, value, tags.value_end, _TEXT, tags.is_padded)


def _in_format(call_format: CallFormat, most_more: int) -> Expression:
    match call_format:
        case CallFormat.HERMES | CallFormat.QWEN:
            one = seq("<tool_call>\n", _CALL, "\n</tool_call>")
            return _several(one, "\n", most_more)
        case CallFormat.LLAMA:
            return _several(_CALL, "; ", most_more)
        case CallFormat.MISTRAL:
            return seq("[TOOL_CALLS][", _several(_CALL, ", ", most_more), "]")
        case CallFormat.GLM:
            return _several(seq("<tool_call>", _CALL, "</tool_call>"), "\n", most_more)
        case CallFormat.MINIMAX:
            calls = _several(_CALL, "\n", most_more)
            return seq("<minimax:tool_call>\n", calls, "\n</minimax:tool_call>")


def _several(one: Expression, between: str, most_more: int) -> Expression:
    return seq(one, times(seq(between, one), 0, most_more)) if most_more else one


def grammar_of(
    body: GenerationBody, client: str | None = None, *, thought_end: str | None = None
) -> str | None:
    """GBNF that an answer must match; None if it is free.

    A large schema takes a second: not to be called in the event loop.

    Args:
        body: The checked body.
        client: Identity of the API key, or None.
        thought_end: End mark of the reasoning that the prompt begins, if it does: it stays free.

    Raises:
        InvalidRequest: If a schema cannot be expressed as a grammar, a grammar is invalid, or two are given.
    """
    found = {
        "response_format": _of_format(body.response_format, client),
        "json_schema": (
            None if body.json_schema is None else _of_schema(body.json_schema, "json_schema", client)
        ),
        "grammar": _checked(body.grammar, client) if body.grammar else None,
    }
    given = [name for name, grammar in found.items() if grammar is not None]
    if len(given) > 1:
        raise InvalidRequest(
            f"{given[1]} and {given[0]} both give a format for the answer: send one of them",
            param=given[1],
        )
    if not given:
        return None
    (name, *_) = given
    grammar = found[name] or ""
    return grammar if thought_end is None else _behind(grammar, thought_end, name, client)


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


def _of_format(wanted: ResponseFormatBody | None, client: str | None) -> str | None:
    if wanted is None or wanted.type == "text":
        return None
    if wanted.type == "json_object":
        return json_object_grammar()
    param = "response_format.json_schema"
    if wanted.json_schema is None:
        raise InvalidRequest(f"{param} is missing: response_format.type json_schema needs it", param=param)
    if "schema_" not in wanted.json_schema.model_fields_set:
        raise InvalidRequest(f"{param}.schema is missing: send a JSON Schema", param=f"{param}.schema")
    return _of_schema(wanted.json_schema.schema_, f"{param}.schema", client)


def _of_schema(schema: Any, param: str, client: str | None) -> str:
    try:
        # Properties of an answer come in the schema's order: it distinguishes schemas.
        return _converted(json.dumps(schema), param, client)
    except RecursionError:
        raise InvalidRequest(f"{param}: it is nested too deep: make it flatter", param=param) from None


@lru_cache(_MAX_CACHED)
def _checked(grammar: str, _client: str | None) -> str:
    return checked_grammar(grammar, param="grammar")


@lru_cache(_MAX_CACHED)
def _behind(grammar: str, thought_end: str, param: str, _client: str | None) -> str:
    return checked_grammar(to_gbnf(behind_thoughts(parse_gbnf(grammar), thought_end)), param=param)


@lru_cache(_MAX_CACHED)
def _converted(schema_json: str, param: str, _client: str | None) -> str:
    return schema_grammar(json.loads(schema_json), param=param)


def tool_use_of(
    functions: Sequence[FunctionBody],
    choice: ChosenTools,
    *,
    is_parallel: bool | None,
    name_param: str,
) -> ToolUse | None:
    """Functions that a request allows its answer to call; None for none.

    A function that is named is the only one that the model sees.

    Args:
        functions: All functions of the request.
        choice: Which of them may or must be called.
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
    named = choice.names if isinstance(choice, AllowedTools) else choice if isinstance(choice, tuple) else ()
    if strange := [name for name in named if name not in seen]:
        raise InvalidRequest(
            f"tool_choice names {strange[0]!r}, but tools has {', '.join(sorted(seen))}: name one of them",
            param="tool_choice",
        )
    if named:
        shown = [function for function in shown if function["name"] in named]
    strict = frozenset(function.name for function in functions if function.strict)
    if isinstance(choice, tuple):
        return ToolUse(tuple(shown), is_forced=True, has_one_call=True, strict_names=strict)
    mode = choice.mode if isinstance(choice, AllowedTools) else choice
    return ToolUse(
        tuple(shown),
        is_forced=mode == "required",
        has_one_call=is_parallel is False,
        strict_names=strict,
    )


def _described(function: FunctionBody) -> dict[str, Any]:
    found: dict[str, Any] = {"name": function.name}
    if function.description is not None:
        found["description"] = function.description
    found["parameters"] = function.parameters or {"type": "object", "properties": {}}
    return found
