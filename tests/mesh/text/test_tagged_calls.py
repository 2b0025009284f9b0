"""Calls whose arguments are values between tags: formats, types by schema, and what models get wrong."""

import json
from random import Random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mesh.text.answer_characters import Characters, skip_space
from mesh.text.answer_format import CallFormat
from mesh.text.message_parts import (
    Content,
    MessagePart,
    ToolCallArguments,
    ToolCallStart,
    calls_of,
    joined,
)
from mesh.text.output_parser import OutputFormat, OutputParser
from mesh.text.tagged_arguments import ParameterSchemas
from tests.support.call_formats import GLM, HERMES, MARKS, MINIMAX, QWEN, SEED, TAGGED
from tests.support.chat_templates import template_of

LOOK: Any = {
    "type": "object",
    "properties": {
        "at": {"type": "string"},
        "how": {"type": "string"},
        "times": {"type": "integer"},
        "many": {"type": "array", "items": {"type": "integer"}},
        "note": {"type": ["string", "null"]},
        "some": {"anyOf": [{"type": "integer"}, {"type": "null"}]},
        "kind": {"enum": ["5", 5, None]},
        "deep": {"$ref": "#/$defs/deep"},
        "is_so": {"type": "boolean"},
    },
    "$defs": {"deep": {"type": "object"}},
}
FUNCTIONS = {"look": LOOK, "add": {}}


def format_of(call_format: CallFormat, *, has_one_call: bool = False) -> OutputFormat:
    return OutputFormat(call_format, frozenset(FUNCTIONS), has_one_call=has_one_call, parameters=FUNCTIONS)


def read(call_format: CallFormat, *texts: str, is_cut: bool = False) -> list[MessagePart]:
    reader = OutputParser(format_of(call_format))
    message_parts = [piece for text in texts for piece in reader.push(text)]
    return joined([*message_parts, *reader.flush(is_cut=is_cut)])


def call(name: str, arguments: str, index: int = 0) -> list[MessagePart]:
    return [ToolCallStart(index, name), ToolCallArguments(index, arguments)]


def function(*pairs: tuple[str, str], name: str = "look") -> str:
    """A call as Qwen's templates write it, without the tags around it."""
    values = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in pairs)
    return f"<function={name}>\n{values}</function>"


def block(*pairs: tuple[str, str], name: str = "look") -> str:
    return f"<tool_call>\n{function(*pairs, name=name)}\n</tool_call>"


AT = block(("at", "x"))
SAID = call("look", '{"at": "x"}')
HTML = '<p>\n</parameter>\n<b>"\\n</b>\t</function> </tool_call>'

