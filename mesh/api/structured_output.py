"""Structured output: what a request asks for, as a form of the answer and as functions that it may call."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from enum import Enum, auto
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Final

from mesh.api.message_bodies import AllowedTools, FreeTextFunction
from mesh.structured_output.gbnf import SchemaError, either, to_gbnf
from mesh.structured_output.json_schema import checked_grammar, json_object_grammar, schema_grammar
from mesh.structured_output.lark import gbnf_of
from mesh.structured_output.strings import parse_pattern
from spanmesh_proto.errors import InvalidRequest

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from mesh.api.message_bodies import ChosenTools, FunctionBody
    from mesh.api.protocol import GenerationBody, ResponseFormatBody, StructuredOutputsBody

# Bound for a model that never stops calling.
MAX_CALLS: Final = 16
# Requests repeat their schemas. Each client's are kept apart: how long one takes shows whether it is known.
_MAX_CACHED: Final = 64


class FormKind(Enum):
    """What describes a form."""

    SCHEMA = auto()
    """A JSON Schema."""
    OBJECT = auto()
    """Nothing: it is any JSON object."""
    PATTERN = auto()
    """A regular expression of the whole answer."""
    CHOICE = auto()
    """Texts, one of which is the answer."""
    GRAMMAR = auto()
    """A grammar in GBNF, or in Lark's notation."""


@dataclass(frozen=True)
class AnswerForm:
    """A form that an answer must have."""

    param: str
    """The request's field that describes it, for errors."""
    kind: FormKind
    """What describes it."""
    value: Any = None
    """The description."""


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
    grammars: Mapping[str, str] = field(default_factory=dict)
    """Of custom tools that have one, by name: grammar of the text, in Lark's notation."""

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


def form_of(body: GenerationBody) -> AnswerForm | None:
    """The form that a request gives its answer; None if that is free.

    By several names it may be given if it is the same: clients write for older and newer servers at once.

    Raises:
        InvalidRequest: If there are two, or one is incomplete.
    """
    found = [
        *_of_response_format(body.response_format),
        *_given("json_schema", FormKind.SCHEMA, body.json_schema),
        *_given("grammar", FormKind.GRAMMAR, body.grammar),
        *_given("regex", FormKind.PATTERN, body.regex),
        *_given("ebnf", FormKind.GRAMMAR, body.ebnf),
        *_of_structured_outputs(body.structured_outputs),
        *_given("guided_json", FormKind.SCHEMA, body.guided_json),
        *_given("guided_regex", FormKind.PATTERN, body.guided_regex),
        *_given("guided_choice", FormKind.CHOICE, body.guided_choice),
        *_given("guided_grammar", FormKind.GRAMMAR, body.guided_grammar),
    ]
    others = [form for form in found[1:] if (form.kind, form.value) != (found[0].kind, found[0].value)]
    if others:
        first, second = (form.param.partition(".")[0] for form in (found[0], others[0]))
        names = (others[0].param, found[0].param) if first == second else (second, first)
        raise InvalidRequest(
            f"{names[0]} and {names[1]} both give a format for the answer: send one of them", param=names[0]
        )
    return found[0] if found else None


def _given(param: str, kind: FormKind, value: Any) -> Iterator[AnswerForm]:
    if value is not None and value not in ("", []):
        yield AnswerForm(param, kind, value)


def _of_response_format(wanted: ResponseFormatBody | None) -> Iterator[AnswerForm]:
    param = "response_format"
    if wanted is None or wanted.type == "text":
        return
    if wanted.type == "json_schema":
        param = f"{param}.json_schema"
        if wanted.json_schema is None:
            raise InvalidRequest(
                f"{param} is missing: response_format.type json_schema needs it", param=param
            )
        if "schema_" not in wanted.json_schema.model_fields_set:
            raise InvalidRequest(f"{param}.schema is missing: send a JSON Schema", param=f"{param}.schema")
        yield AnswerForm(f"{param}.schema", FormKind.SCHEMA, wanted.json_schema.schema_)
    elif wanted.type == "json_object" and wanted.schema_ is None:
        yield AnswerForm(param, FormKind.OBJECT)
    elif wanted.type == "json_object":
        yield AnswerForm(f"{param}.schema", FormKind.SCHEMA, wanted.schema_)
    elif wanted.type == "grammar":
        yield _required(f"{param}.grammar", FormKind.GRAMMAR, wanted.grammar, str)
    elif wanted.type == "regex":
        yield _required(f"{param}.value", FormKind.PATTERN, wanted.value, str)
    else:
        yield _required(f"{param}.value", FormKind.SCHEMA, wanted.value, dict)


