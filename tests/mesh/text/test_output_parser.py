"""Answers told apart into content, reasoning and calls: by format, and however the text is cut."""

import json
import re
from random import Random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mesh.text.answer_format import CallFormat
from mesh.text.message_parts import (
    Content,
    MessagePart,
    Reasoning,
    ToolCallArguments,
    ToolCallStart,
    calls_of,
    joined,
    knows_tools,
)
from mesh.text.output_parser import OutputFormat, OutputParser
from tests.support import call_formats
from tests.support.chat_templates import template_of

INSIDE = OutputFormat(splits_reasoning=True, is_in_reasoning=True)
HERMES = OutputFormat(call_formats.HERMES, frozenset({"look", "add"}), splits_reasoning=True)
LLAMA = OutputFormat(call_formats.LLAMA, frozenset({"look", "add"}), splits_reasoning=True)
MISTRAL = OutputFormat(call_formats.MISTRAL, frozenset({"look", "add"}), splits_reasoning=True)
PLAIN = OutputFormat(splits_reasoning=True)


def read(output_format: OutputFormat, *texts: str) -> list[MessagePart]:
    reader = OutputParser(output_format)
    message_parts = [piece for text in texts for piece in reader.push(text)]
    return joined([*message_parts, *reader.flush()])


def call(index: int, name: str, arguments: str) -> list[MessagePart]:
    return [ToolCallStart(index, name), ToolCallArguments(index, arguments)]


LOOK = '{"name": "look", "arguments": {"at": "a } \\" <tool_call> ]", "n": [1, {}]}}'
LOOK_ARGUMENTS = '{"at": "a } \\" <tool_call> ]", "n": [1, {}]}'

