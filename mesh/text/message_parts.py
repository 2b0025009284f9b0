"""Message parts: content, reasoning and tool calls, with the formats of calls."""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import Enum
from itertools import groupby
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

BLOCKS: Final = (
    ("<tool_call>", "</tool_call>"),
    ("<seed:tool_call>", "</seed:tool_call>"),
    ("<minimax:tool_call>", "</minimax:tool_call>"),
)
ARGUMENTS_MARK: Final = "[ARGS]"
CALL_ID_MARK: Final = "[CALL_ID]"
THINK_MARKS: Final = (("<think>", "</think>"), ("[THINK]", "[/THINK]"))
_TOOLS: Final = re.compile(r"\btools\b")


@dataclass(frozen=True)
class Content:
    """Text for the client."""

    text: str


@dataclass(frozen=True)
class Reasoning:
    """Reasoning text, before the answer."""

    text: str


@dataclass(frozen=True)
class ToolCallStart:
    """Beginning of a call."""

    index: int
    """Index of the call, from 0."""
    name: str
    """Name of the function."""


@dataclass(frozen=True)
class ToolCallArguments:
    """Further text of a call's arguments."""

    index: int
    """Index of the call."""
    text: str
    """Part of a JSON text."""


MessagePart = Content | Reasoning | ToolCallStart | ToolCallArguments


@dataclass(frozen=True)
class CallTags:
    """Tags of a call whose arguments are values between tags rather than a JSON object.

    White space between tags means nothing.
    """

    call: str
    """Before the name of the function; empty if it follows the beginning of a block."""
    name_end: str
    """Behind that name; empty if a line break or the next tag ends it."""
    key: str
    """Before the name of an argument."""
    key_end: str
    """Behind that name."""
    value: str
    """Before the value; empty if it follows the name."""
    value_end: str
    """Behind the value."""
    call_end: str
    """Behind the last argument; empty if the end of the block is."""
    is_padded: bool = False
    """Whether values have a line break before and behind them, which are no part of them."""

    @property
    def marks(self) -> frozenset[str]:
        """Tags, or their beginnings."""
        texts = (self.call, self.key, self.key_end, self.value, self.value_end, self.call_end)
        return frozenset(text for text in texts if text.startswith("<"))