def _required(param: str, kind: FormKind, value: Any, type_: type) -> AnswerForm:
    if not isinstance(value, type_) or not value:
        what = "an object" if type_ is dict else "a text"
        raise InvalidRequest(f"{param} must be {what}: this type of response_format needs it", param=param)
    return AnswerForm(param, kind, value)


def _of_structured_outputs(wanted: StructuredOutputsBody | None) -> Iterator[AnswerForm]:
    if wanted is None:
        return
    param = "structured_outputs"
    yield from _given(f"{param}.json", FormKind.SCHEMA, wanted.json_)
    yield from _given(f"{param}.regex", FormKind.PATTERN, wanted.regex)
    yield from _given(f"{param}.choice", FormKind.CHOICE, wanted.choice)
    yield from _given(f"{param}.grammar", FormKind.GRAMMAR, wanted.grammar)
    if wanted.json_object:
        yield AnswerForm(f"{param}.json_object", FormKind.OBJECT)


def grammar_of(form: AnswerForm | None, client: str | None = None) -> str | None:
    """GBNF that an answer must match; None if it is free.

    A large schema takes a second: not to be called in the event loop.

    Args:
        form: Form of the answer.
        client: Identity of the API key, or None.

    Raises:
        InvalidRequest: If a schema cannot be expressed as a grammar, or a grammar is invalid.
    """
    if form is None:
        return None
    match form.kind:
        case FormKind.OBJECT:
            return json_object_grammar()
        case FormKind.SCHEMA:
            return _of_schema(form.value, form.param, client)
        case FormKind.PATTERN:
            return _of_pattern(form.value, form.param, client)
        case FormKind.CHOICE:
            return checked_grammar(to_gbnf({"root": either(*form.value)}), param=form.param)
        case FormKind.GRAMMAR:
            return _checked(form.value, form.param, client)


def schema_of(form: AnswerForm | None) -> AlternativeSchema | None:
    """The schema that an answer must match; None if it is free, or something else describes it."""
    if form is None or form.kind not in (FormKind.SCHEMA, FormKind.OBJECT):
        return None
    schema = {"type": "object"} if form.kind is FormKind.OBJECT else form.value
    return AlternativeSchema(schema, form.param)


def _of_schema(schema: Any, param: str, client: str | None) -> str:
    try:
        # Properties of an answer come in the schema's order: it distinguishes schemas.
        return _converted(json.dumps(schema), param, client)
    except RecursionError:
        raise InvalidRequest(f"{param}: it is nested too deep: make it flatter", param=param) from None


@lru_cache(_MAX_CACHED)
def _checked(grammar: str, param: str, _client: str | None) -> str:
    try:
        gbnf = gbnf_of(grammar)
    except (SchemaError, RecursionError) as error:
        raise InvalidRequest(f"{param}: {error}", param=param) from None
    return checked_grammar(gbnf, param=param)


@lru_cache(_MAX_CACHED)
def _of_pattern(pattern: str, param: str, _client: str | None) -> str:
    try:
        grammar = to_gbnf({"root": parse_pattern(pattern, is_whole=True)})
    except (SchemaError, RecursionError) as error:
        raise InvalidRequest(f"{param}: {error}", param=param) from None
    return checked_grammar(grammar, param=param)


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
    mode = choice.mode if isinstance(choice, AllowedTools) else choice
    is_named = isinstance(choice, tuple)
    return ToolUse(
        tuple(shown),
        is_forced=is_named or mode == "required",
        has_one_call=is_named or is_parallel is False,
        strict_names=frozenset(function.name for function in functions if function.strict),
        grammars={
            function.name: function.lark
            for function in functions
            if isinstance(function, FreeTextFunction) and function.lark is not None
        },
    )


def _described(function: FunctionBody) -> dict[str, Any]:
    found: dict[str, Any] = {"name": function.name}
    if function.description is not None:
        found["description"] = function.description
    found["parameters"] = function.parameters or {"type": "object", "properties": {}}
    return found