QWEN_CASES: list[tuple[str, list[MessagePart]]] = [
    (AT, SAID),
    (f"I look.\n\n{AT}", [Content("I look."), *SAID]),
    (f"{AT}\n{AT}", [*SAID, *call("look", '{"at": "x"}', 1)]),
    (f"{AT} Done.", [*SAID, Content(" Done.")]),
    ("<tool_call>\n<function=add>\n</function>\n</tool_call>", call("add", "{}")),
    ("<tool_call><function=look><parameter=at>x</parameter></function></tool_call>", SAID),
    (block(("at", "a"), ("times", "3"), name="other"), call("other", '{"at": "a", "times": 3}')),
    # values
    (block(("at", "")), call("look", '{"at": ""}')),
    (block(("at", "\nx\n")), call("look", '{"at": "\\nx\\n"}')),
    (block(("at", "5"), ("times", "5")), call("look", '{"at": "5", "times": 5}')),
    (block(("at", HTML)), call("look", f'{{"at": {json.dumps(HTML)}}}')),
    (block(("at", "é\x00\\")), call("look", '{"at": "é\\u0000\\\\"}')),
    (block(("many", "[1,\n 2]"), ("at", "")), call("look", '{"many": [1,\n 2], "at": ""}')),
    (block(("other", '{"a": [1]}'), ("more", "a b")), call("look", '{"other": {"a": [1]}, "more": "a b"}')),
    # the first tag is missing
    (function(("at", "x")), SAID),
    (f"I look.\n{function(('at', 'x'))}\n</tool_call>", [Content("I look."), *SAID]),
    ("<function=other>\n</function>", [Content("<function=other>\n</function>")]),
    ("Write `<function=name>` first", [Content("Write `<function=name>` first")]),
    # other tags are missing
    (AT.replace("</parameter>\n", ""), SAID),
    (AT.replace("</parameter>\n</function>\n", ""), SAID),
    (AT.replace("</function>\n", ""), SAID),
    (AT.replace("</function>\n</tool_call>", ""), SAID),
    (AT.removesuffix("</tool_call>"), SAID),
    (AT.replace("</parameter>\n</function>\n</tool_call>", ""), SAID),
    (
        "<tool_call><function=look><parameter=at>\nx\n<parameter=how>\ny\n</parameter></function></tool_call>",
        call("look", '{"at": "x", "how": "y"}'),
    ),
    ("<function=look\n<parameter=at\nx\n</parameter>\n</function>", SAID),
    (f"{AT.removesuffix('</tool_call>')}{AT}", [*SAID, *call("look", '{"at": "x"}', 1)]),
    # tags that are parts of a text
    (
        block(("at", "a <parameter=how> b\n<parameter=at>\n<parameter=odd>\n</parameter> c")),
        call("look", '{"at": "a <parameter=how> b\\n<parameter=at>\\n<parameter=odd>\\n</parameter> c"}'),
    ),
    # several in a block, and JSON
    (
        f"<tool_call>{function(('at', 'x'))}\n{function(name='add')}</tool_call>",
        [*SAID, *call("add", "{}", 1)],
    ),
    ('<tool_call>{"name": "look", "arguments": {"at": "x"}}</tool_call>', SAID),
    ('<function=look>{"at": "x"}</function>', SAID),
    ('<function=look>\n{"at": ["x"</function></tool_call>', call("look", '{"at": ["x"]}')),
    # what is none
    ("<tool_call>\n<b>", [Content("<tool_call>\n<b>")]),
    ("<tool_call>\n<function=<b>", [Content("<tool_call>\n<function=<b>")]),
    ("<tool_call>\n<function=a b>", [Content("<tool_call>\n<function=a b>")]),
    ("<tool_call>\n<func", [Content("<tool_call>\n<func")]),
    (f"<tool_call>{AT}", [Content("<tool_call>"), *SAID]),
    ("<tool_call><function=look>\noops</function>", [*call("look", "{}"), Content("oops</function>")]),
    # a text about calls
    ("Write `<function=look>` first", [Content("Write `<function=look>` first")]),
    ("<function=look>\noops</function>", [Content("<function=look>\noops</function>")]),
    ("<function=look>\n", [Content("<function=look>\n")]),
    ("<function=add></function>", call("add", "{}")),
    # the same parameter twice
    (
        block(("at", "x"), ("times", "1"), ("at", "y"), ("times", "2")),
        call("look", '{"at": "x", "times": 1}'),
    ),
]  # fmt: skip


def test_the_tag_around_calls_may_be_another_one() -> None:
    text = AT.replace("tool_call>", "seed:tool_call>")
    assert read(SEED, text) == read(SEED, *text) == SAID


@pytest.mark.parametrize(("text", "said"), QWEN_CASES)
def test_calls_in_qwens_format(text: str, said: list[MessagePart]) -> None:
    assert read(QWEN, text) == said
    assert read(QWEN, *text) == said


def glm(*pairs: tuple[str, str], name: str = "look", between: str = "\n") -> str:
    values = "".join(
        f"{between}<arg_key>{key}</arg_key>{between}<arg_value>{value}</arg_value>" for key, value in pairs
    )
    return f"<tool_call>{name}{values}{between}</tool_call>"


GLM_CASES: list[tuple[str, list[MessagePart]]] = [
    (glm(("at", "x")), SAID),
    (glm(("at", "x"), between=""), SAID),
    (glm(("at", "\nx\n"), ("many", "[1]")), call("look", '{"at": "\\nx\\n", "many": [1]}')),
    (glm(name="add"), call("add", "{}")),
    (glm(name="add", between=""), call("add", "{}")),
    (glm(("a", "1"), name="other"), call("other", '{"a": 1}')),
    (f"Well.\n{glm(('at', 'x'))}\n{glm(name='add')}", [Content("Well."), *SAID, *call("add", "{}", 1)]),
    ("<tool_call>other</tool_call>", [Content("<tool_call>other</tool_call>")]),
    ("<tool_call>no call</tool_call>", [Content("<tool_call>no call</tool_call>")]),
    (glm(("at", "x")).replace("</arg_value>", ""), call("look", '{"at": "x\\n"}')),
    ('<tool_call>{"name": "look", "arguments": {"at": "x"}}</tool_call>', SAID),
]


