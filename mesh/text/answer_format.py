"""Answer format: how a model writes reasoning, content and calls, as texts between which they stand.

Texts are as a chat template renders them, white space included; parsers take less and more of that. In texts
of calls a slot stands for what differs from call to call.
"""

from __future__ import annotations

import itertools
import re
from dataclasses import asdict, dataclass
from enum import Enum
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

NAME: Final = "\ufdd0"
"""Slot of the function's name, where a call has it a second time."""
CALL_ID: Final = "\ufdd1"
"""Slot of the call's id."""
INDEX: Final = "\ufdd2"
"""Slot of the number of the call, from 0; over all calls of the conversation in some templates."""
NUMBER: Final = "\ufdd3"
"""Slot of the number of the call, from 1."""
KEY: Final = "\ufdd4"
"""Slot of an argument's name, where its tags have it a second time."""
SLOTS: Final = NAME + CALL_ID + INDEX + NUMBER + KEY
CONSTRAIN_MARK: Final = "<|constrain|>"
"""Ahead of the kind of arguments in headers; models write it, and no template does."""
BARE_MARK: Final = "<|python_tag|>"
"""Before calls that are the whole answer, where templates write nothing there and models do."""
_MOST_CACHED: Final = 64
MARK: Final = re.compile(r"<[^<>\n]{1,60}>|\[/?[A-Z_]{2,30}\]")
"""A mark as most templates write them."""


class CallForm(Enum):
    """Form of a call."""

    OBJECT = "object"
    """A JSON object, with the name and the arguments as members."""
    NAMED = "named"
    """A name, then the arguments as one JSON object, or as one with bare keys."""
    TAGGED = "tagged"
    """A name, then each argument between tags."""
    FUNCTION = "function"
    """As Python writes a call: `name(key='value')`."""


@dataclass(frozen=True)
class Marks:
    """Two texts, with what stands between them."""

    begin: str
    """Text before it; empty if there is none."""
    end: str
    """Text behind it; empty if there is none."""


NO_MARKS: Final = Marks("", "")
"""Nothing around a text."""


@dataclass(frozen=True)
class ArgumentTags:
    """Tags of arguments that are values between tags: `key`, name, `key_end`, `value`, value, `value_end`."""

    key: str
    """Before the name of an argument."""
    key_end: str
    """Behind that name."""
    value: str = ""
    """Before the value; empty if it follows `key_end`."""
    value_end: str = ""
    """Behind the value."""
    separator: str = ""
    """Between arguments."""
    types: tuple[tuple[str, str], ...] = ()
    """Where tags tell types: of each type of JSON, its name and what is in place of `key_end` then."""
    is_padded: bool = False
    """Whether values have a line break before and behind them, which are no part of them."""
    is_python: bool = False
    """Whether values that are no texts are written as Python does: `True`, `{'a': None}`."""
    literal: Marks = NO_MARKS
    """Around texts in which tags mean nothing, if some are written so."""
    item: str = ""
    """Name in the tags of a list's items, where objects and lists are values between tags in turn; else
    empty."""


@dataclass(frozen=True)
class CallFormat:
    """Format of calls: `begin`, of each call `call`, name, `name_end`, arguments and `call_end`, then `end`.

    In a JSON object the texts around the name and the arguments are those of the object.
    """

    form: CallForm
    """Form of each call."""
    call: str
    """Before the name, in each call."""
    name_end: str
    """Behind the name."""
    call_end: str
    """Behind the arguments, in each call."""
    begin: str = ""
    """Before the first call."""
    separator: str = ""
    """Between calls."""
    end: str = ""
    """Behind the last call."""
    tags: ArgumentTags | None = None
    """Tags of arguments, if they are tagged."""
    quote: str = '"'
    """Around texts in arguments. Another one than JSON's goes with bare keys."""


@dataclass(frozen=True)
class Headers:
    """An answer of several messages, each with a header that tells what it is."""

    begin: str
    """Before a header; missing before the answer's first, since the prompt ends with it."""
    body: str
    """Between a header and its message."""
    ends: tuple[str, ...]
    """Behind messages."""
    reasoning: str
    """In the header of reasoning."""
    recipient: str
    """In the header of a call, before the name of the function."""


NOTE_FORMAT: Final = CallFormat(
    CallForm.OBJECT, '<tool_call>\n{"name": "', '", "arguments": ', "}\n</tool_call>", separator="\n"
)
"""Format of calls that our own note asks for, where a template knows no tools."""
DEFAULT_REASONING: Final = (Marks("<think>", "</think>"), Marks("[THINK]", "[/THINK]"))
"""Marks of reasoning, where a template writes none."""
MARKS: Final = frozenset(
    {"<tool_call>", "</tool_call>", *(text for each in DEFAULT_REASONING for text in (each.begin, each.end))}
)
"""Marks of our own note and of reasoning, which are marks in every vocabulary."""


