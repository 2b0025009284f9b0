"""Formats of answers, found by rendering: every template is read back, and so are llama.cpp's test texts."""

import json
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path
from random import Random
from typing import Any, Final

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mesh.text.answer_format import (
    MARK,
    NOTE_FORMAT,
    AnswerFormat,
    CallForm,
    common_begin,
    end_of_reasoning,
    format_told,
)
from mesh.text.chat_template import CHATML, ChatTemplate
from mesh.text.format_probes import found_format
from mesh.text.message_parts import Content, MessagePart, Reasoning, calls_of, joined, knows_tools
from mesh.text.output_parser import OutputFormat, OutputParser
from tests.support.chat_templates import collected_templates, template_of

COLLECTED = collected_templates()
CASES: Final = [
    json.loads(line)
    for line in (Path(__file__).parents[2] / "data" / "chat_cases.jsonl").read_text().splitlines()
]
pytestmark = pytest.mark.skipif(not COLLECTED, reason="no source of llama.cpp: see SPANMESH_LLAMA_CPP")

# Tokens that end answers, in the vocabularies of these models.
ENDS: Final = (
    *("</s>", "<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<end_of_turn>", "<|end_of_text|>", "<|eot|>"),
    *("<｜end▁of▁sentence｜>", "<|END_OF_TURN_TOKEN|>", "<turn|>", "<|tool_response>", "[e~[", "<|call|>"),
    *("<|return|>", "<|calls|>", "<SPECIAL_12>", "<end_of_sentence>", "<seed:eos>", "<sep>", "<|role_end|>"),
    *("<｜hy_eos:opensource｜>", "<|end_of_msg|>", "<|START_OF_TURN_TOKEN|>"),
)
USER: Final = {"role": "user", "content": "questionone"}
PARAMETERS: Final[dict[str, Any]] = {
    "type": "object",
    "properties": {
        "place": {"type": "string", "description": "A place."},
        "count": {"type": "integer", "description": "A number."},
        "deep": {"type": "object", "properties": {}, "description": "An object."},
        "is_so": {"type": "boolean", "description": "Whether it is so."},
    },
    "required": ["place"],
}
FUNCTIONS: Final = {"look_up": PARAMETERS, "find": PARAMETERS}
TOOLS: Final = [
    {"type": "function", "function": {"name": name, "description": "A function.", "parameters": schema}}
    for name, schema in FUNCTIONS.items()
]
OSLO: Final = {"place": "Oslo"}
DEEP: Final = {"place": 'Köln "x" a<b', "count": 7, "is_so": True, "deep": {"k": ["é", 1.5, {"z": "y"}]}}
# Calls, text and reasoning of one answer.
ANSWERS: Final[Mapping[str, tuple[Sequence[tuple[str, Any]], str, str]]] = {
    "call": ([("look_up", OSLO)], "", ""),
    "two calls": ([("look_up", OSLO), ("find", {"count": 3})], "", ""),
    "text and call": ([("look_up", OSLO)], "contentone", ""),
    "reasoning and call": ([("look_up", OSLO)], "", "reason one"),
    "nested": ([("look_up", DEEP)], "", ""),
    "no arguments": ([("find", {})], "", ""),
}
KNOWING: Final = sorted(name for name, path in COLLECTED.items() if knows_tools(path.read_text()))
# Templates that leave calls out, whose text tells of them: they are written into the assistant's text.
SILENT: Final = ("LFM2-8B-A1B", "LFM2.5-Instruct", "ibm-granite-granite-3.3-2B-Instruct")


@cache
def known(name: str) -> tuple[ChatTemplate, AnswerFormat]:
    source = COLLECTED[name].read_text()
    template = template_of(source)
    return template, found_format(template.probed, source, ENDS)


def rendered(template: ChatTemplate, messages: Sequence[Mapping[str, Any]], **variables: Any) -> str | None:
    """What a template writes behind the user's message."""
    adds_prompt = messages[-1]["role"] != "assistant"
    text = template.probed(messages, TOOLS, variables, adds_prompt=adds_prompt)
    return None if text is None else text.rpartition(USER["content"])[2]


