"""Grammars of calls: whatever they allow is read as calls that are valid, in every format."""

import json
import re
from dataclasses import replace
from functools import cache
from random import Random
from typing import Any

import pytest
from jsonschema import Draft202012Validator

from mesh.api.call_grammar import call_grammar, grammar_in_format, is_enforceable
from mesh.api.structured_output import AlternativeSchema, CallGrammar, ToolUse
from mesh.structured_output.free_text import Spelling, Thoughts
from mesh.structured_output.lark import gbnf_of
from mesh.text.answer_format import NOTE_FORMAT, SLOTS, AnswerFormat, CallForm
from mesh.text.chat_template import ChatTemplate
from mesh.text.message_parts import Content, MessagePart, Reasoning, calls_of, joined
from mesh.text.output_parser import OutputFormat, OutputParser
from spanmesh_proto.errors import InvalidRequest
from stages.grammar.session_grammar import make_automaton
from tests.stages.grammar.test_grammar import matches
from tests.support.chat_templates import collected_templates, template_of
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
NOTHING: dict[str, Any] = {"name": "no_thing", "parameters": {"type": "object", "maxProperties": 0}}
# As templates look into schemas that they show.
SHOWN: Any = {
    "type": "function",
    "function": {
        "name": "look",
        "description": "x",
        "parameters": {
            "type": "object",
            "properties": {
                "at": {"type": "string", "description": "x"},
                "times": {"type": "array", "items": {"type": "integer"}, "description": "x"},
            },
            "required": ["at"],
        },
    },
}
BY_NAME = {function["name"]: Draft202012Validator(function["parameters"]) for function in (LOOK, NOTHING)}
ANSWER = {"type": "object", "properties": {"said": {"enum": [1, 2]}}, "required": ["said"]}
NOTE = AnswerFormat()
# One of each kind, and those that the most is asked of.
CHOSEN = (
    "openai-gpt-oss-120b",
    "google-gemma-4-31B-it",
    "deepseek-ai-DeepSeek-V4",
    "moonshotai-Kimi-K2",
    "Qwen3.5-4B",
)
ALL = sorted(collected_templates())
TEMPLATES = [name for name in ALL if name not in CHOSEN]
needs_templates = pytest.mark.skipif(not ALL, reason="llama.cpp's templates are not here")


@cache
def template(name: str) -> ChatTemplate:
    return template_of(collected_templates()[name].read_text())


def format_of(name: str) -> AnswerFormat:
    found = template(name).answer_format
    if not found.is_found:
        pytest.skip("its format of calls is our own note's")
    return found


def grammar_of(functions: tuple[Any, ...], answer_format: AnswerFormat = NOTE, **options: Any) -> str:
    """Grammar of forced calls of strict functions."""
    names = frozenset(function["name"] for function in functions)
    return made(ToolUse(functions, is_forced=True, strict_names=names), answer_format, **options).gbnf


def made(tools: ToolUse, answer_format: AnswerFormat = NOTE, **options: Any) -> CallGrammar:
    defaults: dict[str, Any] = {"has_one_call": True, "thoughts": Thoughts(), "spelling": Spelling()}
    # What is behind an answer are mostly tokens that end it, which no spelling here knows.
    return call_grammar(tools, replace(answer_format, end=""), **{**defaults, **options})


def read(
    answer_format: AnswerFormat,
    text: str,
    functions: tuple[Any, ...] = (LOOK, NOTHING),
    *,
    is_in_reasoning: bool = False,
) -> list[MessagePart]:
    reader = OutputParser(
        OutputFormat(
            call_format=answer_format.calls,
            reasoning=answer_format.reasoning,
            content=answer_format.content,
            headers=answer_format.headers,
            end=answer_format.end,
            primer=answer_format.primer,
            names=frozenset(function["name"] for function in functions),
            splits_reasoning=True,
            is_in_reasoning=is_in_reasoning,
            parameters={function["name"]: function["parameters"] for function in functions},
        )
    )
    return joined([*reader.push(text), *reader.flush()])


