"""Format of answers, found by rendering conversations that differ in one thing, and comparing what comes out."""

from __future__ import annotations

import json
import os.path
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from mesh.text.answer_format import (
    CALL_ID,
    INDEX,
    KEY,
    NAME,
    NUMBER,
    AnswerFormat,
    ArgumentTags,
    CallForm,
    CallFormat,
    Headers,
    Marks,
)

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from typing import Protocol

    class Render(Protocol):
        """Returns the prompt of a conversation, or None if the template refuses it."""

        def __call__(
            self,
            messages: Sequence[Mapping[str, Any]],
            tools: Sequence[Mapping[str, Any]],
            variables: Mapping[str, Any],
            *,
            adds_prompt: bool,
        ) -> str | None: ...


# Words that no template has.
_ASKED: Final = "questionone"
_SAID: Final = "contentone"
_THOUGHT: Final = "reasonone"
_ONE: Final = "alphaone"
_TWO: Final = "betatwo"
_KEY: Final = "keyone"
_OTHER_KEY: Final = "keytwo"
_TEXT: Final = "textone"
_IDS: Final = ("1abcdefgh", "2abcdefgh")
_VALUES: Final[Mapping[str, Any]] = {
    "string": _TEXT,
    "integer": 7364951,
    "number": 1.5,
    "boolean": True,
    "null": None,
    "object": {_OTHER_KEY: _TEXT},
    "array": [_TEXT, _TEXT],
}
_MARK: Final = re.compile(r"<[^<>\n]{1,60}>|\[/?[A-Z_]{2,30}\]")
_CUT_MARK: Final = re.compile(r"<[^<>\n]{0,60}$|\[/?[A-Z_]*$")
# What ends an answer, where it differs with what the answer is.
_ENDS: Final = ("<|eom_id|>", "<|eot_id|>", "<|eot|>", "<|call|>", "<|calls|>", "<|return|>", "<|tool_response>")
DEFAULT_REASONING: Final = (Marks("<think>", "</think>"), Marks("[THINK]", "[/THINK]"))
"""Marks of reasoning of templates that write none."""
_MOST_BEGIN_CHARS: Final = 60


def _tool(name: str) -> dict[str, Any]:
    properties = {_KEY: {"type": "string", "description": "x"}}
    parameters = {"type": "object", "properties": properties, "required": []}
    return {"type": "function", "function": {"name": name, "description": "x", "parameters": parameters}}


_TOOLS: Final = (_tool(_ONE), _tool(_TWO))


class _Probes:
    """Renders the assistant's message of a conversation, as what a template writes behind the user's."""

    def __init__(self, render: Render) -> None:
        self._render = render
        self._no_text: str | None = ""

    def prompt(self, **variables: Any) -> str | None:
        return self._behind([{"role": "user", "content": _ASKED}], variables, adds_prompt=True)

    def said(self, *, thought: bool) -> str | None:
        return self._answer({"content": _SAID}, thought=thought)

    def called(self, *calls: Mapping[str, Any], thought: bool = False) -> str | None:
        """Some calls, of the first function and then the second, each with the arguments that are given."""
        made = [
            {"id": call_id, "type": "function", "function": {"name": name, "arguments": dict(arguments)}}
            for name, call_id, arguments in zip((_ONE, _TWO), _IDS, calls, strict=False)
        ]
        for no_text in (self._no_text, None):
            # Some templates write calls only where there is no content at all.
            text = self._answer({"content": no_text, "tool_calls": made}, thought=thought)
            if text is not None and _ONE in text:
                self._no_text = no_text
                return text
        return None

    def _answer(self, fields: Mapping[str, Any], *, thought: bool) -> str | None:
        names = ("reasoning_content", "reasoning", "thinking") if thought else ()
        message = {"role": "assistant", **fields, **dict.fromkeys(names, _THOUGHT)}
        return self._behind([{"role": "user", "content": _ASKED}, message], {}, adds_prompt=False)

    def _behind(
        self, messages: Sequence[Mapping[str, Any]], variables: Mapping[str, Any], *, adds_prompt: bool
    ) -> str | None:
        text = self._render(messages, _TOOLS, variables, adds_prompt=adds_prompt)
        return None if text is None or _ASKED not in text else text.rpartition(_ASKED)[2]


