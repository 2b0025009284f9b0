"""Output parser: text of an answer to message parts, reasoning split off."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from enum import Enum, auto
from typing import TYPE_CHECKING, Any

from mesh.text.answer_format import DEFAULT_REASONING, NO_MARKS, Marks, texts_of
from mesh.text.call_marks import call_marks_of
from mesh.text.header_parser import HeaderParser, format_of_messages, is_named_in_header
from mesh.text.message_parts import Content, MarkFinder, MessagePart, Reasoning, joined
from mesh.text.tool_call_parser import ToolCallParser

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from mesh.text.answer_format import CallFormat, Headers


class _At(Enum):
    BEGINNING = auto()
    INSIDE = auto()
    CALLING = auto()
    BEHIND = auto()
    CONTENT = auto()


class ReasoningParser:
    """Splits reasoning, which comes first if at all, from what follows.

    White space at its ends is dropped. Later marks are content, unless they have the form of control tokens.
    Some models call without ending their reasoning, and some only think about a call: what begins like one is
    held back until reasoning ends, or the answer.

    Args:
        reasoning: Marks of reasoning: any of them.
        calls: Marks with which calls begin.
        is_inside: Whether the prompt ends within reasoning, so that no mark begins it.
    """

    def __init__(self, reasoning: Sequence[Marks], calls: Sequence[str] = (), *, is_inside: bool) -> None:
        self._marks = reasoning
        self._calls = calls
        self._is_inside = is_inside
        # Other marks may be letters of a text.
        self._comes_again = all("|" in each.begin for each in reasoning)
        self._again = MarkFinder([text for each in reasoning for text in (each.begin, each.end)])
        self._at = _At.BEGINNING
        # What is not told yet; at the beginning white space, too, and what may be a mark.
        self._held: list[str] = []
        self._opening = ""
        self._has_begun = False
        self._finder = self._finder_with(calls)

    def _finder_with(self, calls: Sequence[str]) -> MarkFinder:
        return MarkFinder(list(dict.fromkeys((*(each.end for each in self._marks), *calls))))

    @property
    def is_reasoning(self) -> bool:
        """Whether the text so far ends within reasoning."""
        is_begun = self._is_inside and self._at is _At.BEGINNING
        return is_begun or self._at in {_At.INSIDE, _At.CALLING}

    @property
    def is_over(self) -> bool:
        """Whether all further text is content."""
        return self._at is _At.CONTENT and not self._comes_again

    def push(self, char: str) -> list[MessagePart]:
        """The parts that become final with one more character."""
        match self._at:
            case _At.BEGINNING:
                return self._begin(char)
            case _At.INSIDE:
                return self._go_on(char)
            case _At.CALLING:
                return self._call_on(char)
            case _At.BEHIND if char.isspace():
                return []
        self._at = _At.CONTENT
        return self._content(char)

    def _content(self, char: str) -> list[MessagePart]:
        if not self._comes_again:
            return [Content(char)]
        text, mark = self._again.push(char)
        if any(mark == each.begin for each in self._marks):
            self._at, self._has_begun = _At.INSIDE, False
        return [Content(text)] if text else []

    def take_call(self) -> str:
        """Consume what began like a call within reasoning that has not ended; empty if there is nothing."""
        return self._taken() + self._finder.flush() if self._at is _At.CALLING else ""

    def flush(self) -> list[MessagePart]:
        """The parts held back, at the end."""
        held = self._taken()
        if self._at in {_At.INSIDE, _At.CALLING}:
            held += self._finder.flush()
        elif self._at is _At.CONTENT:
            held += self._again.flush()
        if self.is_reasoning:
            held = held.rstrip() if self._has_begun else held.strip()
            return [Reasoning(held)] if held else []
        return [Content(held)] if held else []

    def _begin(self, char: str) -> list[MessagePart]:
        self._held.append(char)
        if not self._opening and char.isspace():
            return []
        self._opening = said = self._opening + char
        if any(said == each.begin for each in self._marks):
            self._at, self._is_inside = _At.INSIDE, False
            self._held.clear()
            return []
        if not self._is_inside and any(said == each.end for each in self._marks):
            # Templates write this before answers without reasoning, and models repeat it.
            self._at = _At.BEHIND
            self._held.clear()
            return []
        ends = () if self._is_inside else tuple(each.end for each in self._marks)
        if any(mark.startswith(said) for mark in (*(each.begin for each in self._marks), *ends)):
            return []
        held = self._taken()
        if not self._is_inside:
            self._at = _At.CONTENT
            return [piece for each in held for piece in self.push(each)]
        self._at, self._is_inside = _At.INSIDE, False
        return [piece for each in held for piece in self._go_on(each)]

    def _go_on(self, char: str) -> list[MessagePart]:
        if self._at is not _At.INSIDE:
            # The end mark came among characters that were held back.
            return self.push(char)
        text, mark = self._finder.push(char)
        shown = ""
        for each in text:
            if not each.isspace():
                shown += self._taken() + each
                self._has_begun = True
            elif self._has_begun:
                self._held.append(each)
        if mark is not None and mark in self._calls:
            self._at, self._finder = _At.CALLING, self._finder_with(())
            self._held.append(mark)
        elif mark is not None:
            self._at = _At.BEHIND
            self._held.clear()
        return [Reasoning(shown)] if shown else []

    def _call_on(self, char: str) -> list[MessagePart]:
        text, mark = self._finder.push(char)
        self._held.append(text)
        if mark is None:
            return []
        held = self._taken().rstrip()
        self._at, self._finder = _At.BEHIND, self._finder_with(self._calls)
        return [Reasoning(held if self._has_begun else held.lstrip())]

    def _taken(self) -> str:
        """Consume what is held."""
        held = "".join(self._held)
        self._held.clear()
        return held


@dataclass(frozen=True)
class OutputFormat:
    """Format of an answer."""

    call_format: CallFormat | None = None
    """Format of calls; None without calls, so that all is text."""
    names: frozenset[str] = frozenset()
    """Names of the functions."""
    has_one_call: bool = False
    """Whether the answer ends with its first call."""
    splits_reasoning: bool = False
    """Whether reasoning is split from content."""
    is_in_reasoning: bool = False
    """Whether the prompt ends within reasoning."""
    shows_think_marks: bool = False
    """Whether marks of reasoning stay in the text, where it is not split."""
    parameters: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """JSON schema of each function's parameters, by its name."""
    reasoning: tuple[Marks, ...] = DEFAULT_REASONING
    """Marks of reasoning: any of them."""
    content: Marks = NO_MARKS
    """Marks of content, where it has some."""
    headers: Headers | None = None
    """Headers of messages, if the answer has any."""
    end: str = ""
    """Behind the whole answer."""
    primer: str = ""
    """Beginning of a call or of content that the prompt ends with."""

    @property
    def marks(self) -> frozenset[str]:
        """Texts with the marks that must be seen, though they may be control tokens, which have no text."""
        pairs: list[Marks] = [self.content, Marks(self.primer, self.end)]
        if self.splits_reasoning or self.shows_think_marks:
            pairs += self.reasoning
        found = {text for each in pairs for text in (each.begin, each.end)}
        if self.headers is not None:
            found |= {self.headers.begin, self.headers.body, self.headers.reasoning, *self.headers.ends}
        if self.call_format is not None:
            found |= set(texts_of(self.call_format))
        return frozenset(filter(None, found))