def written(name: str, *calls: tuple[str, dict[str, Any]]) -> str:
    """Calls as a template writes them in an answer."""
    made_calls = [
        {
            "id": f"{number}abcdefgh",
            "type": "function",
            "function": {"name": called, "arguments": arguments},
        }
        for number, (called, arguments) in enumerate(calls, 1)
    ]
    conversation: Any = [
        {"role": "user", "content": "questionone"},
        {"role": "assistant", "content": "", "tool_calls": made_calls},
    ]
    text = template(name).probed(conversation, [SHOWN], {}, adds_prompt=False)
    assert text is not None
    answer_format = template(name).answer_format
    marks = answer_format.calls
    opening = _before_slot(marks.begin + marks.call)
    text = text.rpartition("questionone")[2]
    if opening not in text:
        pytest.skip("the template writes no calls")
    text = text[text.index(opening) :].removeprefix(answer_format.primer)
    tail = re.split(f"[{SLOTS}]", marks.call_end + marks.end)[-1]
    return text[: text.rindex(tail) + len(tail)] if tail else text[: text.rindex("}") + 1]


def _before_slot(text: str) -> str:
    return text[: next((at for at, letter in enumerate(text) if letter in SLOTS), None)]


def check_random_calls(answer_format: AnswerFormat, number: int) -> None:
    """Texts that a grammar allows are calls of the schemas."""
    for has_one_call in (True, False):
        grammar = grammar_of((LOOK, NOTHING), answer_format, has_one_call=has_one_call)
        automaton = make_automaton(grammar)
        random = Random(5)
        counts = []
        for text in filter(None, (random_text(automaton, random) for _ in range(number))):
            message_parts = read(answer_format, text)
            calls = calls_of(message_parts)
            counts.append(len(calls))
            assert not any(isinstance(piece, Content | Reasoning) for piece in message_parts), text
            for name, arguments in calls:
                BY_NAME[name].validate(json.loads(arguments))
        assert len(counts) >= number // 8
        assert 0 not in counts
        assert set(counts) == {1} or not has_one_call


@needs_templates
@pytest.mark.parametrize("number", [24, pytest.param(200, marks=pytest.mark.sweep)])
@pytest.mark.parametrize("name", CHOSEN)
def test_what_is_allowed_is_read_as_valid_calls(name: str, number: int) -> None:
    check_random_calls(format_of(name), number)


@needs_templates
@pytest.mark.parametrize("name", TEMPLATES)
def test_what_is_allowed_is_read_as_valid_calls_for_any_template(name: str) -> None:
    check_random_calls(format_of(name), 4)


def test_what_is_allowed_is_read_as_valid_calls_of_our_own_note() -> None:
    check_random_calls(NOTE, 30)


@needs_templates
@pytest.mark.parametrize("name", ALL)
def test_calls_are_written_as_templates_teach_them(name: str) -> None:
    answer_format = format_of(name)
    one = make_automaton(grammar_of((LOOK, NOTHING), answer_format))
    text = written(name, ("look", {"at": "xyz", "times": [1, 2]}))
    assert matches(one, text), text
    for near in (
        text.replace("look", "looks"),
        text.replace("xyz", "seven letters"),
        text.replace("xyz", "xyz" * 3),
        text.replace("1", "100"),
        text.replace("times", "time"),
        text[:-1],
        f"Well. {text}",
        f"{text}.",
    ):
        assert not matches(one, near), near
    assert not matches(make_automaton(grammar_of((NOTHING,), answer_format)), text)
    assert matches(one, written(name, ("look", {"at": ""})))
    if not template(name).has_one_call:
        both = written(name, ("look", {"at": "x"}), ("look", {"at": "y"}))
        assert not matches(one, both)
        assert matches(make_automaton(grammar_of((LOOK,), answer_format, has_one_call=False)), both), both


