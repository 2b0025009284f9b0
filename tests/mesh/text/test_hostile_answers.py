"""Answers that would cost more than their length or be misread, and templates that mean ill."""

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mesh.text.answer_format import SLOTS, AnswerFormat, CallFormat, Marks, end_of_reasoning
from mesh.text.call_marks import call_marks_of
from mesh.text.format_probes import _common_begin, found_format
from mesh.text.message_parts import Content, MessagePart, calls_of, joined
from mesh.text.output_parser import OutputFormat, OutputParser
from tests.support import call_formats

NAMES = frozenset({"look", "add"})
FUNCTIONARY = replace(call_formats.HERMES, call='<function={"name": "')
FORMATS = (*call_formats.ALL, *call_formats.MORE)
# Linear reading takes less than one.
MOST_SECONDS = 6.0


def output_format(call_format: CallFormat | None, **fields: Any) -> OutputFormat:
    return OutputFormat(call_format, NAMES, **fields)


def read(reading: OutputFormat, *texts: str) -> list[MessagePart]:
    reader = OutputParser(reading)
    parts = [part for text in texts for part in reader.push(text)]
    return joined([*parts, *reader.flush()])


def arguments_of(call_format: CallFormat, text: str) -> Any:
    """Arguments of the only call, as strict JSON."""

    def refuse(name: str) -> None:
        raise ValueError(name)

    ((_, arguments),) = calls_of(read(output_format(call_format), text))
    return json.loads(arguments, parse_constant=refuse)


def nested(text: str) -> str:
    return f'<calls><invoke name="look">[<at>{text}[</at></invoke></calls>'


@pytest.mark.parametrize(
    ("reading", "text"),
    [
        (output_format(None, splits_reasoning=True), " " * 200_000 + "x"),
        (output_format(None, splits_reasoning=True, is_in_reasoning=True), " " * 200_000 + "x"),
        (output_format(None, splits_reasoning=True, is_in_reasoning=True), "x" + " " * 200_000 + "x"),
        (output_format(call_formats.MISTRAL), ("[TOOL_CALLS]" + " " * 250 + "{") * 10),
        (output_format(call_formats.MISTRAL), ("[TOOL_CALLS]look" + "[CALL_ID]" * 20 + "!{") * 10),
        (output_format(call_formats.KIMI), ("<|tool_call_begin|>" + ":a" * 110 + "!{") * 10),
        (output_format(call_formats.NESTED), nested("[<a>" * 25_000 + "[</a>" * 25_000)),
        (output_format(call_formats.NESTED), nested("[<a>1[</a>" * 20_000)),
        (output_format(call_formats.LFM), "<|tool_call_start|>[look(at=" + "[" * 99_000),
        (output_format(call_formats.LFM), "<|tool_call_start|>[look(at=" + "-" * 99_000 + "1)]"),
    ],
)
def test_answers_take_time_in_proportion(reading: OutputFormat, text: str) -> None:
    began = time.process_time()
    read(reading, text)
    assert time.process_time() - began < MOST_SECONDS


@pytest.mark.parametrize(
    ("call_format", "text", "value"),
    [
        (call_formats.LFM, "<|tool_call_start|>[look(at=[1e999, None])]<|tool_call_end|>", "[1e999, None]"),
        (call_formats.LFM, "<|tool_call_start|>[look(at=NaN)]<|tool_call_end|>", "NaN"),
        (call_formats.LFM, "<|tool_call_start|>[look(at={1, 2})]<|tool_call_end|>", "{1, 2}"),
        (call_formats.LFM, "<|tool_call_start|>[look(at={'a': true})]<|tool_call_end|>", {"a": True}),
        (call_formats.LFM, "<|tool_call_start|>[look(at='a\nb')]<|tool_call_end|>", "a\nb"),
        (call_formats.LFM, "<|tool_call_start|>[look(at=\\ud800)]<|tool_call_end|>", "\\ud800"),
        (call_formats.NESTED, nested("1e999"), "1e999"),
        (call_formats.NESTED, nested("[<a>1e999[</a>[<b>[1, 2][</b>"), {"a": "1e999", "b": [1, 2]}),
        (call_formats.NESTED, nested("[<a>1[<a>2[</a>"), "[<a>1[<a>2[</a>"),
        (call_formats.NESTED, nested("[<a>[<a>2[</a>[</a>"), {"a": {"a": 2}}),
        (call_formats.GEMMA, "<|tool_call>call:look{at:1e999,b:NaN}<tool_call|>", "1e999"),
        (call_formats.QWEN, "<tool_call>\n<function=look>\n<parameter=at>\n{'a': [null, True]}\n", None),
    ],
)
def test_what_json_lacks_is_a_text(call_format: CallFormat, text: str, value: Any) -> None:
    expected = {"a": [None, True]} if value is None else value
    assert arguments_of(call_format, text)["at"] == expected