@pytest.mark.parametrize(("text", "said"), GLM_CASES)
def test_calls_in_glms_format(text: str, said: list[MessagePart]) -> None:
    assert read(GLM, text) == said
    assert read(GLM, *text) == said


def minimax(*pairs: tuple[str, str], name: str = "look") -> str:
    values = "".join(f'<parameter name="{key}">{value}</parameter>\n' for key, value in pairs)
    return f'<invoke name="{name}">\n{values}</invoke>'


def minimax_block(*pairs: tuple[str, str]) -> str:
    return f"<minimax:tool_call>\n{minimax(*pairs)}\n</minimax:tool_call>"


MINIMAX_CASES: list[tuple[str, list[MessagePart]]] = [
    (f"<minimax:tool_call>\n{minimax(('at', 'x'))}\n</minimax:tool_call>", SAID),
    (
        f"<minimax:tool_call>\n{minimax(('at', 'x'))}\n{minimax(name='add')}\n</minimax:tool_call> Done.",
        [*SAID, *call("add", "{}", 1), Content(" Done.")],
    ),
    (f"Well.\n{minimax(('at', 'x'))}", [Content("Well."), *SAID]),
    (minimax(name="other"), [Content(minimax(name="other"))]),
    ('The tag <invoke name="look"> is it.', [Content('The tag <invoke name="look"> is it.')]),
]


@pytest.mark.parametrize(("text", "said"), MINIMAX_CASES)
def test_calls_in_minimaxs_format(text: str, said: list[MessagePart]) -> None:
    assert read(MINIMAX, text) == said
    assert read(MINIMAX, *text) == said


JSON_CALLS = """# Calls
<tool_call>
{"name": "look", "arguments": {"city": "Oslo"}}
</tool_call>
<tool_call>
{"name": "add", "arguments": {"command": "rm -rf build"}}
</tool_call>
That is all."""


@pytest.mark.parametrize(
    "shown",
    [
        JSON_CALLS,
        f"# Calls\n{AT}\n{block(('at', 'y'), ('times', '5'))}\nThat is all.",
        f"{AT}\n{AT}",
        f"{block(name='add')}\n{block(name='add')}\n",
        f"{block(('at', block(('at', AT))))}\n{AT}\n.",
        f"{function(('at', 'x'))}\n{function(('at', 'x'))}\n.",
        f"{glm(('at', 'x'))}\n{glm(('at', 'x'), ('how', 'y'), between='')}\n{glm(name='add')}\nThat is all.",
        f"{minimax_block(('at', 'x'))}\n{minimax_block(('at', 'x'), ('how', 'y'))}\nThat is all.",
        '<tool_call>\n<function=look>\n{"at": "x"}\n</function>\n</tool_call>\n.',
    ],
)
def test_calls_that_a_value_shows_are_part_of_it(shown: str) -> None:
    arguments = json.dumps({"how": "x", "at": shown})
    pairs = (("how", "x"), ("at", shown))
    for call_format, text in (
        (QWEN, block(*pairs)),
        (GLM, glm(*pairs)),
        (MINIMAX, minimax_block(*pairs)),
    ):
        assert read(call_format, text) == call("look", arguments)
        assert read(call_format, *f"{text}\n{text}") == [
            *call("look", arguments),
            *call("look", arguments, 1),
        ]


def test_a_value_without_an_end_ends_where_another_call_begins() -> None:
    qwen = AT.replace("</parameter>\n", "")
    bare = AT.replace("</parameter>\n</function>\n", "")
    shows = "<tool_call>\n<function=other>\n<parameter=a>\nx"
    for text in (qwen, bare):
        assert read(QWEN, f"{text}\n{AT}") == [*SAID, *call("look", '{"at": "x"}', 1)]
    assert read(GLM, glm(("at", "x"), between="").replace("</arg_value>", "") + glm(("at", "x"))) == [
        *SAID,
        *call("look", '{"at": "x"}', 1),
    ]
    # The call that it shows has no end, but the text has.
    assert read(QWEN, block(("at", shows))) == call("look", json.dumps({"at": shows}))