def message(
    calls: Sequence[tuple[str, Any]], content: str | None, reasoning: str, *, first: int = 0
) -> dict[str, Any]:
    made = [
        {
            "id": f"{first + number}abcdefgh",
            "type": "function",
            "function": {"name": name, "arguments": arguments},
        }
        for number, (name, arguments) in enumerate(calls)
    ]
    fields = dict.fromkeys(("reasoning_content", "reasoning", "thinking"), reasoning) if reasoning else {}
    return {"role": "assistant", "content": content, "tool_calls": made, **fields}


def answer_to(
    template: ChatTemplate, answer: dict[str, Any], before: Sequence[dict[str, Any]]
) -> tuple[str, str]:
    """An answer as a template writes it, and what it writes ahead of it."""
    text = None
    for content in (answer["content"], None):
        text = rendered(template, [*before, {**answer, "content": content}])
        if text is not None and answer["tool_calls"][0]["function"]["name"] in text:
            break
    assert text is not None
    switches: Iterable[dict[str, Any]] = (
        {},
        *({"enable_thinking": on, "thinking": on} for on in (True, False)),
    )
    prompts = [prompt for each in switches if (prompt := rendered(template, before, **each)) is not None]
    whole = [prompt for prompt in prompts if text.startswith(prompt)]
    if whole:
        return max(whole, key=len), text.removeprefix(max(whole, key=len))
    # The template writes the history otherwise than what is before an answer.
    head = head_of(text, prompts[0])
    return head, text.removeprefix(head)


def head_of(text: str, prompt: str) -> str:
    """What a template writes ahead of an answer, by what it writes behind a prompt."""
    head = common_begin(text, prompt)
    at = head.rfind("<")
    head = head if ">" in head[at:] or at < 0 else head[:at]
    # Some templates give instructions there, which histories leave out.
    mark = MARK.match(text, len(head))
    return head + mark[0] if mark is not None and prompt.endswith(mark[0]) else head


def read(reading: OutputFormat, texts: Iterable[str]) -> list[MessagePart]:
    parser = OutputParser(reading)
    parts = [part for text in texts for part in parser.push(text)]
    return joined([*parts, *parser.flush()])


def format_for(found: AnswerFormat, head: str, text: str, parameters: Mapping[str, Any]) -> OutputFormat:
    marks = found.reasoning[0]
    # Some histories leave out what begins the reasoning, where a prompt ends with it.
    is_open = found.headers is None and marks.end in text and marks.begin not in text.partition(marks.end)[0]
    is_inside = end_of_reasoning(head, found.reasoning) is not None
    return output_format(
        found,
        parameters,
        is_in_reasoning=is_inside or (is_open and not text.startswith(marks.end)),
    )


def output_format(found: AnswerFormat, parameters: Mapping[str, Any], **fields: Any) -> OutputFormat:
    given: dict[str, Any] = {
        "call_format": found.calls if parameters else None,
        "names": frozenset(parameters),
        "parameters": parameters,
        "splits_reasoning": True,
        "primer": found.primer,
        **fields,
    }
    return OutputFormat(
        reasoning=found.reasoning,
        content=found.content,
        headers=found.headers,
        end=found.end,
        **given,
    )


def texts_in(parts: Sequence[MessagePart], kind: type[Content] | type[Reasoning]) -> str:
    return "".join(part.text for part in parts if isinstance(part, kind)).strip()


def check_is_read(found: AnswerFormat, head: str, text: str, answer: dict[str, Any]) -> None:
    for end in ENDS:
        text = text.partition(end)[0]
    reading = format_for(found, head, text, FUNCTIONS)
    parts = read(reading, [text])
    calls = [(name, json.loads(arguments)) for name, arguments in calls_of(parts)]
    written = [call["function"] for call in answer["tool_calls"] if call["function"]["name"] in text]
    assert calls == [(function["name"], function["arguments"]) for function in written], text
    said, thought = texts_in(parts, Content), texts_in(parts, Reasoning)
    content, reasoning = answer["content"] or "", answer.get("reasoning", "")
    # Some templates write the text beside a call as reasoning, and some leave it out.
    assert (said, thought) in {
        (content if content in text else "", reasoning if reasoning in text else ""),
        ("", content),
    }, text
    assert read(reading, text) == parts
    random = Random(text)
    for _ in range(3):
        cuts = sorted(random.choices(range(len(text) + 1), k=5))
        pieces = [text[start:stop] for start, stop in zip([0, *cuts], [*cuts, len(text)], strict=True)]
        assert read(reading, pieces) == parts