class _ContentMarks:
    """Drops the marks of content, and what is behind the whole answer.

    Args:
        content: The marks.
        primer: Beginning of the first of them that the prompt ends with.
        end: What is behind the whole answer.
    """

    def __init__(self, content: Marks, primer: str, end: str) -> None:
        begin = primer + content.begin if content.begin else ""
        self._finder = MarkFinder(list(dict.fromkeys(filter(None, (begin, content.end, end)))))
        self._end = end
        # What may be the end of the answer.
        self._held: list[str] = []
        self.num_found = 0

    def push(self, char: str) -> str:
        if self._held and char.isspace():
            self._held.append(char)
            return ""
        text, mark = self._finder.push(char)
        if text or mark is not None:
            text = self._taken() + text
        if mark is not None and mark == self._end:
            self._held.append(mark)
        elif mark is not None:
            self.num_found += 1
        return text

    def flush(self) -> str:
        rest = self._finder.flush()
        return self._taken() + rest if rest else ""

    def _taken(self) -> str:
        held = "".join(self._held)
        self._held.clear()
        return held


class OutputParser:
    """Incremental parser; its result does not depend on how the text is cut into chunks.

    Args:
        output_format: Format of the answer.
    """

    def __init__(self, output_format: OutputFormat) -> None:
        calls, headers = output_format.call_format, output_format.headers
        if calls is not None and headers is not None:
            calls = format_of_messages(headers, calls)
        self._calls = (
            None if calls is None else ToolCallParser(calls, output_format.names, output_format.parameters)
        )
        self._headers = (
            None
            if headers is None
            else HeaderParser(
                headers,
                self._calls,
                output_format.names,
                is_named_in_header=output_format.call_format is not None
                and is_named_in_header(headers, output_format.call_format),
                splits_reasoning=output_format.splits_reasoning,
                is_inside=output_format.is_in_reasoning,
            )
        )
        self._reasoning: ReasoningParser | None = None
        self._content: _ContentMarks | None = None
        if headers is None:
            if output_format.splits_reasoning:
                self._reasoning = ReasoningParser(
                    output_format.reasoning,
                    () if calls is None else call_marks_of(calls).openings,
                    is_inside=output_format.is_in_reasoning,
                )
            if output_format.content.begin or output_format.end:
                self._content = _ContentMarks(output_format.content, output_format.primer, output_format.end)
        self._output_format = output_format
        self._has_one_call = output_format.has_one_call
        # Characters of the primer that have come back as content.
        self._num_primed = 0
        if output_format.primer and headers is None:
            self._num_primed = len(output_format.primer)
            self.push(output_format.primer)

    @property
    def is_reasoning(self) -> bool:
        """Whether the text so far ends in reasoning."""
        first = self._headers or self._reasoning
        return first is not None and first.is_reasoning

    @property
    def is_in_header(self) -> bool:
        """Whether the text so far ends within the header of a message."""
        return self._headers is not None and self._headers.is_in_header

    @property
    def has_calls(self) -> bool:
        """Whether a function was called."""
        return self._calls is not None and self._calls.num_calls > 0

    @property
    def ends_in_call(self) -> bool:
        """Whether the text so far ends within a call."""
        return self._calls is not None and self._calls.num_calls > self._calls.num_complete

    @property
    def is_over(self) -> bool:
        """Whether further text is ignored."""
        return self._has_one_call and self._calls is not None and self._calls.num_complete > 0

    def push(self, text: str) -> list[MessagePart]:
        """The parts that become final with this text, sometimes none."""
        is_plain = self._calls is None and self._content is None and self._headers is None
        if is_plain and (self._reasoning is None or self._reasoning.is_over):
            return [Content(text)] if text else []
        message_parts: list[MessagePart] = []
        for char in text:
            if self._headers is not None:
                message_parts += [] if self.is_over else self._headers.push(char)
            elif self._calls is not None and self._calls.is_in_value:
                message_parts += self._called(char)
            else:
                whole: list[MessagePart] = [Content(char)]
                found = self._with_calls(whole if self._reasoning is None else self._reasoning.push(char))
                message_parts += self._without_primer(found) if self._num_primed else found
        return joined(message_parts)

    def flush(self, *, is_cut: bool = False, is_stopped: bool = False) -> list[MessagePart]:
        """The parts held back, at the end.

        Args:
            is_cut: Whether a limit ended the answer: then a call without its end tags stays incomplete.
            is_stopped: Whether a stop string ended the answer: then a call stays incomplete within a value.
        """
        message_parts: list[MessagePart] = [] if self._headers is None else self._headers.flush()
        if self._reasoning is not None:
            if not (is_cut or is_stopped):
                message_parts += self._called_in_reasoning(self._reasoning.take_call())
            message_parts += self._with_calls(self._reasoning.flush())
        if self._content is not None:
            message_parts += self._called(self._content.flush())
        if self._calls is not None and not self.is_over:
            message_parts += self._calls.flush(is_cut=is_cut, is_stopped=is_stopped)
        return joined(self._without_primer(message_parts))

    def _called_in_reasoning(self, text: str) -> list[MessagePart]:
        """Calls that a model has made without ending its reasoning; what is none is reasoning."""
        if self._output_format.call_format is None or not text:
            return []
        trial = OutputParser(replace(self._output_format, splits_reasoning=False, primer="", end=""))
        trial.push(text)
        trial.flush()
        return self._called(text) if trial.has_calls else [Reasoning(text.rstrip())]

    def _with_calls(self, pieces: list[MessagePart]) -> list[MessagePart]:
        message_parts: list[MessagePart] = []
        for piece in pieces:
            if not isinstance(piece, Content):
                message_parts.append(piece)
                continue
            text = piece.text
            if self._content is not None:
                num_marks = self._content.num_found
                text = "".join(map(self._content.push, text))
                if self._content.num_found > num_marks:
                    self._num_primed = 0
            message_parts += self._called(text)
        return message_parts

    def _called(self, text: str) -> list[MessagePart]:
        if self._calls is None:
            return [Content(text)] if text else []
        message_parts: list[MessagePart] = []
        for char in text:
            if self.is_over:
                break
            message_parts += self._calls.push(char)
        return message_parts

    def _without_primer(self, message_parts: list[MessagePart]) -> list[MessagePart]:
        """The same without what has come back of the primer, which is no part of the answer."""
        found: list[MessagePart] = []
        for piece in message_parts:
            if isinstance(piece, Content):
                text = piece.text[self._num_primed :]
                self._num_primed -= len(piece.text) - len(text)
                found.append(Content(text))
            else:
                self._num_primed = 0
                found.append(piece)
        return found
