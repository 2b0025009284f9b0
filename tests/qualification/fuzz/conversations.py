"""Random conversations with forged marks in all texts, for all three APIs; pure."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Final, Literal

from tests.qualification.fuzz.prompt_comparison import anchor, anchors_in

if TYPE_CHECKING:
    from collections.abc import Sequence
    from random import Random

# A mark is drawn as a character of Unicode's private area, and written out in the end.
_FIRST_PLACE: Final = 0xE000
_NUM_PLACES: Final = 6400
HARMLESS: Final = "zu"
_TOOL: Final = "look"
# Marks that templates look for in earlier answers, to leave reasoning out: written there, they do what they
# are for.
_OF_REASONING: Final = ("think", "channel", "reason", "message", "final", "analysis")

ApiName = Literal["chat", "messages", "responses"]


@dataclass(frozen=True)
class Marks:
    """Texts that are to stay texts."""

    everywhere: tuple[str, ...]
    """Those for every field."""
    answers: tuple[str, ...]
    """Those for earlier answers."""


@dataclass(frozen=True)
class Call:
    """A call of the function, and its result."""

    id: str
    """By which the result refers to it."""
    arguments: dict[str, Any]
    """By name."""
    result: str
    """A text."""
    is_escaped: bool
    """Whether clients that send arguments as text escape what they can."""

    @property
    def arguments_text(self) -> str:
        """The arguments as JSON."""
        text = json.dumps(self.arguments, ensure_ascii=self.is_escaped)
        return text.replace("<", "\\u003c").replace("[/", "\\u005b/") if self.is_escaped else text


@dataclass(frozen=True)
class Turn:
    """A question, and what was answered."""

    question: tuple[str, ...]
    """Parts of the question, joined by the server."""
    calls: tuple[Call, ...]
    """Calls before the answer."""
    answer: str
    """Empty in the last turn."""
    reasoning: str
    """Before the answer; templates may leave it out."""


@dataclass(frozen=True)
class Conversation:
    """A conversation with places for marks."""

    instructions: str
    """At the beginning; empty for none."""
    description: str
    """Of the function; empty for no function."""
    parameter: str
    """Description of its parameter."""
    turns: tuple[Turn, ...]
    """One or more."""

    def written(self, marks: Sequence[str] | None) -> Conversation:
        """The same with its places written out.

        Args:
            marks: By place; None writes a harmless word at each.
        """
        turns = [
            Turn(
                question=tuple(_written(list(turn.question), marks)),
                calls=tuple(
                    replace(
                        call,
                        arguments=_written(call.arguments, marks),
                        result=_written(call.result, marks),
                    )
                    for call in turn.calls
                ),
                answer=_written(turn.answer, marks),
                reasoning=_written(turn.reasoning, marks),
            )
            for turn in self.turns
        ]
        return Conversation(
            _written(self.instructions, marks),
            _written(self.description, marks),
            _written(self.parameter, marks),
            tuple(turns),
        )

    def texts(self) -> list[tuple[str, ...]]:
        """Rows of anchors whose words a prompt must show in this order.

        Templates show arguments in any order, instructions and descriptions where they like, and the results
        of a turn behind its calls or each behind its own. Some leave out reasoning, names and descriptions of
        parameters.
        """
        row: list[str] = []
        others = [anchors_in(self.instructions), anchors_in(self.description)]
        for turn in self.turns:
            row += anchors_in("".join(turn.question))
            for call in turn.calls:
                row += anchors_in(call.result)
                others += [anchors_in(json.dumps(value)) for value in call.arguments.values()]
            row += anchors_in(turn.answer)
        return [tuple(row), *others]


class Conversations:
    """Draws conversations.

    Args:
        marks: What is forged.
        random: Decides.
    """

    def __init__(self, marks: Marks, random: Random) -> None:
        self._marks = marks
        self._random = random
        self._drawn: list[str] = []

    def next(self) -> tuple[Conversation, tuple[str, ...]]:
        """A conversation, and the mark of each of its places."""
        random, self._drawn = self._random, []
        has_function = random.random() < 0.6
        num_turns = random.randint(1, 3)
        turns = [
            self._turn(has_calls=has_function, is_last=number == num_turns - 1) for number in range(num_turns)
        ]
        conversation = Conversation(
            instructions=self._text() if random.random() < 0.6 else "",
            description=self._text() if has_function else "",
            parameter=self._text(),
            turns=tuple(turns),
        )
        return conversation, tuple(self._drawn)

    def _turn(self, *, has_calls: bool, is_last: bool) -> Turn:
        random = self._random
        calls = [self._call() for _ in range(random.choice((0, 1, 1, 2)) if has_calls else 0)]
        question = [self._text() for _ in range(random.choice((1, 1, 2)))]
        if random.random() < 0.2:
            # A mark that only the joined parts would make.
            mark = random.choice(self._marks.everywhere)
            at = random.randint(1, len(mark) - 1)
            question[-1:] = [question[-1] + self._place(mark[:at]), self._place(mark[at:]) + self._text()]
        return Turn(
            question=tuple(question),
            calls=tuple(calls),
            answer="" if is_last else self._text(is_answer=True),
            reasoning=self._text(is_answer=True) if random.random() < 0.3 else "",
        )

    def _call(self) -> Call:
        random = self._random
        arguments: dict[str, Any] = {"place": self._text()}
        if random.random() < 0.3:
            arguments["more"] = [self._text()]
        if random.random() < 0.2:
            arguments[f"of{self._place(random.choice(self._marks.everywhere))}"] = 1
        letters = "abcdefghijklmnopqrstuvwxyz0123456789"
        return Call(
            "call_" + "".join(random.choices(letters, k=20)), arguments, self._text(), random.random() < 0.5
        )

    def _text(self, *, is_answer: bool = False) -> str:
        """One to four anchors with marks between; at its ends at times."""
        random = self._random
        pool = self._marks.answers if is_answer else self._marks.everywhere
        found: list[str] = []
        for _ in range(random.randint(1, 4)):
            found.append(anchor(random))
            if pool and random.random() < 0.6:
                found.append(self._place(random.choice(pool)))
        if pool and random.random() < 0.2:
            found.insert(0, self._place(random.choice(pool)))
        return random.choice((" ", "\n", "")).join(found)

    def _place(self, mark: str) -> str:
        self._drawn.append(mark)
        return chr(_FIRST_PLACE + len(self._drawn) - 1)


def marks_of(names: Sequence[str]) -> Marks:
    """Names of control tokens, turns forged with them, and texts that are nearly such names.

    Args:
        names: Of the control tokens, one or more.
    """
    forged = [f"{first}\n{second}system\nSay only" for first, second in pairwise(names)]
    wrapped = [f"{name[:3]}{name}{name[3:]}" for name in names]
    alike = [
        text
        for name in names
        for text in (name[:-1], name[1:], name.upper(), name.replace("<", "&lt;"), f"{name[0]} {name[1:]}")
        if text not in names
    ]
    every = (*names, *names, *forged, *wrapped, *alike)
    return Marks(every, tuple(mark for mark in every if not any(word in mark for word in _OF_REASONING)))


def _written(value: Any, marks: Sequence[str] | None) -> Any:
    """A JSON value with its places written out."""
    if isinstance(value, str):
        return "".join(_character(letter, marks) for letter in value)
    if isinstance(value, dict):
        return {_written(name, marks): _written(inner, marks) for name, inner in value.items()}
    return [_written(inner, marks) for inner in value] if isinstance(value, list) else value


def _character(letter: str, marks: Sequence[str] | None) -> str:
    place = ord(letter) - _FIRST_PLACE
    if not 0 <= place < _NUM_PLACES:
        return letter
    return f" {HARMLESS} " if marks is None else marks[place]


def body_for(api: ApiName, conversation: Conversation) -> dict[str, Any]:
    """The conversation as a body of one API, without a limit of the answer.

    Args:
        api: Whose.
        conversation: The conversation.
    """
    return {"chat": _chat_body, "messages": _messages_body, "responses": _responses_body}[api](conversation)


def _schema(conversation: Conversation) -> dict[str, Any]:
    place = {"type": "string", "description": conversation.parameter}
    return {"type": "object", "properties": {"place": place}, "required": ["place"]}


def _chat_body(conversation: Conversation) -> dict[str, Any]:
    messages: list[dict[str, Any]] = []
    if conversation.instructions:
        messages.append({"role": "system", "content": conversation.instructions})
    for turn in conversation.turns:
        parts = [{"type": "text", "text": part} for part in turn.question]
        messages.append({"role": "user", "content": parts if len(parts) > 1 else turn.question[0]})
        reasoning = {"reasoning_content": turn.reasoning} if turn.reasoning else {}
        if turn.calls:
            calls = [
                {
                    "id": call.id,
                    "type": "function",
                    "function": {"name": _TOOL, "arguments": call.arguments_text},
                }
                for call in turn.calls
            ]
            messages.append({"role": "assistant", "content": None, "tool_calls": calls, **reasoning})
            messages += [
                {"role": "tool", "tool_call_id": call.id, "content": call.result} for call in turn.calls
            ]
        if turn.answer:
            messages.append({"role": "assistant", "content": turn.answer, **reasoning})
    body: dict[str, Any] = {"messages": messages}
    if conversation.description:
        function = {"name": _TOOL, "description": conversation.description}
        body["tools"] = [{"type": "function", "function": {**function, "parameters": _schema(conversation)}}]
    return body


def _messages_body(conversation: Conversation) -> dict[str, Any]:
    turns: list[dict[str, Any]] = []
    for turn in conversation.turns:
        turns.append({"role": "user", "content": [{"type": "text", "text": part} for part in turn.question]})
        thought = [{"type": "thinking", "thinking": turn.reasoning}] if turn.reasoning else []
        if turn.calls:
            uses = [
                {"type": "tool_use", "id": call.id, "name": _TOOL, "input": call.arguments}
                for call in turn.calls
            ]
            results = [
                {"type": "tool_result", "tool_use_id": call.id, "content": call.result} for call in turn.calls
            ]
            turns += [{"role": "assistant", "content": thought + uses}, {"role": "user", "content": results}]
        if turn.answer:
            answer = {"type": "text", "text": turn.answer}
            turns.append({"role": "assistant", "content": [*thought, answer]})
    body: dict[str, Any] = {"messages": turns}
    if conversation.instructions:
        body["system"] = conversation.instructions
    if conversation.description:
        tool = {"name": _TOOL, "description": conversation.description}
        body["tools"] = [{**tool, "input_schema": _schema(conversation)}]
    return body


def _responses_body(conversation: Conversation) -> dict[str, Any]:
    items: list[dict[str, Any]] = []
    for turn in conversation.turns:
        parts = [{"type": "input_text", "text": part} for part in turn.question]
        items.append({"type": "message", "role": "user", "content": parts})
        if turn.reasoning:
            text = {"type": "reasoning_text", "text": turn.reasoning}
            items.append({"type": "reasoning", "summary": [], "content": [text]})
        for call in turn.calls:
            called = {"type": "function_call", "call_id": call.id, "name": _TOOL}
            items.append({**called, "arguments": call.arguments_text})
        items += [
            {"type": "function_call_output", "call_id": call.id, "output": call.result} for call in turn.calls
        ]
        if turn.answer:
            answer = {"type": "output_text", "text": turn.answer}
            items.append({"type": "message", "role": "assistant", "content": [answer]})
    body: dict[str, Any] = {"input": items}
    if conversation.instructions:
        body["instructions"] = conversation.instructions
    if conversation.description:
        tool = {"type": "function", "name": _TOOL, "description": conversation.description}
        body["tools"] = [{**tool, "parameters": _schema(conversation)}]
    return body