def found_format(render: Render) -> AnswerFormat | None:
    """Format of the answers of a model, by its chat template; None where calls are not found.

    Args:
        render: Renders a conversation.
    """
    probes = _Probes(render)
    said = probes.said(thought=False)
    prompts = [prompt for prompt in _prompts(probes) if prompt is not None]
    if said is None or _SAID not in said or not prompts:
        return None
    called = probes.called({_KEY: _TEXT})
    thoughts = [
        text
        for text in (probes.said(thought=True), probes.called({_KEY: _TEXT}, thought=True))
        if text is not None and _THOUGHT in text
    ]
    head = _head(prompts, [said, *thoughts, *([] if called is None else [called])])
    reasoning, content = _marks(head, prompts, said, thoughts, called)
    if called is None:
        return None
    calls, primer = _calls(probes, called, head, _behind(said, called), reasoning, content)
    return AnswerFormat(calls, reasoning, content, primer=primer)


def _prompts(probes: _Probes) -> list[str | None]:
    switched = [probes.prompt(enable_thinking=on, thinking=on) for on in (True, False)]
    return [probes.prompt(), *switched]


def _head(prompts: Sequence[str], answers: Sequence[str]) -> str:
    """What is before each answer, whatever the answer is."""
    texts = [text[: min(at for at in map(text.find, (_SAID, _THOUGHT, _ONE)) if at >= 0)] for text in answers]
    texts.append(prompts[0])
    head = os.path.commonprefix(texts)
    # One that has a word of its own behind the user's message says nothing.
    texts += [prompt for prompt in prompts[1:] if os.path.commonprefix([prompt, head])]
    head = _whole_marks(os.path.commonprefix(texts))
    if head.endswith(">") and any(text.startswith(head) and text[len(head) : len(head) + 1].isalpha() for text in prompts):
        head = head[: head.rindex("<")]
    return head


def _whole_marks(text: str) -> str:
    """A text without the part of a mark at its end."""
    found = _CUT_MARK.search(text)
    return text if found is None else text[: found.start()]


def _common_begin(first: str, second: str) -> str:
    return _whole_marks(os.path.commonprefix([first, second]))


def _common_end(first: str, second: str) -> str:
    return os.path.commonprefix([first[::-1], second[::-1]])[::-1]


def _behind(said: str, called: str | None) -> tuple[str, str]:
    """What is behind content, and of that what is behind every answer."""
    behind = said.rpartition(_SAID)[2]
    if called is None:
        return "", behind
    behind, called = behind.rstrip(), called.rstrip()
    tail = _common_end(behind, called)
    before = called.removesuffix(tail)
    if (_CUT_MARK.search(before) is not None or before[-1:].isalnum()) and ">" in tail:
        # The marks end alike.
        tail = tail[tail.index(">") + 1 :]
    return _until_end(behind.removesuffix(tail)).strip(), tail


def _until_end(text: str) -> str:
    return text[: min((at for at in map(text.find, _ENDS) if at >= 0), default=len(text))]


def _marks(
    head: str, prompts: Sequence[str], said: str, thoughts: Sequence[str], called: str | None
) -> tuple[tuple[Marks, ...], Marks]:
    """Marks of reasoning and of content."""
    before = said[len(head) : said.index(_SAID)]
    openings = [prompt[len(head) :].strip() for prompt in prompts if prompt.startswith(head)]
    reasoning = DEFAULT_REASONING
    if thoughts:
        text = thoughts[0]
        begin, _, behind = text[len(head) :].partition(_THOUGHT)
        begin = begin.strip() or _begun(head, openings, behind)
        is_whole = _SAID in behind
        end = behind.partition(_SAID)[0] if is_whole else _MARK.findall(behind)[0]
        own = next((each for each in openings if _is_own(each, before, begin, end)), "")
        own = own or before.rpartition(end.strip())[2].strip()
        if is_whole:
            end = end.removesuffix(own)
        reasoning = (Marks(begin, end.strip()),)
    for each in reasoning:
        before = before.rpartition(each.end)[2]
    begin = before.strip()
    if not begin or prompts[0].rstrip().endswith(begin):
        return reasoning, Marks("", "")
    return reasoning, Marks(begin if begin.endswith((">", "]")) else before, _behind(said, called)[0])