@pytest.mark.parametrize("depth", [300, 5_000, 90_000])
def test_a_value_that_nests_too_deep_for_json_is_a_text(depth: int) -> None:
    value = "[" * depth + "]" * depth
    text = f"<|tool_call_start|>[look(at={value})]<|tool_call_end|>"
    ((_, arguments),) = calls_of(read(output_format(call_formats.LFM), text))
    assert arguments in (f'{{"at": {value}}}', f'{{"at": "{value}"}}')


PIECES = (*"<>[]{}|/=:;,\"'\\ \n.*+?()$^a1é", "tool", "_call", "TOOL_CALLS", "name", "look", "</", "<|", "|>")


@given(
    pieces=st.lists(st.sampled_from(PIECES) | st.text(max_size=2), max_size=40),
    call_format=st.sampled_from(FORMATS),
)
def test_what_is_no_call_is_given_as_it_is(pieces: Sequence[str], call_format: CallFormat) -> None:
    marks = call_marks_of(call_format)
    text = "".join(pieces)
    for mark in (*marks.openings, "{"):
        text = text.replace(mark, "")
    if any(mark in text for mark in (*marks.openings, "{")):
        return
    reading = output_format(call_format)
    assert read(reading, text) == read(reading, *text) == ([Content(text)] if text else [])


@given(pieces=st.lists(st.sampled_from([">>>", ">>>all\n", ">", "all\n", "a", "</s>", " ", "<function="])))
def test_what_the_prompt_ends_with_is_no_part_of_an_answer_however_it_is_cut(pieces: Sequence[str]) -> None:
    text = "".join(pieces)
    reading = output_format(FUNCTIONARY, content=Marks("all\n", ""), end="</s>", primer=">>>")
    whole = read(reading, text)
    assert read(reading, *text) == whole
    behind = text.removeprefix("all\n")
    if not any(mark in behind for mark in (">", "all\n", "</s>", "<function=")):
        assert whole == ([Content(behind)] if behind else [])


# Marks of all kinds: empty ones, beginnings of others, letters, signs of regular expressions, long ones.
MARKS = (
    *(
        "",
        "",
        "a",
        "<",
        "<a",
        "<a>",
        "</a>",
        "<ab>",
        "(",
        ")",
        ".*",
        "\\",
        "[",
        "]",
        "{",
        "}",
        "\n",
        " ",
        "1",
    ),
    *(
        "<|x|>",
        "<|x|><|y|>",
        "[A]",
        "[/A]",
        '"',
        "'",
        ":",
        ",",
        "=",
        ">",
        "</s>",
        "ID-",
        "name",
        "functions.",
    ),
    *("<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<" + "a" * 300 + ">", "(" * 300, " " * 3000),
)