@pytest.mark.parametrize("length", range(len(AT)))
def test_a_stop_string_completes_no_value(length: int) -> None:
    text = AT[:length]
    reader = OutputParser(format_of(QWEN))
    message_parts = [*reader.push(text), *reader.flush(is_stopped=True)]
    if "<parameter=at>" in text:
        [(_, arguments)] = calls_of(message_parts)
        assert (arguments == '{"at": "x"}') is ("</parameter>" in text)
        assert '{"at": "x"}'.startswith(arguments)


def test_a_block_that_ends_within_a_value_is_no_end_before_a_stop_string() -> None:
    reader = OutputParser(format_of(QWEN))
    text = "<tool_call>\n<function=look>\n<parameter=at>\nx\n</tool_call>\n"
    [(_, arguments)] = calls_of([*reader.push(text), *reader.flush(is_stopped=True)])
    assert arguments.startswith('{"at": "x')
    assert not arguments.endswith("}")


def test_lookahead_takes_time_in_proportion() -> None:
    # With a copy of the rest for each character this would take minutes.
    characters = Characters()
    machine = skip_space(characters, lambda _char: None)
    next(machine)
    characters.unread(" " * 2_000_000)
    with pytest.raises(StopIteration):
        machine.send("x")
    assert characters.rest() == "x"


def test_models_whose_template_describes_json_are_read_too() -> None:
    assert read(HERMES, f"{AT}\n{glm(('at', 'x'))}") == [*SAID, *call("look", '{"at": "x"}', 1)]
    assert read(HERMES, function(("at", "x"))) == [Content(function(("at", "x")))]


@pytest.mark.parametrize("length", range(len(AT)))
def test_what_a_limit_cut_is_no_complete_call(length: int) -> None:
    text = AT[:length]
    message_parts = read(QWEN, text, is_cut=True)
    begun = "<parameter=at>" in text
    assert joined(message_parts) == read(QWEN, *text, is_cut=True)
    if "<function=look>" not in text:
        # One character is more often one of a text.
        assert message_parts == ([Content(text)] if length == 1 else [])
        return
    [start, *rest] = message_parts
    assert start == ToolCallStart(0, "look")
    arguments = "".join(piece.text for piece in rest if isinstance(piece, ToolCallArguments))
    assert '{"at": "x"}'.startswith(arguments) or not begun
    assert (arguments == '{"at": "x"}') is ("</function>" in text)
    assert not any(isinstance(piece, Content) for piece in rest)


def test_texts_come_as_they_are_written_and_other_values_once_they_are_whole() -> None:
    reader = OutputParser(format_of(QWEN))
    assert reader.push("<tool_call>\n<function=look>") == [ToolCallStart(0, "look")]
    assert reader.push("\n<parameter=at>\nab") == [ToolCallArguments(0, '{"at": "ab')]
    assert reader.push("c\n") == [ToolCallArguments(0, "c")]
    assert reader.push("d\n</para") == [ToolCallArguments(0, "\\nd")]
    assert reader.push("meter>\n<parameter=") == [ToolCallArguments(0, '"')]
    assert reader.push("many>\n[1, 2") == [ToolCallArguments(0, ', "many": ')]
    assert reader.push("]\n</parameter>\n</function>") == [ToolCallArguments(0, "[1, 2]}")]


@pytest.mark.parametrize("call_format", TAGGED)
def test_what_follows_the_only_call_is_not_read(call_format: CallFormat) -> None:
    texts = {
        QWEN: AT + AT,
        GLM: glm(("at", "x")) * 2,
        MINIMAX: f"<minimax:tool_call>{minimax(('at', 'x')) * 2}</minimax:tool_call>",
    }
    reader = OutputParser(format_of(call_format, has_one_call=True))
    assert joined(reader.push(texts[call_format])) == SAID
    assert (reader.is_over, reader.has_calls, reader.flush()) == (True, True, [])


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("at", "null", "null"),
        ("at", '"x"', '"x"'),
        ("times", " 5 ", 5),
        ("times", "5.5", 5.5),
        ("times", "five", "five"),
        ("times", '"5"', 5),
        ("times", "NaN", "NaN"),
        ("many", "[1, 2]", [1, 2]),
        ("many", "[1, 2", "[1, 2"),
        ("many", '["a\n"]', ["a\n"]),
        ("note", "null", None),
        ("note", "None", None),
        ("note", "5", "5"),
        ("note", "true", "true"),
        ("note", '"x"', '"x"'),
        ("some", "None", None),
        ("some", "7", 7),
        ("kind", "5", "5"),
        ("kind", "null", None),
        ("deep", '{"a": {}}', {"a": {}}),
        ("deep", '"{\\"a\\": 1}"', {"a": 1}),
        ("is_so", "True", True),
        ("is_so", "false", False),
        ("is_so", "yes", "yes"),
        ("unknown", "5", 5),
        ("unknown", "a: 5", "a: 5"),
        ("unknown", '"x"', '"x"'),
        ("unknown", "", ""),
    ],
)
def test_values_have_the_type_of_their_schema(name: str, text: str, value: Any) -> None:
    assert json.loads(ParameterSchemas(LOOK).as_json(name, text)) == value