@pytest.mark.parametrize("kind", ANSWERS)
@pytest.mark.parametrize("name", KNOWING)
def test_what_a_template_writes_is_read_back(name: str, kind: str) -> None:
    template, found = known(name)
    assert found.is_found
    answer = message(*ANSWERS[kind])
    if rendered(template, [USER, answer]) is None:
        assert kind == "two calls"
        assert template.has_one_call
        return
    head, text = answer_to(template, answer, [USER])
    check_is_read(found, head, text, answer)


@pytest.mark.parametrize("name", KNOWING)
def test_a_second_call_behind_a_result_is_read_back(name: str) -> None:
    template, found = known(name)
    first = message([("look_up", OSLO)], "", "")
    result = {"role": "tool", "tool_call_id": "0abcdefgh", "name": "look_up", "content": "resultone"}
    second = message([("find", DEEP)], "", "", first=1)
    texts = [
        template.probed(
            [USER, {**first, "content": content}, result, {**second, "content": content}],
            TOOLS,
            {},
            adds_prompt=False,
        )
        for content in ("", None)
    ]
    text = next(
        text
        for text in texts
        if text is not None and "resultone" in text and "find" in text.rpartition("resultone")[2]
    )
    behind = text.rpartition("resultone")[2]
    # What the template writes between a result and an answer.
    prompt = template.probed([USER, {**first, "content": ""}, result], TOOLS, {}, adds_prompt=True) or ""
    head = head_of(behind, prompt.rpartition("resultone")[2])
    check_is_read(found, head, behind.removeprefix(head), second)


def test_every_template_that_knows_tools_is_tried() -> None:
    assert len(KNOWING) == 62
    assert all(known(name)[1].is_found for name in KNOWING)
    assert known("LFM2-8B-A1B")[1].calls == known("LFM2.5-8B-A1B")[1].calls


@pytest.mark.parametrize("name", SILENT)
def test_what_only_words_of_a_template_tell_is_read(name: str) -> None:
    found = known(name)[1]
    arguments = "place='Oslo'" if found.calls.form is CallForm.FUNCTION else '{"place": "Oslo"}'
    calls = found.calls
    call = f"{calls.call}look_up{calls.name_end}{arguments}{calls.call_end}"
    text = f"Well. {calls.begin}{call}{calls.separator}{call}{calls.end}"
    parts = read(output_format(found, FUNCTIONS), text)
    assert [json.loads(told) for _, told in calls_of(parts)] == [OSLO, OSLO]
    assert texts_in(parts, Content) == "Well."


def test_no_template_is_refused_as_a_whole() -> None:
    refused = [name for name in COLLECTED if rendered(known(name)[0], [USER]) is None]
    assert refused == []


def told(parts: Sequence[MessagePart]) -> tuple[str, str, list[tuple[str, Any]]]:
    calls = []
    for name, arguments in calls_of(parts):
        try:
            calls.append((name, json.loads(arguments or "{}")))
        except ValueError:
            calls.append((name, arguments.replace(" ", "")))
    return texts_in(parts, Content), texts_in(parts, Reasoning), calls


def differs(case: Mapping[str, Any]) -> tuple[Any, Any] | None:
    """What is read in a case and what it means; None if they are equal."""
    template, found = known(case["template"])
    tools = [
        {"type": "function", "function": {"name": name, "description": "x", "parameters": schema}}
        for name, schema in case["tools"].items()
    ]
    switch = {"enable_thinking": case["thinks"], "thinking": case["thinks"]}
    prompt = template.probed([USER], tools, switch, adds_prompt=True) or ""
    content, reasoning = case["content"], case["reasoning"]
    is_inside = end_of_reasoning(prompt, found.reasoning) is not None
    if case["prefill"] is not None:
        said, thought = case["prefill"]
        content, is_inside = content.removeprefix(said), not said
        reasoning = "" if said else reasoning.removeprefix(thought)
    parser = OutputParser(
        output_format(
            found,
            case["tools"],
            primer=found.primer if case["prefill"] is None else "",
            splits_reasoning=case["splits"],
            is_in_reasoning=is_inside,
            shows_think_marks=not case["splits"],
        )
    )
    text = case["text"]
    for end in ENDS:
        text = text.removesuffix(end)
    parts = [part for char in text for part in parser.push(char)]
    parts = joined([*parts, *parser.flush(is_cut=case["is_cut"])])
    calls = []
    for name, arguments in case["calls"]:
        try:
            calls.append((name, json.loads(arguments or "{}")))
        except ValueError:
            calls.append((name, arguments.replace(" ", "")))
    meant = (content.strip(), reasoning.strip(), calls)
    return None if told(parts) == meant else (told(parts), meant)