def render_with(marks: Sequence[str], form: int) -> Callable[..., str]:
    """A template whose answers have these marks, and calls of one of several forms."""
    user, said, thought, thought_end, content_end, begin, between, call, name_end, call_end = marks[:10]
    end, turn, key, key_end, value_end, separator, prompt = marks[10:]

    def written(arguments: dict[str, Any]) -> str:
        if form == 0:
            return json.dumps(arguments)
        if form == 1:
            return "{" + ",".join(f"{name}:{key}{value}{key}" for name, value in arguments.items()) + "}"
        if form == 2:
            return separator.join(f"{name}={value!r}" for name, value in arguments.items())
        return separator.join(
            f"{key}{name}{key_end}{value if isinstance(value, str) else json.dumps(value)}{value_end}"
            for name, value in arguments.items()
        )

    def render(messages: Any, _tools: Any, variables: Any, *, adds_prompt: bool) -> str:
        parts = []
        for message in messages:
            if message["role"] == "user":
                parts += [user, message["content"], turn]
                continue
            parts.append(said)
            if "reasoning_content" in message:
                parts += [thought, message["reasoning_content"], thought_end]
            if message["content"]:
                parts += [message["content"], content_end]
            made = [
                call.replace("ID", each["id"])
                + each["function"]["name"]
                + name_end.replace("ID", each["id"])
                + written(each["function"]["arguments"])
                + call_end
                for each in message.get("tool_calls", ())
            ]
            parts += [begin, between.join(made), end] if made else []
            parts.append(turn)
        if adds_prompt:
            parts += [said, thought if variables.get("thinking") else prompt]
        return "".join(parts)

    return render


@given(
    marks=st.lists(st.sampled_from(MARKS), min_size=17, max_size=17),
    form=st.integers(0, 3),
    pieces=st.lists(st.integers(0, 16) | st.sampled_from(["look", "{", "}", '"a"', " ", "x"]), max_size=20),
)
def test_a_format_that_is_found_reads_what_the_template_writes(
    marks: Sequence[str], form: int, pieces: Sequence[int | str]
) -> None:
    render = render_with(marks, form)
    found = found_format(render, "", ("</s>",))
    assert all(len(text) <= 256 for text in found.texts)
    reading = reading_of(found)
    text = "".join(marks[piece] if isinstance(piece, int) else piece for piece in pieces)[:4000]
    assert read(reading, text) == read(reading, *text)
    if not found.is_found:
        return
    arguments = {"at": "other text"}
    called = {"role": "assistant", "content": "", "tool_calls": [{"function": {}}]}
    called["tool_calls"] = [{"id": "i", "function": {"name": "look", "arguments": arguments}}]
    asked = {"role": "user", "content": "question"}
    whole = render([asked, called], [], {}, adds_prompt=False).rpartition("question")[2]
    prompt = render([asked], [], {}, adds_prompt=True)
    shown = prompt.rpartition("question")[2]
    if end_of_reasoning(prompt, found.reasoning) is not None:
        # What the template writes here has no reasoning: it does not go on from this prompt.
        start = len(marks[11] + marks[1])
    else:
        start = len(shown) if whole.startswith(shown) else len(_common_begin(shown, whole))
    # A server reads an answer up to a token that ends it.
    answer = whole[start:].partition("</s>")[0]
    assert calls_of(read(reading, answer))[:1] == [("look", json.dumps(arguments))]


def test_a_mark_of_calls_that_the_prompt_begins_is_no_format() -> None:
    marks = ["", "", "", "", "", "", "", "<", "", "", "", "</s>", "", "", "", "", ""]
    assert found_format(render_with(marks, 0), "", ("</s>",)).is_found
    marks[16] = "<"
    assert not found_format(render_with(marks, 0), "", ("</s>",)).is_found


def reading_of(found: AnswerFormat, **fields: Any) -> OutputFormat:
    given = {"primer": found.primer, "splits_reasoning": True, **fields}
    return output_format(
        found.calls,
        reasoning=found.reasoning,
        content=found.content,
        headers=found.headers,
        end=found.end,
        **given,
    )


def test_texts_with_more_slots_than_any_template_needs_are_no_format() -> None:
    marks = ["", "", "", "", "", "", "", "<c>ID:", ">", "</c>", "", "</s>", "", "", "", "", ""]
    assert found_format(render_with(marks, 0), "", ("</s>",)).is_found
    marks[7] = "<c>" + "ID:" * 3
    found = found_format(render_with(marks, 0), "", ("</s>",))
    assert not found.is_found
    assert not any(slot in text for text in found.texts for slot in SLOTS)