@needs_templates
def test_a_header_may_name_the_channel_first() -> None:
    answer_format = format_of("openai-gpt-oss-120b")
    arguments = '{"at": "x"}'
    automaton = make_automaton(grammar_of((LOOK,), answer_format))
    for head in ("<|channel|>commentary to=functions.look", "<|channel|>commentary to=functions.look json"):
        text = f"{head}<|message|>{arguments}"
        assert matches(automaton, text)
        assert calls_of(read(answer_format, text)) == [("look", arguments)]
    constrained = f"<|channel|>commentary to=functions.look <|constrain|>json<|message|>{arguments}"
    assert matches(automaton, constrained)
    assert calls_of(read(answer_format, constrained)) == [("look", arguments)]
    assert not matches(automaton, constrained.replace("look", "other"))


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
TAGGED = (*CHOSEN, "GLM-4.6", "MiniMax-M2", "Kimi-K3", "LFM2.5-8B-A1B", "ByteDance-Seed-OSS")


@needs_templates
@pytest.mark.parametrize("name", TAGGED)
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
def test_values_are_read_as_their_schema_wants(name: str, schema: Any) -> None:
    function = {"name": "look", "parameters": schema}
    answer_format = format_of(name)
    automaton = make_automaton(grammar_of((function,), answer_format))
    random = Random(7)
    found: set[str] = set()
    for text in filter(None, (random_text(automaton, random) for _ in range(30))):
        message_parts = read(answer_format, text, (function,))
        assert not any(isinstance(piece, Content) for piece in message_parts), text
        (call,) = calls_of(message_parts)
        arguments = json.loads(call[1])
        Draft202012Validator(schema).validate(arguments)
        found |= arguments.keys()
    # By chance one of them may be missing.
    assert len(schema.get("properties", {}).keys() - found) <= 1


@needs_templates
@pytest.mark.parametrize("name", ALL)
def test_values_may_hold_marks_of_all_that_is_no_call(name: str) -> None:
    answer_format = format_of(name)
    around = (*answer_format.reasoning, answer_format.content)
    marks = sorted(
        filter(
            None, {*answer_format.header_marks, *(text for each in around for text in (each.begin, each.end))}
        )
    )
    schema = {
        "type": "object",
        "properties": {"at": {"enum": [marks]}, "text": {"enum": ["\n".join(marks)]}},
        "required": ["at", "text"],
    }
    function = {"name": "look", "parameters": schema}
    automaton = make_automaton(grammar_of((function,), answer_format))
    text = random_text(automaton, Random(3), 4000)
    assert text is not None
    (call,) = calls_of(read(answer_format, text, (function,)))
    assert json.loads(call[1]) == {"at": marks, "text": "\n".join(marks)}, text


EMPTY: dict[str, Any] = {
    "type": "object",
    "properties": {
        "some": {"type": "object", "properties": {"a": {"type": "integer"}}},
        "none": {"type": "object", "properties": {}, "additionalProperties": False},
        "any": {"type": "object"},
        "list": {
            "type": "array",
            "items": {"type": "object", "properties": {"a": {"type": "null"}}},
            "maxItems": 1,
        },
    },
    "required": ["some", "none", "any", "list"],
}


@needs_templates
@pytest.mark.parametrize("name", ["MiniMax-M3", "MiniMax-M2", "Kimi-K3"])
def test_objects_and_lists_may_be_empty(name: str) -> None:
    answer_format = format_of(name)
    function = {"name": "look", "parameters": EMPTY}
    automaton = make_automaton(grammar_of((function,), answer_format))
    random = Random(11)
    found: list[Any] = []
    for text in filter(None, (random_text(automaton, random) for _ in range(60))):
        (call,) = calls_of(read(answer_format, text, (function,)))
        found.append(json.loads(call[1]))
        Draft202012Validator(EMPTY).validate(found[-1])
    for key in EMPTY["properties"]:
        assert any(not each[key] for each in found)