def _is_own(opening: str, before: str, begin: str, end: str) -> bool:
    """Whether a prompt ends with what begins content, and neither begins nor ends reasoning."""
    return opening != "" and before.endswith(opening) and begin not in opening and not end.strip().startswith(opening)


def _begun(head: str, openings: Sequence[str], behind: str) -> str:
    """The mark of reasoning that is a part of the prompt."""
    last = next(reversed(_MARK.findall(head)), "")
    if last and head.rstrip().endswith(last) and f"{last[0]}/{last[1:]}" in behind:
        return last
    return next((each for each in openings if 0 < len(each) < _MOST_BEGIN_CHARS), "")


@dataclass(frozen=True)
class _Written:
    """A call as a template writes it."""

    before: str
    """What is before the name."""
    middle: str
    """What is between the name and the arguments."""
    behind: str
    """What is behind the arguments."""
    form: CallForm
    quote: str = '"'


def _written(text: str, name: str, key: str, value: str) -> tuple[int, int, int, int, CallForm, str] | None:
    """Where name and arguments begin and end."""
    key_at = text.find(key, text.index(name))
    if key_at < 0:
        return None
    name_at = text.rindex(name, 0, key_at)
    start = name_at + len(name)
    for form, pattern in (
        (CallForm.NAMED, rf'\{{\s*"{key}"\s*:\s*(")\s*{value}"\s*\}}'),
        (CallForm.NAMED, rf"\{{{key}:(\S*?){value}\1\}}"),
        (CallForm.FUNCTION, rf"{key}=(['\"]){value}\1"),
    ):
        found = re.compile(pattern).search(text, start)
        if found is not None and found.start() <= key_at:
            is_object = re.search(r'\{[^{}]*"$', text[:name_at]) and text[start] == '"'
            form = CallForm.OBJECT if is_object else form
            return name_at, start, found.start(), found.end(), form, found[1]
    value_at = text.find(value, key_at)
    return None if value_at < 0 else (name_at, start, key_at, value_at + len(value), CallForm.TAGGED, '"')


def _calls(probes, called, head, behind, reasoning, content):
    ends = behind[1]
    at = _written(called, _ONE, _KEY, _TEXT)
    if at is None:
        return None, ""
    name_at, name_stop, args_at, args_stop, form, quote = at
    before, middle = _slotted(called[:name_at], 0), _slotted(called[name_stop:args_at], 0)
    rest = _slotted(_until_end(called[args_stop:].rstrip().partition(ends)[0] if ends else called[args_stop:].rstrip()), 0)
    two = probes.called({_KEY: _TEXT}, {_KEY: _TEXT})
    between = None
    if two is not None and _TWO in two[args_stop:]:
        second = _written(two[args_stop:], _TWO, _KEY, _TEXT)
        if second is not None:
            between = _slotted(two[args_stop : args_stop + second[0]], 1)
            middle = _numbered(middle, _slotted(two[args_stop + second[1] : args_stop + second[2]], 1))[::1]
    tags = None
    if form is CallForm.TAGGED:
        tags, middle, rest, between = _tags(probes, name_stop, middle, rest, between, called, args_at)
    own = before[len(head):]
    for each in (*reasoning, content):
        own = own.lstrip()
        own = own.removeprefix(each.begin).lstrip().removeprefix(each.end) if each.begin or each.end else own
    own = own.lstrip()
    primer = ""
    if between is None:
        # One call only: what is before an object's brace begins the block.
        call, call_end, begin, separator, end = own, rest, "", "", ""
    else:
        call_end = _common_begin(between, rest)
        call = _numbered_end(before, between[len(call_end):])
        if _CUT_MARK.search(between[: len(between) - len(call)]) and ">" in call:
            call = call[call.index(">") + 1 :]
        separator = between[len(call_end): len(between) - len(call)]
        end = rest[len(call_end):]
        if len(call) > len(own):
            primer = call[: len(call) - len(own)] if own or call.strip() else ""
            if not primer.strip(): call, primer = call.lstrip(), ""
            begin = ""
        else:
            begin = own[: len(own) - len(call)]
    return CallFormat(form, call, middle, call_end, begin, separator, end, tags, quote), primer


