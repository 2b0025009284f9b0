"""Grammars of calls: whatever they allow is read as calls that are valid, in every format."""

import json
from random import Random
from typing import Any

import pytest
from jsonschema import Draft202012Validator

from mesh.api.structured_output import AlternativeSchema, ToolUse, call_grammar
from mesh.text.message_parts import CallFormat, Content, MessagePart, Reasoning, calls_of, joined
from mesh.text.output_parser import OutputFormat, OutputParser
from spanmesh_proto.errors import InvalidRequest
from stages.grammar.session_grammar import make_automaton
from tests.stages.grammar.test_grammar import matches
from tests.support.json_schemas import random_text

LOOK: dict[str, Any] = {
    "name": "look",
    "parameters": {
        "type": "object",
        "properties": {
            "at": {"type": "string", "maxLength": 6},
            "how": {"$ref": "#/$defs/how"},
            "times": {
                "type": "array",
                "items": {"type": "integer", "minimum": 0, "maximum": 99},
                "maxItems": 3,
            },
        },
        "required": ["at"],
        "additionalProperties": False,
        "$defs": {"how": {"enum": ["</tool_call>", 'a "quoted" }', None]}},
    },
}
NOTHING: dict[str, Any] = {"name": "no-thing", "parameters": {"type": "object", "maxProperties": 0}}
BY_NAME = {function["name"]: Draft202012Validator(function["parameters"]) for function in (LOOK, NOTHING)}
ANSWER = {"type": "object", "properties": {"said": {"enum": [1, 2]}}, "required": ["said"]}


def grammar_of(functions: tuple[Any, ...], call_format: CallFormat, **options: Any) -> str:
    """Grammar of calls of strict functions."""
    names = frozenset(function["name"] for function in functions)
    return call_grammar(ToolUse(functions, strict_names=names), call_format, **options).gbnf


def read(call_format: CallFormat, text: str, *, is_in_reasoning: bool = False) -> list[MessagePart]:
    reader = OutputParser(
        OutputFormat(
            call_format,
            frozenset(BY_NAME),
            splits_reasoning=True,
            is_in_reasoning=is_in_reasoning,
            parameters={function["name"]: function["parameters"] for function in (LOOK, NOTHING)},
        )
    )
    return joined([*reader.push(text), *reader.flush()])


@pytest.mark.parametrize("call_format", CallFormat)
@pytest.mark.parametrize("has_one_call", [True, False])
def test_what_is_allowed_is_read_as_valid_calls(call_format: CallFormat, *, has_one_call: bool) -> None:
    automaton = make_automaton(grammar_of((LOOK, NOTHING), call_format, has_one_call=has_one_call))
    random = Random(5)
    counts = set()
    for text in filter(None, (random_text(automaton, random) for _ in range(30))):
        message_parts = read(call_format, text)
        calls = calls_of(message_parts)
        counts.add(len(calls))
        assert not any(isinstance(piece, Content | Reasoning) for piece in message_parts), text
        for name, arguments in calls:
            BY_NAME[name].validate(json.loads(arguments))
    assert 0 not in counts
    assert counts == {1} or not has_one_call


INVOKED = '<invoke name="look">\n<parameter name="at">x</parameter>\n</invoke>'


@pytest.mark.parametrize(
    ("call_format", "text"),
    [
        (CallFormat.HERMES, '<tool_call>\n{"name": "look", "arguments": {"at": "x"}}\n</tool_call>'),
        (CallFormat.LLAMA, '{"name": "look", "parameters": {"at": "x"}}'),
        (CallFormat.MISTRAL, '[TOOL_CALLS][{"name": "look", "arguments": {"at": "x"}}]'),
        (
            CallFormat.QWEN,
            "<tool_call>\n<function=look>\n<parameter=at>\nx\n</parameter>\n</function>\n</tool_call>",
        ),
        (
            CallFormat.GLM,
            "<tool_call>look\n<arg_key>at</arg_key>\n<arg_value>x</arg_value>\n</tool_call>",
        ),
        (CallFormat.GLM, "<tool_call>look<arg_key>at</arg_key><arg_value>x</arg_value></tool_call>"),
        (CallFormat.MINIMAX, f"<minimax:tool_call>\n{INVOKED}\n</minimax:tool_call>"),
    ],
)
def test_calls_are_written_as_templates_teach_them(call_format: CallFormat, text: str) -> None:
    one = make_automaton(grammar_of((LOOK, NOTHING), call_format, has_one_call=True))
    assert matches(one, text)
    assert not matches(one, text.replace("look", "looks"))
    assert not matches(one, text.replace('"x"', "5").replace("x", "seven letters"))
    assert not matches(one, f"Well. {text}")
    named = make_automaton(grammar_of((NOTHING,), call_format, has_one_call=True))
    assert not matches(named, text)