@needs_templates
def test_a_text_between_tags_holds_all_but_tags() -> None:
    function = {"name": "look", "parameters": {"type": "object", "properties": {"at": {"type": "string"}}}}
    automaton = make_automaton(grammar_of((function,), format_of("Qwen3-Coder")))

    def fits(value: str, end: str = "\n") -> bool:
        argument = f"<parameter=at>\n{value}{end}</parameter>\n"
        return matches(automaton, f"<tool_call>\n<function=look>\n{argument}</function>\n</tool_call>")

    for value in ("", "\n", "<p>a</p>\n<", "</par", "</parameter", "<<parameter", '"\\é', "<tool_call"):
        assert fits(value)
        assert fits(value, end="")
    for value in ("</parameter>", "a\n</function> b", "<</tool_call>", "<parameter=how>"):
        assert not fits(value)


@needs_templates
def test_names_that_no_tag_can_hold_are_left_to_json() -> None:
    answer_format = format_of("Qwen3-Coder")
    function = {"name": "look", "parameters": {"type": "object", "properties": {"a>b": {}}}}
    with pytest.raises(InvalidRequest, match="'a>b' cannot be written in a tag"):
        grammar_of((function,), answer_format)
    loose = made(ToolUse((function,), is_forced=True), answer_format)
    assert "'a>b'" in loose.left_out[0]
    call = "<tool_call>\n<function=look>\n<parameter=other>\nx\n</parameter>\n</function>\n</tool_call>"
    assert matches(make_automaton(loose.gbnf), call)


@needs_templates
@pytest.mark.parametrize(("name", "says"), [("google-gemma-4-31B-it", "quotes"), ("LFM2.5-8B-A1B", "tag")])
def test_names_that_need_quotes_are_refused_where_there_are_none(name: str, says: str) -> None:
    function = {"name": "look", "parameters": {"type": "object", "properties": {"a b": {}}}}
    with pytest.raises(InvalidRequest, match=f"'a b' cannot be written .*{says}"):
        grammar_of((function,), format_of(name))


@needs_templates
@pytest.mark.parametrize("is_strict", [True, False])
def test_values_that_are_only_themselves_are_refused(*, is_strict: bool) -> None:
    it = {"$ref": "#/$defs/it"}
    schema = {"type": "object", "properties": {"a": it}, "$defs": {"it": {"anyOf": [it, it, {}]}}}
    names = frozenset({"look"} if is_strict else ())
    tools = ToolUse(({"name": "look", "parameters": schema},), is_forced=True, strict_names=names)
    with pytest.raises(InvalidRequest, match="the function look"):
        made(tools, format_of("Qwen3-Coder"))


CALLED = '<tool_call>\n{"name": "no_thing", "arguments": {}}\n</tool_call>'


@pytest.mark.parametrize("end", ["</think>", "[/THINK]"])
def test_calls_come_behind_reasoning_that_the_prompt_began(end: str) -> None:
    begun = Thoughts((("", end),), is_begun=True)
    automaton = make_automaton(grammar_of((NOTHING,), thoughts=begun))
    for thought in ("", "Hm. <b> </b> [x] [/x] é"):
        text = f"{thought}{end}\n\n{CALLED}"
        assert matches(automaton, text)
        message_parts = read(NOTE, text, is_in_reasoning=True)
        assert message_parts[:1] == ([Reasoning(thought)] if thought else message_parts[:1])
        assert calls_of(message_parts) == [("no_thing", "{}")]
    assert not matches(automaton, CALLED)
    assert not matches(automaton, f"{end}Well.")
    assert not matches(automaton, f"Hm{end}{end}{CALLED}")