@dataclass(frozen=True)
class AnswerFormat:
    """Format of the answers of a model."""

    calls: CallFormat = NOTE_FORMAT
    """Format of calls."""
    reasoning: tuple[Marks, ...] = DEFAULT_REASONING
    """Marks of reasoning: any of them."""
    content: Marks = NO_MARKS
    """Marks of content, where it has some."""
    headers: Headers | None = None
    """Headers, if the answer has any; marks of reasoning and of content are parts of them then."""
    end: str = ""
    """Behind the whole answer, before the token that ends it."""
    primer: str = ""
    """Beginning of a call that the prompt ends with."""
    is_found: bool = False
    """Whether the format of calls was found, rather than that of our own note taken."""

    @property
    def header_marks(self) -> tuple[str, ...]:
        """Marks that begin and end messages and their headers; none without headers."""
        headers = self.headers
        return () if headers is None else (headers.begin, headers.body, *headers.ends)

    @property
    def texts(self) -> tuple[str, ...]:
        """All texts that may hold marks, which may be control tokens of a vocabulary."""
        pairs = [
            text
            for each in (*self.reasoning, self.content, Marks(self.primer, self.end))
            for text in (each.begin, each.end)
        ]
        headers = self.headers
        of_headers: tuple[str, ...] = ()
        if headers is not None:
            of_headers = (headers.begin, headers.body, *headers.ends, headers.reasoning, CONSTRAIN_MARK)
        return (*pairs, *of_headers, *texts_of(self.calls))

    def shown(self) -> dict[str, Any]:
        """The format for people: a call, and what is around reasoning."""
        reasoning = [f"{each.begin}…{each.end}" for each in self.reasoning]
        return {"is_found": self.is_found, "call": _shown(self.calls), "reasoning": reasoning}

    def told(self) -> dict[str, Any]:
        """The format as JSON."""
        return {**asdict(self), "calls": {**asdict(self.calls), "form": self.calls.form.value}}


def _shown(calls: CallFormat) -> str:
    arguments = "{…}"
    if calls.form is CallForm.FUNCTION:
        arguments = "KEY=VALUE"
    if (tags := calls.tags) is not None:
        arguments = f"{tags.key}KEY{tags.key_end}{tags.value}VALUE{tags.value_end}"
    text = f"{calls.begin}{calls.call}NAME{calls.name_end}{arguments}{calls.call_end}{calls.end}"
    for slot, word in ((NAME, "NAME"), (CALL_ID, "ID"), (INDEX, "0"), (NUMBER, "1"), (KEY, "KEY")):
        text = text.replace(slot, word)
    return text


def format_told(told: Mapping[str, Any]) -> AnswerFormat:
    """The format that `AnswerFormat.told` has told."""
    calls, headers = told["calls"], told["headers"]
    tags = calls["tags"]
    return AnswerFormat(
        **{
            **told,
            "calls": CallFormat(
                **{
                    **calls,
                    "form": CallForm(calls["form"]),
                    "tags": None if tags is None else _tags_told(tags),
                }
            ),
            "reasoning": tuple(Marks(**each) for each in told["reasoning"]),
            "content": Marks(**told["content"]),
            "headers": None if headers is None else Headers(**{**headers, "ends": tuple(headers["ends"])}),
        }
    )


def _tags_told(told: Mapping[str, Any]) -> ArgumentTags:
    types = tuple((kind, text) for kind, text in told["types"])
    return ArgumentTags(**{**told, "types": types, "literal": Marks(**told["literal"])})


def common_begin(*texts: str) -> str:
    """What all texts begin with."""
    first, last = min(texts), max(texts)
    alike = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(first, last, strict=False))
    return first[: sum(1 for _ in alike)]


def texts_of(calls: CallFormat) -> tuple[str, ...]:
    """All texts of a format of calls that may hold marks."""
    tags = calls.tags
    inner = (
        ()
        if tags is None
        else (tags.key, tags.key_end, tags.value, tags.value_end, *dict(tags.types).values())
    )
    outer = (calls.begin, calls.call, calls.name_end, calls.call_end, calls.separator, calls.end, calls.quote)
    return (BARE_MARK, *outer, *inner)


@lru_cache(_MOST_CACHED)
def marks_in(texts: frozenset[str]) -> frozenset[bytes]:
    """Marks in some texts, as vocabularies have tokens for them."""
    return frozenset(mark.encode() for text in texts for mark in MARK.findall(text))


def end_of_reasoning(prompt: str, reasoning: Sequence[Marks]) -> str | None:
    """End mark of the reasoning with which an answer to the prompt begins; None if it does not."""
    said = prompt.rstrip()
    return next((each.end for each in reasoning if each.begin and said.endswith(each.begin)), None)


def has_ended_reasoning(prompt: str, reasoning: Sequence[Marks]) -> bool:
    """Whether a prompt ends behind reasoning, so that its answer has none."""
    said = prompt.rstrip()
    # A mark that goes on with the next header is the end of any message.
    return any(each.end and len(MARK.findall(each.end)) < 2 and said.endswith(each.end) for each in reasoning)


def unended_reasoning(text: str, reasoning: Sequence[Marks]) -> str | None:
    """End mark of reasoning that begins in a text and does not end there; None without any."""
    begun = (each for each in reasoning if each.begin and text.rfind(each.begin) > text.rfind(each.end))
    return next((each.end for each in begun), None)