CASES: list[tuple[OutputFormat, str, list[MessagePart]]] = [
    # Hermes
    (HERMES, "Just text <b> ", [Content("Just text <b> ")]),
    (HERMES, f"<tool_call>\n{LOOK}\n</tool_call>", call(0, "look", LOOK_ARGUMENTS)),
    (
        HERMES,
        f'I look.\n\n<tool_call>{LOOK}</tool_call>\n<tool_call>{{"arguments": {{"a": 1}}, "name": "add"}}\n',
        [Content("I look."), *call(0, "look", LOOK_ARGUMENTS), *call(1, "add", '{"a": 1}')],
    ),
    (HERMES, '<tool_call>{"name": "look"}</tool_call>', call(0, "look", "{}")),
    (HERMES, '<tool_call>{"name": "look", "parameters": {"a": 1}, "id": [1]}', call(0, "look", '{"a": 1}')),
    (HERMES, '<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}', call(0, "f", '{"a": 1}')),
    (HERMES, "<tool_call>no JSON</tool_call>", [Content("<tool_call>no JSON</tool_call>")]),
    (HERMES, '<tool_call>{"name": 5}</tool_call>', [Content('<tool_call>{"name": 5}</tool_call>')]),
    (HERMES, '<tool_call>{"name": ""}', [Content('<tool_call>{"name": ""}')]),
    (HERMES, '<tool_call>{"x": 1}', [Content('<tool_call>{"x": 1}')]),
    (HERMES, f"<tool_call><tool_call>{LOOK}", [Content("<tool_call>"), *call(0, "look", LOOK_ARGUMENTS)]),
    (
        HERMES,
        f"<tool_call>{LOOK}<tool_call>{LOOK}",
        call(0, "look", LOOK_ARGUMENTS) + call(1, "look", LOOK_ARGUMENTS),
    ),
    (HERMES, f"<tool_call>{LOOK}</tool_call> Done.", [*call(0, "look", LOOK_ARGUMENTS), Content(" Done.")]),
    (HERMES, '<tool_call>{"name": "look" oops', [*call(0, "look", "{}"), Content("oops")]),
    (HERMES, "</tool_call> a", [Content("</tool_call> a")]),
    # braces too few or too many
    (
        HERMES,
        '<tool_call>{"name": "look", "arguments": {"at": 1}\n</tool_call>',
        call(0, "look", '{"at": 1}'),
    ),
    (
        HERMES,
        '<tool_call>{"name": "look", "arguments": {"at": 1}}}\n</tool_call>',
        call(0, "look", '{"at": 1}'),
    ),
    (HERMES, f"<tool_call>{LOOK}\n}}\n}}", call(0, "look", LOOK_ARGUMENTS)),
    (
        HERMES,
        f'<tool_call>{{"name": "add", "arguments": {{}}</tool_call>\n<tool_call>{LOOK}}}</tool_call> Done.',
        [*call(0, "add", "{}"), *call(1, "look", LOOK_ARGUMENTS), Content(" Done.")],
    ),
    (
        HERMES,
        f'<tool_call>{{"name": "add", "arguments": {{"a": [1\n</tool_call><tool_call>{LOOK}',
        call(0, "add", '{"a": [1\n]}') + call(1, "look", LOOK_ARGUMENTS),
    ),
    (HERMES, '<tool_call>{"name": "add", "arguments": </tool_call>', call(0, "add", "{}")),
    (HERMES, '<tool_call>{"name": "add" oops</tool_call> a', [*call(0, "add", "{}"), Content("oops a")]),
    (HERMES, '<tool_call>{"x": {<b>}</tool_call>', [Content('<tool_call>{"x": {<b>}</tool_call>')]),
    (
        HERMES,
        f"<tool_call>{LOOK}</tool_call></tool_call>",
        [*call(0, "look", LOOK_ARGUMENTS), Content("</tool_call>")],
    ),
    (LLAMA, '{"name": "look", "parameters": {}}}', call(0, "look", "{}")),
    (
        MISTRAL,
        f"[TOOL_CALLS][{LOOK}}}, {LOOK}]",
        call(0, "look", LOOK_ARGUMENTS) + call(1, "look", LOOK_ARGUMENTS),
    ),
    (MISTRAL, '[TOOL_CALLS]look[ARGS]{"at": 1}}', call(0, "look", '{"at": 1}')),
    # strings that JSON wants escaped
    (
        HERMES,
        '<tool_call>{"name": "look", "arguments": {\n"a": "x\ny\t\x00", "b\n": 1}}</tool_call>',
        call(0, "look", '{\n"a": "x\\ny\\t\\u0000", "b\\n": 1}'),
    ),
    (
        HERMES,
        r"""<tool_call>{"name": "look", "arguments": {"a": "\d\n\" \' \\ \u00e9 \users \u12"}}""",
        call(0, "look", r"""{"a": "\\d\n\" \\' \\ \u00e9 \\users \\u12"}"""),
    ),
    (
        HERMES,
        '<tool_call>{"name": "look", "arguments": {"a": "make \\\n  all"}}',
        call(0, "look", '{"a": "make \\\\\\n  all"}'),
    ),
    (HERMES, '<tool_call>{"arguments": {"a": "x\n"}, "name": "f"}', call(0, "f", '{"a": "x\\n"}')),
    (
        HERMES,
        '<tool_call>{"name": "f", "arguments": "{\\"a\\": \\"x\\ny\\"}"}',
        call(0, "f", '{"a": "x\\ny"}'),
    ),
    (
        HERMES,
        '<tool_call>{"name": "f", "arguments": "{\\"a\\": \\"x\ny\\"}"}',
        call(0, "f", '{"a": "x\\ny"}'),
    ),
    (HERMES, '<tool_call>{"arguments": "{\\"a\\": 1}", "name": "f"}', call(0, "f", '{"a": 1}')),
    (HERMES, '<tool_call>{"name": "f", "arguments": ""}', call(0, "f", "{}")),
    (LLAMA, '{"name": "look", "parameters": {"at": "x\ny"}}', call(0, "look", '{"at": "x\\ny"}')),
    (MISTRAL, '[TOOL_CALLS]look[ARGS]{"at": "x\ny"}', call(0, "look", '{"at": "x\\ny"}')),
    # cut off by the limit
    (
        HERMES,
        '<tool_call>{"name": "look", "arguments": {"at',
        [ToolCallStart(0, "look"), ToolCallArguments(0, '{"at')],
    ),
    (HERMES, '<tool_call>{"na', [Content('<tool_call>{"na')]),
    (HERMES, "Hm <tool_c", [Content("Hm <tool_c")]),
    # Llama
    (LLAMA, '{"name": "look", "parameters": {"at": "x"}}', call(0, "look", '{"at": "x"}')),
    (LLAMA, ' \n{"type": "function", "name": "add", "parameters": {}}', call(0, "add", "{}")),
    (LLAMA, '<|python_tag|>{"name": "other", "parameters": {"a": 1}}', call(0, "other", '{"a": 1}')),
    (
        LLAMA,
        '{"name": "look", "parameters": {}}; {"name": "add", "parameters": {"a": 2}}',
        call(0, "look", "{}") + call(1, "add", '{"a": 2}'),
    ),
    (LLAMA, '{"name": "Ada", "age": 5}', [Content('{"name": "Ada", "age": 5}')]),
    (LLAMA, '{"answer": 5}', [Content('{"answer": 5}')]),
    (LLAMA, 'See {"name": "look", "parameters": {}}', [Content('See {"name": "look", "parameters": {}}')]),
    (LLAMA, "<|python_tag|>print(1)", [Content("<|python_tag|>print(1)")]),
    # Mistral
    (MISTRAL, f"[TOOL_CALLS][{LOOK}]", call(0, "look", LOOK_ARGUMENTS)),
    (
        MISTRAL,
        f"[TOOL_CALLS] [{LOOK}, {LOOK}]",
        call(0, "look", LOOK_ARGUMENTS) + call(1, "look", LOOK_ARGUMENTS),
    ),
    (MISTRAL, 'I look. [TOOL_CALLS]look[ARGS]{"at": 1}', [Content("I look."), *call(0, "look", '{"at": 1}')]),
    (
        MISTRAL,
        '[TOOL_CALLS]look[CALL_ID]abc123def[ARGS]{"at": 1}[TOOL_CALLS]add{"a": 1}',
        call(0, "look", '{"at": 1}') + call(1, "add", '{"a": 1}'),
    ),
    (MISTRAL, "[TOOL_CALLS] nothing", [Content("[TOOL_CALLS] nothing")]),
    (MISTRAL, "[TOOL] calls [1]", [Content("[TOOL] calls [1]")]),
    # Reasoning
    (PLAIN, "<think>\nHm. </think>\n\nYes.", [Reasoning("Hm."), Content("Yes.")]),
    (PLAIN, "[THINK]Hm.[/THINK]Yes.", [Reasoning("Hm."), Content("Yes.")]),
    (PLAIN, " <think>a <b> c", [Reasoning("a <b> c")]),
    (PLAIN, "<think>\n\n</think>\n\nYes", [Content("Yes")]),
    (PLAIN, "<thin", [Content("<thin")]),
    (PLAIN, "  <b>", [Content("  <b>")]),
    (PLAIN, "Yes. <think>no</think>", [Content("Yes. <think>no</think>")]),
    (INSIDE, "Hm.\n</think>\nYes", [Reasoning("Hm."), Content("Yes")]),
    (INSIDE, "<think>Hm.</think>Yes", [Reasoning("Hm."), Content("Yes")]),
    (INSIDE, " <th", [Reasoning("<th")]),
    (OutputFormat(), "<think>a</think><tool_call>{}", [Content("<think>a</think><tool_call>{}")]),
    (HERMES, f"<think>{LOOK}</think><tool_call>{LOOK}", [Reasoning(LOOK), *call(0, "look", LOOK_ARGUMENTS)]),
]