QWEN_TAGS: Final = CallTags(
    "<function=", ">", "<parameter=", ">", "", "</parameter>", "</function>", is_padded=True
)
GLM_TAGS: Final = CallTags("", "", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>", "")
MINIMAX_TAGS: Final = CallTags(
    '<invoke name="', '">', '<parameter name="', '">', "", "</parameter>", "</invoke>"
)


# - Hermes: `<tool_call>{"name": …, "arguments": {…}}</tool_call>`. Hermes, Qwen 2.5 and 3, Granite 4, and our
#   own note.
# - Llama: `{"name": …, "parameters": {…}}` as the whole answer, with `<|python_tag|>` before it or without.
#   Llama 3.1 and later.
# - Mistral: `[TOOL_CALLS][{"name": …, "arguments": {…}}]`, or `[TOOL_CALLS]name[ARGS]{…}` in newer ones.
# - Qwen: `<tool_call><function=name><parameter=key>value</parameter></function></tool_call>`, where the first
#   tag may be missing. Qwen3-Coder, Qwen3.5 and later, Nemotron 3, Step 3.5; with `seed:` in a tag, Seed-OSS.
# - GLM: `<tool_call>name<arg_key>key</arg_key><arg_value>value</arg_value></tool_call>`. GLM 4.5 and later.
# - MiniMax: `<minimax:tool_call><invoke name="name"><parameter name="key">value</parameter></invoke>` and the
#   end of the block. MiniMax M2.
class CallFormat(Enum):
    """A format of calls; the value is a text that templates which describe it have."""

    HERMES = "<tool_call>"
    LLAMA = "<|python_tag|>"
    MISTRAL = "[TOOL_CALLS]"
    QWEN = "<function="
    GLM = "<arg_key>"
    MINIMAX = "<minimax:tool_call>"

    @property
    def openings(self) -> tuple[str, ...]:
        """Marks with which calls begin, beside or in place of those without any."""
        match self:
            case CallFormat.QWEN:
                return ("<tool_call>", "<seed:tool_call>", QWEN_TAGS.call)
            case CallFormat.GLM:
                return ("<tool_call>",)
            case CallFormat.MINIMAX:
                return ("<minimax:tool_call>", MINIMAX_TAGS.call)
            case _:
                return (self.value,)

    @property
    def endings(self) -> tuple[str, ...]:
        """Marks that end a block of calls."""
        return tuple(end for begin, end in BLOCKS if begin in self.openings)

    @property
    def tags(self) -> CallTags | None:
        """Tags within a call; None if it is JSON."""
        return _TAGS.get(self)

    @property
    def marks(self) -> frozenset[str]:
        """All that the parser must see of a call, though it may be control tokens, which have no text."""
        inner: frozenset[str] = frozenset() if self.tags is None else self.tags.marks
        if self is CallFormat.MISTRAL:
            inner = frozenset({ARGUMENTS_MARK, CALL_ID_MARK})
        return inner.union(self.openings, self.endings)


_TAGS: Final = {
    CallFormat.QWEN: QWEN_TAGS,
    CallFormat.GLM: GLM_TAGS,
    CallFormat.MINIMAX: MINIMAX_TAGS,
}
MARKS: Final = frozenset(
    mark for marks in (*THINK_MARKS, *(call_format.marks for call_format in CallFormat)) for mark in marks
)
"""Marks of all formats, which may be control tokens."""


class MarkFinder:
    """Holds back the longest end of the text that may become one of the marks.

    Args:
        marks: None of them is a prefix of another.

    Example:
        >>> finder = MarkFinder(["<b>"])
        >>> [finder.push(char) for char in "a<<b>"]
        [('a', None), ('', None), ('<', None), ('', None), ('', '<b>')]
    """

    def __init__(self, marks: Sequence[str]) -> None:
        self._marks = tuple(marks)
        self._held = ""

    def push(self, char: str) -> tuple[str, str | None]:
        """Text that is no part of a mark, and the mark that is complete now, if any."""
        held = self._held + char
        if held in self._marks:
            self._held = ""
            return "", held
        start = 0
        while start < len(held) and not any(mark.startswith(held[start:]) for mark in self._marks):
            start += 1
        self._held = held[start:]
        return held[:start], None

    def flush(self) -> str:
        """The text held back."""
        held, self._held = self._held, ""
        return held


def joined(pieces: Iterable[MessagePart]) -> list[MessagePart]:
    """The same with neighbouring parts of one kind merged, and without empty text.

    Example:
        >>> joined([Content("a"), Content(""), Content("b"), Reasoning("c")])
        [Content(text='ab'), Reasoning(text='c')]
    """
    found: list[MessagePart] = []
    for (kind, index), alike in groupby(pieces, key=_kind):
        if kind is ToolCallStart:
            found += alike
        elif text := "".join(piece.text for piece in alike if not isinstance(piece, ToolCallStart)):
            found.append(ToolCallArguments(index, text) if kind is ToolCallArguments else kind(text))
    return found


def calls_of(message_parts: Iterable[MessagePart]) -> list[tuple[str, str]]:
    """Name and arguments of each call, in order."""
    names: list[str] = []
    arguments: list[list[str]] = []
    for piece in message_parts:
        if isinstance(piece, ToolCallStart):
            names.append(piece.name)
            arguments.append([])
        elif isinstance(piece, ToolCallArguments):
            arguments[piece.index].append(piece.text)
    return [(name, "".join(parts)) for name, parts in zip(names, arguments, strict=True)]


def _kind(piece: MessagePart) -> tuple[type[Any], int]:
    return type(piece), piece.index if isinstance(piece, ToolCallStart | ToolCallArguments) else 0


def knows_tools(template: str) -> bool:
    """Whether a chat template uses the tools that it is given."""
    return _TOOLS.search(template) is not None


def call_format_of(template: str) -> CallFormat:
    """Format of calls that a template describes; Hermes if it describes none, as in our own note."""
    if not knows_tools(template):
        return CallFormat.HERMES
    for call_format in (
        CallFormat.MISTRAL,
        CallFormat.MINIMAX,
        CallFormat.QWEN,
        CallFormat.GLM,
        CallFormat.HERMES,
    ):
        if call_format.value in template:
            return call_format
    is_llama = CallFormat.LLAMA.value in template or '"parameters"' in template
    return CallFormat.LLAMA if is_llama else CallFormat.HERMES


def end_of_reasoning(prompt: str) -> str | None:
    """End mark of the reasoning with which an answer to the prompt begins; None if it does not."""
    said = prompt.rstrip()
    return next((end for begin, end in THINK_MARKS if said.endswith(begin)), None)