def test_a_value_that_nests_too_deep_is_a_text() -> None:
    text = "[" * 100_000
    assert json.loads(ParameterSchemas(LOOK).as_json("many", text)) == text


@pytest.mark.parametrize(
    ("schema", "is_text"),
    [
        ({"type": "string", "maxLength": 5}, True),
        ({"enum": ["a", "b"]}, True),
        ({"const": "a"}, True),
        ({"anyOf": [{"type": "string"}, {"const": "a"}]}, True),
        ({"allOf": [{"type": ["string", "null"]}, {"type": "string"}]}, True),
        ({"$ref": "#/$defs/text"}, True),
        ({"$ref": "#/properties/x"}, False),
        ({"$ref": "elsewhere"}, False),
        ({"type": ["string", "null"]}, False),
        ({"type": "text"}, False),
        ({"enum": ["a", 1]}, False),
        ({}, False),
        (True, False),
        (None, False),
    ],
)
def test_only_what_must_be_a_text_is_taken_as_one(schema: Any, is_text: bool) -> None:  # noqa: FBT001
    root = {"properties": {"x": schema}, "$defs": {"text": {"type": "string"}}}
    assert ParameterSchemas(root).is_text("x") is is_text
    assert ParameterSchemas({"additionalProperties": schema, **root}).is_text("x") is is_text
    assert ParameterSchemas({"additionalProperties": {"type": "string"}}).is_text("x")
    assert not ParameterSchemas(schema).is_text("x")


TEXT: Any = {"type": "string"}
REFERRED: Any = {"$defs": {"it": {"properties": {"x": TEXT}}}}
CYCLES: Any = {"T": {"anyOf": [TEXT, *[{"$ref": "#/$defs/T"}] * 30]}}
LAYERS: Any = {f"L{i}": {"anyOf": [{"$ref": f"#/$defs/L{i + 1}"}] * 40} for i in range(7)}


@pytest.mark.parametrize(
    ("schema", "is_text"),
    [
        ({"$ref": "#/$defs/it", **REFERRED}, True),
        ({"allOf": [{"$ref": "#/$defs/it"}, {"properties": {"y": {}}}], **REFERRED}, True),
        ({"anyOf": [{"$ref": "#/$defs/it"}, {"required": ["y"]}], **REFERRED}, True),
        ({"oneOf": [{"properties": {"x": TEXT}}, {"properties": {"x": {"const": "a"}}}]}, True),
        ({"oneOf": [{"properties": {"x": TEXT}}, {"properties": {"x": {"type": "null"}}}]}, False),
        ({"properties": {"x": {}}, "allOf": [{"properties": {"x": TEXT}}]}, True),
        ({"anyOf": [{"additionalProperties": TEXT}, {"additionalProperties": False}]}, True),
        ({"anyOf": [{"additionalProperties": TEXT}, {"additionalProperties": True}]}, False),
        ({"$ref": "#"}, False),
        ({"properties": {"x": TEXT}, "allOf": [{"$ref": "#"}]}, True),
    ],
)
def test_parameters_are_found_through_references_and_branches(schema: Any, is_text: bool) -> None:  # noqa: FBT001
    assert ParameterSchemas(schema).is_text("x") is is_text