@pytest.mark.parametrize(("reading", "text", "said"), CASES)
def test_what_is_said(reading: OutputFormat, text: str, said: list[MessagePart]) -> None:
    assert read(reading, text) == said


@pytest.mark.parametrize(("reading", "text", "said"), CASES)
def test_a_character_at_a_time(reading: OutputFormat, text: str, said: list[MessagePart]) -> None:
    assert read(reading, *text) == said


FRAGMENTS = (
    *("<tool_call>", "</tool_call>", "[TOOL_CALLS]", "<|python_tag|>", "[ARGS]", "[CALL_ID]"),
    *("<think>", "</think>", "{", "}", "[", "]", '"', ":", ",", ";", " ", "\n", "\\", "<", "1", "é", "text "),
    *("name", "arguments", "parameters", "look", '"name"', '"look"', "\\u0", "\\d", "\t"),
    *('{"name": "look", "arguments": ', '{"name": "add", "parameters": {"a": 1}}'),
    *("<|tool_call_begin|>", "functions.look:0", "<|tool_call_end|>", "<|tool_call>", "call:look", '<|"|>'),
    *("<|tool_call_start|>[", "look(a=1", "look(", "='", "'", ")", "]<|tool_call_end|>", "<|tools_prefix|>["),
    *(
        "<｜DSML｜tool_calls>",
        '<｜DSML｜invoke name="look">',
        '<｜DSML｜parameter name="a"',
        ' string="true">',
    ),
    *(
        "</｜DSML｜parameter>",
        "</｜DSML｜invoke>",
        "<calls>",
        '<invoke name="look">',
        "[<a>",
        "[</a>",
        "[<item>",
    ),
    *("[</item>", "</invoke>", "</calls>", "<seed:tool_call>", "<function=look>", "<parameter=a>"),
)


@given(
    fragments=st.lists(st.sampled_from(FRAGMENTS) | st.text(max_size=3), max_size=25),
    call_format=st.sampled_from([None, *call_formats.ALL, *call_formats.MORE]),
    in_reasoning=st.booleans(),
    has_one_call=st.booleans(),
    seed=st.integers(0, 2**32),
)
def test_how_the_text_is_cut_changes_nothing(
    fragments: list[str],
    call_format: CallFormat | None,
    seed: int,
    *,
    in_reasoning: bool,
    has_one_call: bool,
) -> None:
    text = "".join(fragments)
    output_format = OutputFormat(
        call_format,
        frozenset({"look", "add"}),
        has_one_call=has_one_call,
        splits_reasoning=True,
        is_in_reasoning=in_reasoning,
    )
    whole = read(output_format, text)
    random = Random(seed)
    cuts = sorted(random.choices(range(len(text) + 1), k=random.randint(0, 8)))
    pieces = [text[start:stop] for start, stop in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    assert read(output_format, *pieces) == whole
    assert read(output_format, *text) == whole
    calls = [piece for piece in whole if isinstance(piece, ToolCallStart)]
    assert [each.index for each in calls] == list(range(len(calls)))
    if has_one_call:
        assert len(calls) <= 1


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)