def test_reasoning_may_come_first_where_the_model_begins_it() -> None:
    marks = (("<think>", "</think>"), ("[THINK]", "[/THINK]"))
    automaton = make_automaton(grammar_of((NOTHING,), thoughts=Thoughts(marks)))
    for text in (CALLED, f"<think>\nHm.</think>\n{CALLED}", f"[THINK]</think>[/THINK]{CALLED}"):
        assert matches(automaton, text)
        assert calls_of(read(NOTE, text)) == [("no_thing", "{}")]
    for text in (f"Hm.</think>{CALLED}", f"<think>{CALLED}", f"<think></think><think></think>{CALLED}"):
        assert not matches(automaton, text)


@needs_templates
def test_content_of_a_form_stands_where_the_format_has_it() -> None:
    answer_format = format_of("openai-gpt-oss-120b")
    marks = tuple((each.begin, each.end) for each in answer_format.reasoning)
    grammar = grammar_in_format(
        'root ::= "red"',
        answer_format,
        thoughts=Thoughts(marks),
        spelling=Spelling(),
        param="grammar",
        client=None,
    )
    automaton = make_automaton(grammar)
    final = "<|channel|>final<|message|>red"
    thought = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant"
    for text in (final, f"{thought}{final}"):
        assert matches(automaton, text)
        assert [piece for piece in read(answer_format, text) if not isinstance(piece, Reasoning)] == [
            Content("red")
        ]
    for text in ("red", f"{final}!", f"{thought}red"):
        assert not matches(automaton, text)


def test_strict_functions_are_held_to_their_schema_behind_free_text() -> None:
    tools = ToolUse((LOOK, NOTHING), strict_names=frozenset({"look"}))
    automaton = make_automaton(made(tools, has_one_call=False).gbnf)
    call = '<tool_call>\n{"name": "look", "arguments": {"at": "x"}}\n</tool_call>'
    others = CALLED.replace("{}", '{"a": [1]}')
    for text in ("", "Well, <b> {", f"I look.\n{call}", f"{call}\n{CALLED}", others):
        assert matches(automaton, text)
    for text in ("<tool_call>", call.replace('"x"', "5"), call.replace("at", "it"), f"{call} and"):
        assert not matches(automaton, text)


@needs_templates
@pytest.mark.parametrize("name", ALL)
def test_free_text_is_free_where_a_strict_function_is_offered(name: str) -> None:
    answer_format = format_of(name)
    if not is_enforceable(answer_format):
        pytest.skip("its calls have no mark")
    tools = ToolUse((LOOK, NOTHING), strict_names=frozenset({"look"}))
    automaton = make_automaton(made(tools, answer_format).gbnf)
    begin, end = answer_format.content.begin, answer_format.content.end
    assert matches(automaton, f"{begin}Well, [1] <b> {{é}}{end}")
    assert matches(automaton, written(name, ("look", {"at": "xyz"})))
    assert not matches(automaton, written(name, ("look", {"at": "xyz" * 3})))


def test_an_answer_of_another_form_may_come_instead() -> None:
    tools = ToolUse((LOOK,), strict_names=frozenset({"look"}))
    grammar = made(tools, has_one_call=False, alternative=AlternativeSchema(ANSWER, "response_format")).gbnf
    automaton = make_automaton(grammar)
    assert matches(automaton, '{"said": 1}')
    assert not matches(automaton, '{"said": 3}')
    call = '<tool_call>\n{"name": "look", "arguments": {"at": "x"}}\n</tool_call>'
    assert matches(automaton, f"{call}\n{call}")


def test_marks_that_are_control_tokens_are_written_as_such() -> None:
    spelling = Spelling(
        (("<tool_call>", 7), ("</tool_call>", 8), ("</think>", 9), ("<|end|>", 10)), frozenset({10})
    )
    thoughts = Thoughts((("", "</think>"),), is_begun=True)
    grammar = grammar_of((NOTHING,), thoughts=thoughts, spelling=spelling)
    assert [f"<[{token}]>" in grammar for token in (7, 8, 9, 10)] == [True, True, True, False]
    assert '"<tool_call>' not in grammar
    ending = spelling.of("a</think>b<|end|>c")
    assert spelling.ends("a<|end|>c")
    assert ending == Spelling((("</think>", 9),)).of("a</think>b")