MARKED: Final = "where reasoning is not split, the mark that the prompt ends with is no part of the answer"
FENCED: Final = "an answer that is held to a schema has no fence around it"
# Texts of llama.cpp's tests that mean something else here, by their beginnings, and why.
DIFFERENT: Final = {
    ("Qwen3.5-4B", "I'm"): MARKED,
    ("NVIDIA-Nemotron-3-Nano-30B-A3B-BF16", "I'm"): MARKED,
    ("Cohere2MoE", "I'm"): MARKED,
    (
        "Qwen3.5-4B",
        "<think>",
    ): "a mark that the model repeats behind the prompt's is no part of its reasoning",
    ("mistralai-Ministral-3-14B-Reasoning-2512", "[THINK]I need"): FENCED,
    ("meta-llama-Llama-3.1-8B-Instruct", "```json"): FENCED,
    ("google-gemma-4-31B-it", "<|channel><|channel>"): "a mark of reasoning without its word is content",
    ("inclusionai-ling-3.0-flash", "Hello, world!"): "an answer goes on with the reasoning that it continues",
    ("MiniMax-M3", "<mm:think>Union string"): "tags within a value are an object, as elsewhere",
    ("CohereForAI-c4ai-command-r-plus-tool_use", "<|CHATBOT_TOKEN|>"): "the prompt ends with this token",
    ("Apriel-1.6-15b-Thinker-fixed", "I'm"): "the words that the prompt ends with are its mark of reasoning",
}


def test_texts_of_llama_cpps_chat_tests_mean_what_they_mean_there() -> None:
    different = [case for case in CASES if differs(case) is not None]
    strange = [
        (case["template"], case["text"], differs(case))
        for case in different
        if not any(case["template"] == name and case["text"].startswith(begin) for name, begin in DIFFERENT)
    ]
    assert strange == []
    assert len(different) <= len(CASES) * 0.05


def test_a_format_goes_from_process_to_process() -> None:
    for name in COLLECTED:
        found = known(name)[1]
        assert format_told(json.loads(json.dumps(found.told()))) == found


WORDS: Final = (
    "questionone",
    "contentone",
    "reasonone",
    "alphaone",
    "betatwo",
    "keyone",
    "keytwo",
    "textone",
)


@given(
    fragments=st.lists(
        st.sampled_from([*WORDS, *'<>[]{}":,=\n/', "<a>", "</a>", "1abcdefgh", "2abcdefgh", "<|b|>", "name"]),
        max_size=40,
    ),
    seed=st.integers(0, 2**32),
)
def test_whatever_a_template_writes_a_format_is_told(fragments: list[str], seed: int) -> None:
    """Without an error, and one that a parser takes."""
    random = Random(seed)

    def render(messages: Any, tools: Any, variables: Any, *, adds_prompt: bool) -> str:
        said = "".join(random.sample(fragments, len(fragments)))
        return (
            f"questionone{said}{'' if adds_prompt else 'contentone alphaone reasonone'}{messages[-1]['role']}"
        )

    found = found_format(render, "", ("</s>",))
    reading = format_for(found, "", "", FUNCTIONS)
    text = "".join(fragments)
    assert read(reading, text) == read(reading, [text])


def test_a_template_without_tools_has_the_format_of_our_note() -> None:
    found = template_of(CHATML).answer_format
    assert (found.calls, found.is_found) == (NOTE_FORMAT, False)
    assert found.calls.form is CallForm.OBJECT