@given(
    arguments=st.lists(st.dictionaries(st.text(max_size=5), VALUES, max_size=3), min_size=1, max_size=3),
    before=st.text(alphabet="ab \n", max_size=5),
    is_ascii=st.booleans(),
    indent=st.sampled_from([None, 2]),
)
def test_calls_that_are_written_are_read(
    arguments: list[dict[str, Any]], before: str, indent: int | None, *, is_ascii: bool
) -> None:
    def written(value: dict[str, Any], key: str) -> str:
        return json.dumps({"name": "look", key: value}, ensure_ascii=is_ascii, indent=indent)

    hermes = "\n".join(f"<tool_call>\n{written(each, 'arguments')}\n</tool_call>" for each in arguments)
    mistral = f"[TOOL_CALLS][{', '.join(written(each, 'arguments') for each in arguments)}]"
    llama = "; ".join(written(each, "parameters") for each in arguments)
    for output_format, text in ((HERMES, before + hermes), (MISTRAL, before + mistral), (LLAMA, llama)):
        message_parts = read(output_format, text)
        assert [piece.text for piece in message_parts if isinstance(piece, Content)] == (
            [before.rstrip()] if before.strip() and output_format is not LLAMA else []
        )
        assert sum(isinstance(piece, ToolCallStart) for piece in message_parts) == len(arguments)
        found = [json.loads(piece.text) for piece in message_parts if isinstance(piece, ToolCallArguments)]
        assert found == arguments


def unescaped(json_text: str) -> str:
    """The text with control characters as they are, where JSON has them as escapes."""
    return re.sub(
        r"\\u00[01][0-9a-f]|\\.",
        lambda found: found[0] if found[0] in {r"\"", r"\\"} else json.loads(f'"{found[0]}"'),
        json_text,
    )


@given(arguments=st.dictionaries(st.text(max_size=5), st.text('a\\u"/\n\t\x00\x1f', max_size=9), max_size=3))
def test_control_characters_in_strings_are_escaped(arguments: dict[str, str]) -> None:
    written = unescaped(json.dumps({"name": "look", "arguments": arguments}, ensure_ascii=False))
    (found,) = calls_of(read(HERMES, f"<tool_call>{written}</tool_call>"))
    assert json.loads(found[1]) == arguments


def test_the_name_comes_before_the_arguments_are_complete() -> None:
    reader = OutputParser(HERMES)
    assert reader.push('<tool_call>{"name": "look"') == [ToolCallStart(0, "look")]
    assert reader.push(', "arguments": {"a"') == [ToolCallArguments(0, '{"a"')]
    assert reader.push(": 1") == [ToolCallArguments(0, ": 1")]
    assert not reader.is_over


def test_what_follows_the_only_call_is_not_read() -> None:
    output_format = OutputFormat(call_formats.HERMES, frozenset(), has_one_call=True)
    reader = OutputParser(output_format)
    assert joined(reader.push(f"Well. <tool_call>{LOOK}</tool_call> And <tool_call>{LOOK}")) == [
        Content("Well."),
        *call(0, "look", LOOK_ARGUMENTS),
    ]
    assert (reader.is_over, reader.has_calls, reader.flush()) == (True, True, [])


def test_a_thousand_calls_in_a_row() -> None:
    text = "; ".join(['{"name": "add", "parameters": {}}'] * 1000)
    assert sum(isinstance(piece, ToolCallStart) for piece in read(LLAMA, text)) == 1000


@pytest.mark.parametrize(
    ("template", "knows", "call_format"),
    [
        ("{{ messages }}", False, call_formats.HERMES),
        ("{{ mytools }}", False, call_formats.HERMES),
        ("{% if tools %}<tool_call>{% endif %}", True, call_formats.HERMES),
        ("{% if tools %}[TOOL_CALLS]{% endif %}", True, call_formats.MISTRAL),
        ('{% if tools %}<|python_tag|>{"name": {% endif %}', True, call_formats.LLAMA),
        ('{% if tools %}{"name": "", "parameters": {}}{% endif %}', True, call_formats.LLAMA),
        ("{% if tools %}{{ tools }}{% endif %}", True, call_formats.HERMES),
    ],
)
def test_the_format_that_a_template_teaches(template: str, knows: bool, call_format: CallFormat) -> None:  # noqa: FBT001
    assert knows_tools(template) is knows
    assert template_of(template).answer_format.calls == call_format