SCHEMAS: Any = [
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
]


def in_note(arguments: str, name: str = "look") -> str:
    return f"{NOTE_FORMAT.call}{name}{NOTE_FORMAT.name_end}{arguments}{NOTE_FORMAT.call_end}"


@pytest.mark.parametrize(("schema", "refused"), SCHEMAS)
def test_of_what_cannot_be_enforced_the_rest_is(schema: dict[str, Any], refused: list[str]) -> None:
    function = {"name": "look", "parameters": schema}
    loose = made(ToolUse((function,), is_forced=True))
    assert len(loose.left_out) == 1
    automaton = make_automaton(loose.gbnf)
    assert any(matches(automaton, in_note(said)) for said in ('{"path": "x"}', '{"names": ["x"]}'))
    for arguments in refused:
        assert not matches(automaton, in_note(arguments))
    with pytest.raises(InvalidRequest):
        grammar_of((function,))


def test_it_is_bounded() -> None:
    automaton = make_automaton(grammar_of((LOOK,), has_one_call=False))
    call = in_note('{"at": ""}')
    assert matches(automaton, "\n".join([call] * 16))
    assert not matches(automaton, "\n".join([call] * 17))


def test_a_schema_that_nests_too_deep_is_refused() -> None:
    lists: Any = []
    for _ in range(300):
        lists = [lists]
    deep = {"name": "deep", "parameters": {"const": lists}}
    with pytest.raises(InvalidRequest, match="nested too deep") as caught:
        grammar_of((deep,))
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
        grammar_of((LOOK, bad))
    assert caught.value.param == "tools"
    assert "the function bad" in caught.value.message


def test_forms_of_calls_are_all_tried() -> None:
    found = {template(name).answer_format.calls.form for name in ALL}
    assert not ALL or found == set(CallForm)


EDIT: dict[str, Any] = {
    "name": "edit",
    "parameters": {"type": "object", "properties": {"input": {"type": "string"}}, "required": ["input"]},
}
LARK = 'start: line{1,3}\nline: ("+" | "-") /["\\\\a-c]{0,4}/ LF\n%import common.LF'


@pytest.mark.parametrize("name", [None, *(pytest.param(name, marks=needs_templates) for name in CHOSEN)])
def test_the_text_of_a_custom_tool_follows_its_grammar(name: str | None) -> None:
    answer_format = NOTE if name is None else format_of(name)
    tools = ToolUse((EDIT,), is_forced=True, strict_names=frozenset(("edit",)), grammars={"edit": LARK})
    found = made(tools, answer_format)
    assert found.left_out == ()
    automaton, grammar = make_automaton(found.gbnf), make_automaton(gbnf_of(LARK))
    texts = list(filter(None, (random_text(automaton, Random(seed)) for seed in range(20))))
    assert len(texts) > 10
    for text in texts:
        ((called, arguments),) = calls_of(read(answer_format, text, (EDIT,)))
        assert called == "edit"
        assert matches(grammar, json.loads(arguments)["input"]), text


@needs_templates
@pytest.mark.parametrize("name", ["google-gemma-4-31B-it", "Qwen3.5-4B"])
def test_a_grammar_that_a_format_cannot_hold_is_left_out_with_a_warning(name: str) -> None:
    answer_format = format_of(name)
    found = made(ToolUse((EDIT,), is_forced=True, grammars={"edit": "start: /.+/"}), answer_format)
    (told,) = found.left_out
    assert told.startswith("the grammar of the custom tool edit: texts in which < may be cannot be held to")
    free = made(ToolUse((EDIT,), is_forced=True), answer_format)
    assert found.gbnf == free.gbnf
