"""Format of answers, found by comparing what a template writes for conversations that differ in one thing."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final, Protocol

from mesh.text.answer_format import (
    CALL_ID,
    DEFAULT_REASONING,
    INDEX,
    KEY,
    MARK,
    NAME,
    NO_MARKS,
    NUMBER,
    SLOTS,
    AnswerFormat,
    ArgumentTags,
    CallForm,
    CallFormat,
    Headers,
    Marks,
    common_begin,
    end_of_reasoning,
)
from mesh.text.known_formats import format_by_words
from mesh.text.message_parts import calls_of
from mesh.text.output_parser import OutputFormat, OutputParser

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping, Sequence

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
_ARGUMENTS: Final[Mapping[str, Any]] = {_KEY: _TEXT}
# A text with signs that marks are made of.
_SIGNS: Final[Mapping[str, Any]] = {_KEY: 'one "two" <three>, [four] {five}: (six) = it\'s 7'}
# A value of each type, and how it may be written.
_VALUES: Final[Mapping[str, tuple[Any, tuple[str, ...]]]] = {
    "string": (_TEXT, (_TEXT,)),
    "integer": (7364951, ("7364951",)),
    "number": (1.5, ("1.5",)),
    "boolean": (True, ("true", "True")),
    "null": (None, ("null", "None")),
    "object": ({_OTHER_KEY: [_TEXT]}, ("{",)),
    "array": ([_TEXT, _TEXT], ("[",)),
}
_SIGN: Final = re.compile(rf"[^\w\s{SLOTS}]")
_CUT_MARK: Final = re.compile(r"<[^<>\n]{0,60}$|\[/?[A-Z_]*$")
# What ends an answer that calls, beside the token that ends all others.
_ENDS: Final = (
    "<|eom_id|>",
    "<|eot_id|>",
    "<|eot|>",
    "<|call|>",
    "<|calls|>",
    "<|return|>",
    "<|tool_response>",
)
# Longer texts of templates are no marks.
_MOST_MARK_CHARS: Final = 60
# What stands between the parts of an answer; parsers compare each character with it.
_MOST_TEXT_CHARS: Final = 256
_MOST_SLOTS: Final = 2
# Calls and texts of a few words make no longer ones.
_MOST_ANSWER_CHARS: Final = 20_000


# Calls are of other functions, since some templates list tools behind the user's message.
_TOOLS: Final = tuple(
    {
        "type": "function",
        "function": {
            "name": name,
            "description": "A function.",
            "parameters": {
                "type": "object",
                "properties": {"otherkey": {"type": "string", "description": "A text."}},
                "required": [],
            },
        },
    }
    for name in ("otherone", "othertwo")
)


class Render(Protocol):
    """Renderer of conversations."""

    def __call__(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]],
        variables: Mapping[str, Any],
        *,
        adds_prompt: bool,
    ) -> str | None:
        """The prompt of a conversation; None if the template refuses it."""


class _Probes:
    """Messages of the assistant, as a template writes them behind the user's.

    Args:
        render: Renders a conversation.
    """

    def __init__(self, render: Render) -> None:
        self._render = render
        self._no_text: str | None = ""

    def prompts(self) -> list[str]:
        """Beginnings of an answer: the usual one first, then with and without reasoning."""
        asked = [{"role": "user", "content": _ASKED}]
        switches = ({}, *({"enable_thinking": on, "thinking": on} for on in (True, False)))
        found = (self._behind(asked, switch, adds_prompt=True) for switch in switches)
        return [prompt for prompt in found if prompt is not None]

    def said(self, *, thought: bool) -> str | None:
        """A text, behind reasoning or without."""
        return self._answer({"content": _SAID}, thought=thought)

    def called(self, *calls: Mapping[str, Any], thought: bool = False) -> str | None:
        """Calls of the first function and then the second, each with the arguments that are given."""
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
        if text is None or _ASKED not in text:
            return None
        behind = text.rpartition(_ASKED)[2]
        return behind if len(behind) <= _MOST_ANSWER_CHARS else None


class _Answers:
    """What answers begin and end with, and their marks.

    Args:
        said: One of text.
        called: One that calls; None if the template writes none.
        thoughts: Answers with reasoning: of text if possible.
        prompts: What is between the user's message and an answer.
        ends: Names of the tokens that end answers.
    """

    def __init__(
        self,
        said: str,
        called: str | None,
        thoughts: Sequence[str],
        prompts: Sequence[str],
        ends: Collection[str],
    ) -> None:
        self._ends = (*_ENDS, *ends)
        self.prompts = prompts
        self.head = _head(prompts, [said, *thoughts, *([] if called is None else [called])])
        behind = said.rpartition(_SAID)[2].rstrip()
        self.tail = behind if called is None else _tail(behind, called.rstrip())
        self._before = said[len(self.head) : said.index(_SAID)]
        self._content_end = self.until_end(behind.removesuffix(self.tail)).strip()
        reasoning = self._reasoning(thoughts[0]) if thoughts else NO_MARKS
        # Without a mark behind it, it cannot be told from what follows.
        self.reasoning = (reasoning,) if reasoning.end else DEFAULT_REASONING

    @property
    def content(self) -> Marks:
        """Marks of content."""
        before = self._before
        for each in self.reasoning:
            before = before.rpartition(each.end)[2]
        begin = before.strip()
        if not begin or self.prompts[0].rstrip().endswith(begin):
            return NO_MARKS
        return Marks(begin if begin.endswith((">", "]")) else before, self._content_end)

    @property
    def end(self) -> str:
        """What is behind every answer, before the token that ends it."""
        end = self.until_end(self.tail).strip()
        return end if len(end) <= _MOST_MARK_CHARS else ""

    def starts(self, text: str) -> set[int]:
        """Places in an answer from which a parser has to read its calls: behind head and usual prompt.

        They differ where the prompt ends within a mark, or goes on otherwise than the answer. A prompt that
        begins reasoning gives no place: the parser of its answer is told so.
        """
        prompt = self.prompts[0]
        if end_of_reasoning(prompt, self.reasoning) is not None:
            return {len(self.head)}
        return {len(self.head), len(prompt if text.startswith(prompt) else _common_begin(prompt, text))}

    def until_end(self, text: str) -> str:
        """A text up to a token that ends answers."""
        at = min((at for at in map(text.find, filter(None, self._ends)) if at >= 0), default=len(text))
        return text[:at]

    def _reasoning(self, thought: str) -> Marks:
        begin, _, behind = thought[len(self.head) :].partition(_THOUGHT)
        openings = [text[len(self.head) :].strip() for text in self.prompts if text.startswith(self.head)]
        begin = begin.strip() or self._begun(openings, behind)
        if _SAID not in behind:
            return Marks(begin, next(iter(MARK.findall(behind)), ""))
        end = behind.partition(_SAID)[0].strip()
        own = self._before.rpartition(end)[2].strip() if end else ""
        for each in openings:
            # A prompt without reasoning ends with what begins content.
            if each and self._before.endswith(each) and begin not in each and not end.startswith(each):
                own = each
        return Marks(begin, end.removesuffix(own).strip())

    def _begun(self, openings: Sequence[str], behind: str) -> str:
        """The mark of reasoning that is a part of the prompt."""
        last = next(reversed(MARK.findall(self.head)), "")
        if last and self.head.rstrip().endswith(last) and f"{last[0]}/{last[1:]}" in behind:
            return last
        return next((each for each in openings if 0 < len(each) <= _MOST_MARK_CHARS), "")


@dataclass(frozen=True)
class _Place:
    """Where a call is in a text."""

    name: int
    """Where its name begins."""
    name_end: int
    """Where its name ends."""
    arguments: int
    """Where its arguments begin; the first name, if they are tagged."""
    end: int
    """Where its arguments end; the first value, if they are tagged."""
    form: CallForm
    quote: str = '"'


class _TagReading:
    """Reads the tags of arguments.

    Args:
        probes: Renders calls with other arguments.
        called: A call with one text.
        place: Where it is.
        rest: What is behind the text, up to the end of the answer.
    """

    def __init__(self, probes: _Probes, called: str, place: _Place, rest: str) -> None:
        self._key_end = place.arguments + len(_KEY)
        self._middle = called[place.name_end : place.arguments]
        self._end = rest.replace(_KEY, KEY)
        key, separator = self._middle.lstrip(), ""
        two = probes.called({_KEY: _TEXT, _OTHER_KEY: _TEXT})
        if two is not None and _OTHER_KEY in two[place.end :]:
            between = two[place.end : two.index(_OTHER_KEY, place.end)].replace(_KEY, KEY)
            self._end = _common_begin(between, self._end)
            if KEY in self._end:
                self._end = self._end[: self._end.index(">", self._end.index(KEY)) + 1]
            key = _common_end(self._middle, between[len(self._end) :]).lstrip()
            separator = between[len(self._end.rstrip()) : len(between) - len(key)]
        self._before = called[self._key_end : place.end - len(_TEXT)]
        is_padded = self._end.startswith("\n") and self._before.endswith("\n")
        self._end = self._end.rstrip()
        written = dict(self._written(probes))
        types = tuple((kind, text) for kind, text in written.items() if kind in _VALUES)
        has_types = len({text for _, text in types}) > 1
        key_end, sign, begin = self._before.partition(">")
        self.tags = ArgumentTags(
            key=key,
            key_end=self._before if has_types else key_end + sign,
            value="" if has_types else begin.rstrip(),
            value_end=self._end.strip(),
            separator=separator,
            types=types if has_types else (),
            is_padded=is_padded,
            is_python="python" in written,
            literal=self._literal(probes),
            item=written.get("item", ""),
        )

    def behind_value(self, text: str) -> str:
        """What is behind the end of a value."""
        return text.replace(_KEY, KEY)[len(self._end) :]

    def _literal(self, probes: _Probes) -> Marks:
        """What is around a text with a tag in it."""
        text = (probes.called({_KEY: f"<{_TEXT}>"}) or "")[self._key_end :]
        begin, _, behind = text.partition(f"<{_TEXT}>")
        begin = begin.removeprefix(self._before)
        return Marks(begin, behind.partition(self._end)[0]) if behind and "<" in begin else NO_MARKS

    def _written(self, probes: _Probes) -> Iterator[tuple[str, str]]:
        """What is between name and value, by the type of the value, and marks of values that are no texts."""
        end = self._end.strip()
        for kind, (value, texts) in _VALUES.items():
            text = (probes.called({_KEY: value}) or "")[self._key_end :]
            if kind in {"object", "array"}:
                before = text.partition(_TEXT)[0]
                if kind == "object" and "{'" in before:
                    yield "python", ""
                item = re.search(r"<(\w+)>$", before)
                if kind == "array" and KEY in end and item is not None:
                    yield "item", item[1]
            at = min(
                (at for each in texts if (at := text.find(each if len(each) == 1 else each + end)) >= 0),
                default=-1,
            )
            if at >= 0:
                yield kind, text[:at]


def found_format(render: Render, source: str, ends: Collection[str]) -> AnswerFormat:
    """Format of the answers of a model, by its chat template.

    Args:
        render: Renders a conversation.
        source: Source of the template.
        ends: Names of the tokens that end answers.
    """
    told = format_by_words(source)
    untold = AnswerFormat() if told is None else AnswerFormat(told, is_found=True)
    try:
        found = _found(_Probes(render), untold, ends)
    except (ValueError, IndexError):
        # A template is a program: what it writes may be like nothing that was thought of.
        return untold
    return found if _is_short(found) else untold


def _is_short(found: AnswerFormat) -> bool:
    """Whether all texts of a format are short enough to be looked for in an answer as it comes."""
    return all(
        len(text) <= _MOST_TEXT_CHARS and sum(map(text.count, SLOTS)) <= _MOST_SLOTS for text in found.texts
    )


def _found(probes: _Probes, untold: AnswerFormat, ends: Collection[str]) -> AnswerFormat:
    """The format, or as much of it as is found, beside what is not told by rendering."""
    said, prompts = probes.said(thought=False), probes.prompts()
    if said is None or _SAID not in said or not prompts:
        return untold
    called = probes.called(_ARGUMENTS)
    thoughts = (probes.said(thought=True), probes.called(_ARGUMENTS, thought=True))
    answers = _Answers(
        said, called, [text for text in thoughts if text is not None and _THOUGHT in text], prompts, ends
    )
    found = replace(untold, reasoning=answers.reasoning, content=answers.content, end=answers.end)
    place = None if called is None else _place(called, _ONE)
    if called is None or place is None:
        return found
    with_calls = _with_calls(found, answers, probes, called, place)
    return with_calls if _is_certain(with_calls, answers, probes, called) else found


def _is_certain(found: AnswerFormat, answers: _Answers, probes: _Probes, called: str) -> bool:
    """Whether a parser reads the calls that a template writes, one and two in an answer, as what they are."""
    written = [(called, [(_ONE, _ARGUMENTS)])]
    if (other := probes.called(_SIGNS)) is not None:
        written.append((other, [(_ONE, _SIGNS)]))
    if (two := probes.called(_ARGUMENTS, _ARGUMENTS)) is not None and _TWO in two:
        written.append((two, [(_ONE, _ARGUMENTS), (_TWO, _ARGUMENTS)]))
    return (
        _is_short(found)
        and _has_signs(found.calls)
        and all(
            _read(found, answers.until_end(text[start:])) == calls
            for text, calls in written
            for start in answers.starts(text)
        )
    )


def _has_signs(calls: CallFormat) -> bool:
    """Whether no mark of arguments is of letters and white space alone, as names and values may be."""
    tags = calls.tags
    of_tags = () if tags is None else (tags.key, tags.key_end, tags.value, tags.value_end)
    return all(_SIGN.search(text) is not None for text in (calls.quote, *of_tags) if text)


def _read(found: AnswerFormat, text: str) -> list[tuple[str, Any]]:
    """Calls in a text; none where arguments are no JSON."""
    parser = OutputParser(
        OutputFormat(
            found.calls,
            frozenset({_ONE, _TWO}),
            splits_reasoning=True,
            reasoning=found.reasoning,
            content=found.content,
            headers=found.headers,
            end=found.end,
            primer=found.primer,
        )
    )
    parts = [*parser.push(text), *parser.flush()]
    try:
        return [(name, json.loads(arguments)) for name, arguments in calls_of(parts)]
    except ValueError:
        return []


def _head(prompts: Sequence[str], answers: Sequence[str]) -> str:
    """What is before each answer, whatever the answer is."""
    own = [text[: min(at for at in map(text.find, (_SAID, _THOUGHT, _ONE)) if at >= 0)] for text in answers]
    head = common_begin(prompts[0], *own)
    # A prompt that has a word of its own behind the user's message says nothing.
    others = [prompt for prompt in prompts[1:] if common_begin(prompt, head)]
    head = _whole_marks(common_begin(head, *others))
    if head.endswith(">") and any(
        text.startswith(head) and text[len(head) : len(head) + 1].isalpha() for text in prompts
    ):
        head = head[: head.rindex("<")]
    return head


def _tail(behind: str, called: str) -> str:
    """What is behind each answer."""
    tail = _common_end(behind, called)
    before = called.removesuffix(tail)
    if (_CUT_MARK.search(before) is not None or before[-1:].isalnum()) and ">" in tail:
        # The marks before end alike.
        tail = tail[tail.index(">") + 1 :]
    return tail


def _whole_marks(text: str) -> str:
    """A text without the part of a mark at its end."""
    found = _CUT_MARK.search(text)
    return text if found is None else text[: found.start()]


def _common_begin(first: str, second: str) -> str:
    return _whole_marks(common_begin(first, second))


def _common_end(first: str, second: str) -> str:
    return common_begin(first[::-1], second[::-1])[::-1]


def _place(text: str, name: str) -> _Place | None:
    """Where a call with the usual arguments is; None if it is not there."""
    first = text.find(name)
    key = text.find(_KEY, first)
    if first < 0 or key < 0:
        return None
    start = text.rindex(name, 0, key)
    stop = start + len(name)
    for form, pattern in (
        (CallForm.NAMED, rf'\{{\s*"{_KEY}"\s*:\s*(")\s*{_TEXT}"\s*\}}'),
        (CallForm.NAMED, rf"\{{{_KEY}:(\S*?){_TEXT}\1\}}"),
        (CallForm.FUNCTION, rf"{_KEY}=(['\"]){_TEXT}\1"),
    ):
        found = re.compile(pattern).search(text, stop)
        if found is not None and found.start() <= key:
            is_object = re.search(r'\{[^{}]*"$', text[:start]) is not None and text[stop : stop + 1] == '"'
            return _Place(
                start,
                stop,
                found.start(),
                found.end(),
                CallForm.OBJECT if is_object else form,
                found[1],
            )
    value = text.find(_TEXT, key)
    return None if value < 0 else _Place(start, stop, key, value + len(_TEXT), CallForm.TAGGED)


def _with_calls(
    found: AnswerFormat, answers: _Answers, probes: _Probes, called: str, place: _Place
) -> AnswerFormat:
    """The format with that of calls, by an answer with one call and where it is."""
    before = _slotted(called[: place.name], _ONE)
    middle = _slotted(called[place.name_end : place.arguments], _ONE)
    rest = called[place.end :].rstrip()
    rest = _slotted(answers.until_end(rest.partition(answers.tail)[0] if answers.tail else rest), _ONE)
    between = None
    two = probes.called(_ARGUMENTS, _ARGUMENTS)
    second = None if two is None else _place(two[place.end :], _TWO)
    if two is not None and second is not None:
        behind = two[place.end :]
        between = _slotted(behind[: second.name], _TWO)
        middle = _numbered(middle, _slotted(behind[second.name_end : second.arguments], _TWO))
    tags = None
    if place.form is CallForm.TAGGED:
        reading = _TagReading(probes, called, place, rest)
        tags = reading.tags
        middle = middle[: len(middle) - len(tags.key)]
        rest, between = reading.behind_value(rest), None if between is None else reading.behind_value(between)
    own = _without_empty(before[len(answers.head) :], found)
    first = MARK.match(own)
    if first is not None and answers.prompts[0].rstrip().endswith(first[0]):
        own = own[first.end() :]
    headers = _headers(found, before, answers)
    if headers is None:
        own = own.lstrip()
    calls = CallFormat(place.form, own, middle, rest, tags=tags, quote=place.quote)
    if between is None:
        return replace(found, calls=calls, headers=headers, is_found=True)
    call_end = _common_begin(between, rest)
    call = _call_of(before, between[len(call_end) :])
    separator = between[len(call_end) : len(between) - len(call)]
    begin = own[: max(len(own) - len(call), 0)]
    # The prompt may end with the beginning of a call.
    primer = call[: max(len(call) - len(own), 0)]
    if not primer.strip():
        call, separator, primer = call.removeprefix(primer), separator + primer, ""
    end = rest[len(call_end) :]
    calls = replace(calls, begin=begin, call=call, call_end=call_end, separator=separator, end=end)
    return replace(found, calls=_regular(calls), headers=headers, primer=primer, is_found=True)


def _regular(calls: CallFormat) -> CallFormat:
    """The same, where what each call begins with is not told as the end of what is before it."""
    shared = re.split(r"\s", calls.begin)[-1]
    if not shared or shared == calls.begin or not calls.call_end.endswith(shared):
        return calls
    return replace(
        calls,
        begin=calls.begin.removesuffix(shared),
        call=shared + calls.call,
        call_end=calls.call_end.removesuffix(shared),
        end=shared + calls.end,
    )


def _without_empty(text: str, found: AnswerFormat) -> str:
    """What a template writes before calls, without marks of reasoning and content with nothing in between."""
    for each in (*found.reasoning, found.content):
        if each.end:
            shorter = text.lstrip().removeprefix(each.begin).lstrip().removeprefix(each.end)
            text = shorter if len(shorter) < len(text.lstrip()) else text
    return text


def _headers(found: AnswerFormat, before: str, answers: _Answers) -> Headers | None:
    """Headers of messages, if reasoning and content have headers that end alike, in messages of their own."""
    if len(found.reasoning) != 1 or not found.content.begin:
        return None
    reasoning = found.reasoning[0]
    body = next(reversed(MARK.findall(reasoning.begin)), "")
    begins = MARK.findall(answers.head)
    is_header = found.content.begin.endswith(body) and begins[-1:] != [body]
    if not body or not is_header or not begins or begins[-1] not in reasoning.end:
        return None
    ends = [
        mark
        for mark in (*MARK.findall(reasoning.end), *_ENDS, *MARK.findall(answers.tail))
        if mark != begins[-1]
    ]
    header = before.rpartition(begins[-1])[2]
    recipient = re.search(r"\S*$", header[: header.find(body)] if body in header else header)
    return Headers(
        begins[-1],
        body,
        tuple(dict.fromkeys(ends)),
        reasoning.begin.removesuffix(body),
        "" if recipient is None else recipient[0].partition(NAME)[0],
    )


def _slotted(text: str, name: str) -> str:
    return text.replace(_IDS[0], CALL_ID).replace(_IDS[1], CALL_ID).replace(name, NAME)


def _numbered(first: str, second: str) -> str:
    """The text of the first call, with a slot where both are numbered."""
    found = _numbered_end(first, second)
    return found if len(found) == len(first) else first


def _numbered_end(first: str, second: str) -> str:
    """What texts of the first and the second call end with, with a slot where they are numbered."""
    found = ""
    for one, other in zip(reversed(first), reversed(second), strict=False):
        if one == other:
            found = one + found
        elif (one, other) in {("0", "1"), ("1", "2")}:
            found = (INDEX if one == "0" else NUMBER) + found
        else:
            break
    return found


def _call_of(before: str, between: str) -> str:
    """What each call begins with, by what is before the first one and before the second."""
    call = _numbered_end(before, between)
    if _CUT_MARK.search(between[: len(between) - len(call)]) is not None and ">" in call:
        call = call[call.index(">") + 1 :]
    return call