RICH: dict[str, Any] = {
    "type": "object",
    "properties": {
        "short": {"type": "string", "minLength": 1, "maxLength": 3},
        "word": {"type": "string", "pattern": "^[a-z<]{2,4}\n?$"},
        "day": {"type": "string", "format": "date"},
        "size": {"anyOf": [{"type": "integer", "minimum": 1, "maximum": 99}, {"type": "null"}]},
        "note": {"$ref": "#/$defs/note"},
        "mode": {"enum": ["5", 5, "a\n", "\n", "", None, True, {"a": ["<b>"]}]},
        "more": {"type": "object", "properties": {"is_so": {"type": "boolean"}}, "required": ["is_so"]},
    },
    "required": ["word", "mode"],
    "additionalProperties": False,
    "$defs": {"note": {"type": ["string", "null"], "maxLength": 2}},
}
COUNTS: dict[str, Any] = {"type": "object", "additionalProperties": {"type": "integer"}}
TAGGED = [call_format for call_format in CallFormat if call_format.tags is not None]


@pytest.mark.parametrize("call_format", TAGGED)
@pytest.mark.parametrize(
    "schema",
    [
        RICH,
        COUNTS,
        {"$ref": "#/$defs/it", "$defs": {"it": COUNTS}},
        {"$ref": "#/$defs/it", "$defs": {"it": RICH, **RICH["$defs"]}},
        {"anyOf": [{"$ref": "#/$defs/it"}], "$defs": {"it": RICH, **RICH["$defs"]}},
    ],
)
def test_values_between_tags_are_read_as_their_schema_wants(call_format: CallFormat, schema: Any) -> None:
    function = {"name": "look", "parameters": schema}
    automaton = make_automaton(grammar_of((function,), call_format, has_one_call=True))
    random = Random(7)
    found: set[str] = set()
    for text in filter(None, (random_text(automaton, random) for _ in range(40))):
        reader = OutputParser(OutputFormat(call_format, frozenset({"look"}), parameters={"look": schema}))
        message_parts = joined([*reader.push(text), *reader.flush()])
        assert not any(isinstance(piece, Content) for piece in message_parts), text
        (call,) = calls_of(message_parts)
        arguments = json.loads(call[1])
        Draft202012Validator(schema).validate(arguments)
        found |= arguments.keys()
    assert found >= schema.get("properties", {}).keys()


def test_a_text_between_tags_holds_all_but_tags() -> None:
    function = {"name": "look", "parameters": {"type": "object", "properties": {"at": {"type": "string"}}}}
    automaton = make_automaton(grammar_of((function,), CallFormat.QWEN, has_one_call=True))

    def fits(value: str, end: str = "\n") -> bool:
        argument = f"<parameter=at>\n{value}{end}</parameter>\n"
        return matches(automaton, f"<tool_call>\n<function=look>\n{argument}</function>\n</tool_call>")

    for value in ("", "\n", "<p>a</p>\n<", "</par", "</parameter", "<<parameter", '"\\é', "<tool_call"):
        assert fits(value)
        assert fits(value, end="")
    for value in ("</parameter>", "a\n</function> b", "<</tool_call>", "<parameter=how>"):
        assert not fits(value)


def test_names_that_no_tag_can_hold_are_left_to_json() -> None:
    function = {"name": "look", "parameters": {"type": "object", "properties": {"a>b": {}}}}
    with pytest.raises(InvalidRequest, match="'a>b' cannot be written in a tag"):
        grammar_of((function,), CallFormat.QWEN, has_one_call=True)
    loose = call_grammar(ToolUse((function,)), CallFormat.QWEN, has_one_call=True)
    assert "'a>b'" in loose.left_out[0]
    call = "<tool_call>\n<function=look>\n<parameter=other>\nx\n</parameter>\n</function>\n</tool_call>"
    assert matches(make_automaton(loose.gbnf), call)


@pytest.mark.parametrize("is_strict", [True, False])
def test_values_that_are_only_themselves_are_refused(*, is_strict: bool) -> None:
    it = {"$ref": "#/$defs/it"}
    schema = {"type": "object", "properties": {"a": it}, "$defs": {"it": {"anyOf": [it, it, {}]}}}
    tools = ToolUse(
        ({"name": "look", "parameters": schema},), strict_names=frozenset({"look"} if is_strict else ())
    )
    with pytest.raises(InvalidRequest, match="the function look"):
        call_grammar(tools, CallFormat.QWEN, has_one_call=True)


