"""Forms that an answer must have, as OpenAI, vLLM, SGLang, llama-server and TGI name them."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto
from typing import TYPE_CHECKING, Any

from spanmesh_proto.errors import InvalidRequest

if TYPE_CHECKING:
    from collections.abc import Iterator

    from mesh.api.protocol import GenerationBody, ResponseFormatBody, StructuredOutputsBody


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
    """A grammar in GBNF."""


@dataclass(frozen=True)
class AnswerForm:
    """A form that an answer must have."""

    param: str
    """The request's field that describes it, for errors."""
    kind: FormKind
    """What describes it."""
    value: Any = None
    """The description."""


def form_of(body: GenerationBody) -> AnswerForm | None:
    """The form that a request gives its answer; None if that is free.

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
    if len(found) > 1:
        first, second = (form.param.partition(".")[0] for form in found[:2])
        names = (found[1].param, found[0].param) if first == second else (second, first)
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