@pytest.mark.parametrize(
    ("name", "definitions"),
    [
        ("T", CYCLES),
        ("L0", {**LAYERS, "L7": TEXT}),
        ("W", {"W": {"anyOf": [TEXT] * 10, "allOf": [{"enum": ["a"] * 20_000}]}}),
    ],
)
def test_schemas_whose_paths_are_too_many_are_walked_in_time(name: str, definitions: Any) -> None:
    # The number of paths through these is beyond any computer.
    definitions = json.loads(json.dumps(definitions))
    root: Any = {"properties": {"x": {"$ref": f"#/$defs/{name}"}}, "$defs": definitions}
    schemas = ParameterSchemas(root)
    assert json.loads(schemas.as_json("x", "a")) == "a"
    assert schemas.is_text("x") is (name == "L0")
    inner: Any = {**definitions, "L7": {"properties": {"x": TEXT}}}
    assert ParameterSchemas({"$ref": f"#/$defs/{name}", "$defs": inner}).is_text("x") is (name == "L0")


def test_constants_of_branches_are_texts() -> None:
    kind = {"anyOf": [{"enum": ["5", "null"]}, {"$ref": "#/$defs/rest"}]}
    schemas = ParameterSchemas({"properties": {"x": kind}, "$defs": {"rest": {"enum": [6, None]}}})
    assert [schemas.as_json("x", text) for text in ("5", "null", "6")] == ['"5"', '"null"', "6"]


TEXTS = st.text(max_size=8) | st.text('<>/ \n="abp', max_size=12) | st.sampled_from(sorted(MARKS))
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)


@given(
    texts=st.lists(TEXTS, max_size=2),
    value=st.dictionaries(st.text(max_size=5), VALUES, max_size=3),
    before=st.text(alphabet="ab \n", max_size=5),
)
def test_calls_that_are_written_are_read(texts: list[str], value: dict[str, Any], before: str) -> None:
    arguments: dict[str, Any] = {**dict(zip(("at", "how"), texts, strict=False)), "deep": value}
    pairs = [(name, each if isinstance(each, str) else json.dumps(each)) for name, each in arguments.items()]
    for call_format, text in (
        (QWEN, f"{block(*pairs)}\n{block(*pairs)}"),
        (GLM, f"{glm(*pairs)}\n{glm(*pairs, between='')}"),
        (MINIMAX, f"<minimax:tool_call>{minimax(*pairs)}\n{minimax(*pairs)}</minimax:tool_call>"),
    ):
        message_parts = read(call_format, before + text)
        calls = [(name, json.loads(each)) for name, each in calls_of(message_parts)]
        assert calls == [("look", arguments)] * 2
        content = "".join(piece.text for piece in message_parts if isinstance(piece, Content))
        assert content == (before.rstrip() if before.strip() else "")


FRAGMENTS = (
    *MARKS,
    *("look", "add", "other", "at", "times", ">", '">', "<", "{", "}", "\n", " ", '"', "5", "text "),
    *("<function=look>", "<parameter=at>", "<parameter=times>", "<arg_key>at</arg_key>", '{"at": "x"}'),
    *('<invoke name="look">', '<parameter name="at">', '{"name": "look", "arguments": '),
)


@given(
    fragments=st.lists(st.sampled_from(FRAGMENTS) | st.text(max_size=3), max_size=25),
    call_format=st.sampled_from(TAGGED),
    is_cut=st.booleans(),
    seed=st.integers(0, 2**32),
)
def test_how_the_text_is_cut_changes_nothing(
    fragments: list[str], call_format: CallFormat, seed: int, *, is_cut: bool
) -> None:
    text = "".join(fragments)
    whole = read(call_format, text, is_cut=is_cut)
    random = Random(seed)
    cuts = sorted(random.choices(range(len(text) + 1), k=random.randint(0, 8)))
    pieces = [text[start:stop] for start, stop in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    assert read(call_format, *pieces, is_cut=is_cut) == whole
    assert read(call_format, *text, is_cut=is_cut) == whole
    for name, arguments in calls_of(whole):
        assert name
        if not is_cut and "{" not in text:
            json.loads(arguments)


@pytest.mark.parametrize(
    ("template", "call_format"),
    [
        ("<tool_call>\\n<function=example_function_name>\\n<parameter=a>", QWEN),
        ("<seed:tool_call>\\n<function=f>", QWEN),
        ("'<function=' + name + '>' + arguments | tojson <|python_tag|>", QWEN),
        ("<tool_call>{function-name}\\n<arg_key>{arg-key-1}</arg_key>", GLM),
        ("<minimax:tool_call>\\n<invoke name=", MINIMAX),
    ],
)
def test_the_format_that_a_template_teaches(template: str, call_format: CallFormat) -> None:
    assert template_of(f"{{% if tools %}}{template}{{% endif %}}").answer_format.calls == call_format