@pytest.mark.parametrize("end", ["</think>", "[/THINK]"])
def test_calls_come_behind_reasoning_that_the_prompt_began(end: str) -> None:
    automaton = make_automaton(grammar_of((NOTHING,), CallFormat.LLAMA, has_one_call=True, thought_end=end))
    call = '{"name": "no-thing", "parameters": {}}'
    for thought in ("", "Hm. <b> [x] é"):
        text = f"{thought}{end}\n\n{call}"
        assert matches(automaton, text)
        message_parts = read(CallFormat.LLAMA, text, is_in_reasoning=True)
        assert message_parts[:1] == ([Reasoning(thought)] if thought else message_parts[:1])
        assert calls_of(message_parts) == [("no-thing", "{}")]
    assert not matches(automaton, call)
    assert not matches(automaton, f"{end}Well.")


def test_an_answer_of_another_form_may_come_instead() -> None:
    grammar = grammar_of(
        (LOOK,),
        CallFormat.HERMES,
        has_one_call=False,
        alternative=AlternativeSchema(ANSWER, "response_format"),
    )
    automaton = make_automaton(grammar)
    assert matches(automaton, '{"said": 1}')
    assert not matches(automaton, '{"said": 3}')
    call = '<tool_call>\n{"name": "look", "arguments": {"at": "x"}}\n</tool_call>'
    assert matches(automaton, f"{call}\n{call}")


@pytest.mark.parametrize(
    ("schema", "refused"),
    [
        (
            {
                "type": "object",
                "properties": {"path": {"type": "string"}},
                "required": ["path"],
                "allOf": [{"if": {}, "then": {}}],
            },
            ["{}", '{"path": 1}'],
        ),
        (
            {
                "type": "object",
                "properties": {
                    "names": {
                        "anyOf": [
                            {"type": "array", "items": {"type": "string"}, "uniqueItems": True},
                            {"type": "null"},
                        ]
                    }
                },
                "required": ["names"],
            },
            ['{"names": 1}', '{"names": [1]}'],
        ),
    ],
)
def test_of_what_cannot_be_enforced_the_rest_is(schema: dict[str, Any], refused: list[str]) -> None:
    function = {"name": "look", "parameters": schema}
    loose = call_grammar(ToolUse((function,)), CallFormat.LLAMA, has_one_call=True)
    assert len(loose.left_out) == 1
    automaton = make_automaton(loose.gbnf)
    assert any(
        matches(automaton, f'{{"name": "look", "parameters": {arguments}}}')
        for arguments in ('{"path": "x"}', '{"names": ["x"]}')
    )
    for arguments in refused:
        assert not matches(automaton, f'{{"name": "look", "parameters": {arguments}}}')
    with pytest.raises(InvalidRequest):
        grammar_of((function,), CallFormat.LLAMA, has_one_call=True)


def test_it_is_bounded() -> None:
    call = '{"name": "no-thing", "parameters": {}}'
    automaton = make_automaton(grammar_of((NOTHING,), CallFormat.LLAMA, has_one_call=False))
    assert matches(automaton, "; ".join([call] * 16))
    assert not matches(automaton, "; ".join([call] * 17))


def test_a_schema_that_nests_too_deep_is_refused() -> None:
    lists: Any = []
    for _ in range(300):
        lists = [lists]
    deep = {"name": "deep", "parameters": {"const": lists}}
    with pytest.raises(InvalidRequest, match="nested too deep") as caught:
        grammar_of((deep,), CallFormat.HERMES, has_one_call=True)
    assert caught.value.param == "tools"


@pytest.mark.parametrize(
    ("parameters", "says"),
    [
        ({"type": "object", "properties": {"a": False}, "required": ["a"]}, "no value"),
        ({"type": "object", "properties": {"a": {"type": "strings"}}}, "properties/a"),
        ({"not": {}}, "not"),
    ],
)
def test_parameters_that_cannot_be_a_grammar_name_their_function(parameters: Any, says: str) -> None:
    bad = {"name": "bad", "parameters": parameters}
    with pytest.raises(InvalidRequest, match=says) as caught:
        grammar_of((LOOK, bad), CallFormat.HERMES, has_one_call=True)
    assert caught.value.param == "tools"
    assert "the function bad" in caught.value.message