def _slotted(text: str, index: int) -> str:
    return text.replace(_IDS[0], CALL_ID).replace(_IDS[1], CALL_ID).replace((_ONE, _TWO)[index], NAME)


def _numbered(first: str, second: str) -> str:
    """The text of the first call, with a slot where both are numbered."""
    return _numbered_end(first, second) if len(first) == len(second) else first


def _numbered_end(first: str, second: str) -> str:
    """The common end of the text before a call and that before the next, with a slot where they are numbered."""
    found = ""
    for one, other in zip(reversed(first), reversed(second), strict=False):
        if one == other:
            found = one + found
        elif (one, other) in {("0", "1"), ("1", "2")}:
            found = (INDEX if one == "0" else NUMBER) + found
        else:
            break
    return found


def _tags(probes, name_stop, middle, rest, between, called, key_at):
    def keyed(text, key=_KEY): return text.replace(key, KEY)
    key_stop = key_at + len(_KEY)
    mid = called[key_stop: called.index(_TEXT, key_stop)]
    rest, between = keyed(rest), None if between is None else keyed(between)
    two = probes.called({_KEY: _TEXT, _OTHER_KEY: _TEXT})
    value_end, key, sep = rest, middle, ""
    if two is not None:
        v = two.index(_TEXT, key_stop) + len(_TEXT)
        btw = keyed(two[v: two.index(_OTHER_KEY, v)])
        value_end = _common_begin(btw, rest)
        if KEY in value_end:
            value_end = value_end[: value_end.index(">", value_end.index(KEY)) + 1]
        padded = value_end.startswith("\n") and mid.endswith("\n")
        key = _common_end(middle, btw[len(value_end):]).lstrip()
        value_stripped = value_end.rstrip()
        sep = btw[len(value_stripped): len(btw) - len(key)]
        value_end = value_stripped
    rest = rest[len(value_end):]; between = None if between is None else between[len(value_end):]
    name_end = middle[: len(middle) - len(key)]
    types = []
    python = False; item = ""
    for kind, value in _VALUES.items():
        t = probes.called({_KEY: value})
        if t is None: continue
        first = {"string": _TEXT, "integer": "7364951", "number": "1.5", "boolean": ("true","True"), "null": ("null", "None"), "object": None, "array": None}[kind]
        region = t[key_stop:]
        if kind == "object":
            python = "{'" in region[:region.find(_TEXT)]
            continue
        if kind == "array":
            m = re.search(r"<(\w+)>$", region[:region.find(_TEXT)])
            if m and KEY in value_end: item = m[1]
            continue
        ats = [region.find(f + value_end.strip()) for f in ((first,) if isinstance(first, str) else first)]
        at = min((a for a in ats if a >= 0), default=-1)
        if at >= 0: types.append((kind, region[:at]))
    if len({m for _, m in types}) < 2: types = []
    key_end, _, value = (mid, "", "") if types else mid.strip().partition(">")
    if not types:
        key_end, value = key_end + ">", value.strip()
    return ArgumentTags(key, key_end, value, value_end.strip(), sep, tuple(types), padded, python, item), name_end, rest, between
