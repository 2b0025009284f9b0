"""Repairs of conversations that a chat template refuses or does not write out, and which ones it needs.

Each repair changes nothing but the shape that it is for, and what is before that shape stays as it is: the
prompts of a conversation's turns begin alike, whichever repairs they need.
"""

from __future__ import annotations

import hashlib
import itertools
import re
from collections import deque
from dataclasses import dataclass
from enum import Flag, auto
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    Messages = list[dict[str, Any]]
    Conversation = tuple[Mapping[str, Any], ...]
    Probes = Mapping["Repair", tuple[Conversation, ...]]
    Render = Callable[[Sequence[Mapping[str, Any]], Sequence[Mapping[str, Any]]], str | None]

_BETWEEN: Final = "\n\n"
_ID_CHARS: Final = 9
THOUGHT_FIELDS: Final = ("reasoning_content", "reasoning", "thinking")
"""Fields of a message that hold reasoning, by the names that templates and clients use; the first is the
usual one."""
# Around instructions within the conversation, in plain words: tags are control tokens of some vocabularies.
_SYSTEM_BEGIN: Final = "[System message]\n"
_SYSTEM_END: Final = "\n[End of system message]"
_OPENING: Final = "(The user has said nothing yet.)"
_NO_RESULT: Final = "(no result)"
_THOUGHT: Final = "reasonone"
_SHOWN_THOUGHT: Final = re.compile(rf"(?<!['\"]){_THOUGHT}(?!['\"])")
# Mistral's templates want ids of nine letters and digits.
_ONE, _TWO, _LONG = "1abcdefgh", "2abcdefgh", "call_0123456789abcdef"
PROBED_TOOL: Final[Mapping[str, Any]] = {
    "type": "function",
    "function": {
        "name": "look",
        "description": "Look at a place.",
        "parameters": {
            "type": "object",
            "properties": {"place": {"type": "string", "description": "The place."}},
            "required": ["place"],
        },
    },
}
"""The function that is offered where a template is tried."""


class Repair(Flag):
    """A repair of a conversation."""

    DROP_EMPTY = auto()
    """Messages of the assistant without text and calls are left out."""
    RESULTS_FIRST = auto()
    """Results move ahead of what stands between them and their calls."""
    ADD_RESULTS = auto()
    """A call without a result gets a note as its result, if anything is behind its message."""
    JOIN_LEADING_SYSTEM = auto()
    """System messages at the beginning become one."""
    PLACE_LATER_SYSTEM = auto()
    """Other system messages become text of the result before them, or of the user, where they are."""
    FOLD_SYSTEM = auto()
    """System messages at the beginning become the beginning of the first user message."""
    SYSTEM_AS_USER = auto()
    """Instructions that are the whole conversation become a message of the user."""
    ADD_USER = auto()
    """A note of the user comes before calls, or answers, that came without one."""
    OPEN_WITH_USER = auto()
    """A note of the user comes before another that speaks first."""
    SPLIT_CALLS = auto()
    """A message of several calls becomes messages of one call, each followed by its results."""
    FOLD_AFTER_RESULTS = auto()
    """Append what the user says directly behind a result to the result."""
    JOIN_NEIGHBOURS = auto()
    """Neighbouring messages of the user become one, and so do those of the assistant."""
    SHORT_IDS = auto()
    """Ids of calls become nine letters and digits, as Mistral's templates want them."""
    TEXT_AS_THOUGHT = auto()
    """Text beside calls becomes the end of the reasoning ahead of them."""
    RESULTS_INSIDE = auto()
    """Results become `tool_responses` of the message with their calls, and the answer behind them its text,
    as Gemma 4's first templates want them."""


EVERY: Final = ~(Repair.TEXT_AS_THOUGHT | Repair.RESULTS_INSIDE)
"""All but those with which other templates show no texts beside calls, or no results."""


@dataclass(frozen=True, slots=True)
class Needs:
    """Repairs that a template needs."""

    without_tools: Repair
    """For conversations in which the model may call nothing."""
    with_tools: Repair
    """For others."""


@dataclass(frozen=True, slots=True)
class ThoughtForm:
    """Form in which a template shows earlier reasoning."""

    field: str = "reasoning_content"
    """Field of the message that holds it, or the type of a part of `content`."""
    is_part: bool = False
    """Whether it is a part of `content`: `{"type": "thinking", "thinking": …}`, ahead of the text."""

    def apply(self, message: Mapping[str, Any]) -> Mapping[str, Any]:
        """A message with its reasoning in this form."""
        thought = message.get("reasoning_content")
        if message["role"] != "assistant" or not thought or self == _USUAL:
            return message
        content = message["content"]
        if self.is_part:
            parts = content if isinstance(content, list) else [{"type": "text", "text": content}]
            shown = [{"type": self.field, self.field: thought}, *(parts if content else ())]
            return {**message, "content": shown}
        return {**message, self.field: thought}


_USUAL: Final = ThoughtForm()
_THOUGHT_FORMS: Final = (
    _USUAL,
    *(ThoughtForm(name) for name in (*THOUGHT_FIELDS[1:], "thought")),
    ThoughtForm("thinking", is_part=True),
)


@dataclass(frozen=True, slots=True)
class ContentForms:
    """Forms in which a template shows the texts of messages."""

    in_parts: frozenset[str]
    """Roles whose `content` it shows as a list of parts only: `[{"type": "text", "text": …}]`."""
    hidden: frozenset[str]
    """Roles whose texts it shows in neither form."""


def repaired(messages: Sequence[Mapping[str, Any]], repairs: Repair) -> Messages:
    """A conversation after some repairs, in the order of their definition.

    Args:
        messages: Messages in the form of chat templates: each with `role` and `content`, which is text.
        repairs: What to repair.
    """
    found = [dict(message) for message in messages]
    for repair, step in _STEPS.items():
        if repair in repairs:
            found = step(found)
    return found


def _drop_empty(messages: Messages) -> Messages:
    return [
        message
        for message in messages
        if message["role"] != "assistant" or message["content"] or message.get("tool_calls")
    ]


def _results_first(messages: Messages) -> Messages:
    found: Messages = []
    for turn in _turns(messages):
        if turn[0].get("tool_calls"):
            found += [turn[0], *_results(turn), *_others(turn)]
        else:
            found += turn
    return found


def _add_results(messages: Messages) -> Messages:
    found: Messages = []
    turns = _turns(messages)
    for turn in turns:
        calls = turn[0].get("tool_calls") or []
        if not calls or (len(turn) == 1 and turn is turns[-1]):
            found += turn
            continue
        answered = set(_owners(calls, _results(turn)))
        missing = [_without_result(call) for index, call in enumerate(calls) if index not in answered]
        end = 1 + max((index for index, message in enumerate(turn) if message["role"] == "tool"), default=0)
        found += [*turn[:end], *missing, *turn[end:]]
    return found


def _without_result(call: Mapping[str, Any]) -> dict[str, Any]:
    named = {"tool_call_id": call["id"]} if call.get("id") else {}
    return {"role": "tool", "content": _NO_RESULT, **named}


def _join_leading_system(messages: Messages) -> Messages:
    num_system = _num_leading_system(messages)
    return [*([_merged(messages[:num_system])] if num_system else []), *messages[num_system:]]


def _place_later_system(messages: Messages) -> Messages:
    num_system = _num_leading_system(messages)
    later: Messages = []
    for message in messages[num_system:]:
        if message["role"] != "system":
            later.append(message)
        elif message["content"]:
            later.append({**message, "content": f"{_SYSTEM_BEGIN}{message['content']}{_SYSTEM_END}"})
        elif later and later[-1]["role"] == "assistant" and not later[-1].get("tool_calls"):
            # Left out, it would make neighbours of two answers.
            later.append(message)
    # With a result, since a user message would end the turn: some templates then drop the turn's reasoning.
    placed = _joined(later, lambda group, message: group[0]["role"] == "tool" and message["role"] == "system")
    as_user = [{**message, "role": "user"} if message["role"] == "system" else message for message in placed]
    return [*messages[:num_system], *as_user]


def _fold_system(messages: Messages) -> Messages:
    num_system = _num_leading_system(messages)
    system, rest = messages[:num_system], messages[num_system:]
    if not any(message["content"] for message in system):
        return rest
    first = rest[:1] if rest and rest[0]["role"] == "user" else []
    return [{**_merged([*system, *first]), "role": "user"}, *rest[len(first) :]]


def _system_as_user(messages: Messages) -> Messages:
    is_whole = bool(messages) and _num_leading_system(messages) == len(messages)
    return [{**_merged(messages), "role": "user"}] if is_whole else messages


def _add_user(messages: Messages) -> Messages:
    roles = [message["role"] for message in messages]
    before = roles[: roles.index("user")] if "user" in roles else roles
    # Once the model has gone on from results, a turn of the conversation had no user: its note stays.
    went_on = "tool" in before and "assistant" in before[before.index("tool") :]
    has_others = any(role != "system" for role in roles)
    return _opened(messages) if went_on or (before is roles and has_others) else messages


def _open_with_user(messages: Messages) -> Messages:
    rest = messages[_num_leading_system(messages) :]
    return _opened(messages) if rest and rest[0]["role"] != "user" else messages


def _opened(messages: Messages) -> Messages:
    num_system = _num_leading_system(messages)
    return [*messages[:num_system], {"role": "user", "content": _OPENING}, *messages[num_system:]]


def _split_calls(messages: Messages) -> Messages:
    found: Messages = []
    for turn in _turns(messages):
        calls = turn[0].get("tool_calls") or []
        if len(calls) < 2:
            found += turn
            continue
        results = _results(turn)
        by_call: list[Messages] = [[] for _call in calls]
        for result, owner in zip(results, _owners(calls, results), strict=True):
            by_call[owner].append(result)
        for index, (call, answers) in enumerate(zip(calls, by_call, strict=True)):
            message = {"role": "assistant", "content": ""} if index else turn[0]
            found += [{**message, "tool_calls": [call]}, *answers]
        found += _others(turn)
    return found


def _fold_after_results(messages: Messages) -> Messages:
    return _joined(messages, lambda group, message: group[0]["role"] == "tool" and message["role"] == "user")


def _join_neighbours(messages: Messages) -> Messages:
    # Text and the calls behind it, too, although some templates leave out text beside calls: apart from them
    # it is refused once the turn has another answer, and if it were joined then, the prompt would change.
    def joins(group: Messages, message: dict[str, Any]) -> bool:
        is_same = group[-1]["role"] == message["role"] and not group[-1].get("tool_calls")
        return is_same and message["role"] in {"user", "assistant"}

    return _joined(messages, joins)


def _short_ids(messages: Messages) -> Messages:
    found: Messages = []
    for number, turn in enumerate(_turns(messages)):
        calls, results = turn[0].get("tool_calls") or [], _results(turn)
        ids = [_short_id(call.get("id") or f"{number}.{index}") for index, call in enumerate(calls)]
        owners = _owners(calls, results) if calls else []
        named = iter(
            [ids[owner] for owner in owners]
            or [_short_id(str(result.get("tool_call_id") or number)) for result in results]
        )
        for message in turn:
            if message["role"] == "tool":
                found.append({**message, "tool_call_id": next(named)})
            elif calls and message is turn[0]:
                renamed = [{**call, "id": short} for call, short in zip(calls, ids, strict=True)]
                found.append({**message, "tool_calls": renamed})
            else:
                found.append(message)
    return found


def _text_as_thought(messages: Messages) -> Messages:
    found: Messages = []
    for message in messages:
        if message.get("tool_calls") and message["content"]:
            thought = _text((message.get("reasoning_content"), message["content"]))
            message = {**message, "content": "", "reasoning_content": thought}  # noqa: PLW2901 - the same
        found.append(message)
    return found


def _results_inside(messages: Messages) -> Messages:
    found: Messages = []
    is_answered = False
    for turn in _turns(messages):
        calls, results = turn[0].get("tool_calls") or [], _results(turn)
        if is_answered and turn[0]["role"] == "assistant" and not calls:
            found[-1] = {**found[-1], "content": _text((found[-1]["content"], turn[0]["content"]))}
            found += turn[1:]
        elif calls and results:
            names = [calls[owner]["function"]["name"] for owner in _owners(calls, results)]
            responses = [
                {"name": name, "response": result["content"]}
                for name, result in zip(names, results, strict=True)
            ]
            found += [{**turn[0], "tool_responses": responses}, *_others(turn)]
        else:
            found += turn
        is_answered = bool(calls and results) and not _others(turn)
    return found


_STEPS: Final[dict[Repair, Callable[[Messages], Messages]]] = {
    Repair.DROP_EMPTY: _drop_empty,
    Repair.RESULTS_FIRST: _results_first,
    Repair.ADD_RESULTS: _add_results,
    Repair.JOIN_LEADING_SYSTEM: _join_leading_system,
    Repair.PLACE_LATER_SYSTEM: _place_later_system,
    Repair.FOLD_SYSTEM: _fold_system,
    Repair.SYSTEM_AS_USER: _system_as_user,
    Repair.ADD_USER: _add_user,
    Repair.OPEN_WITH_USER: _open_with_user,
    Repair.SPLIT_CALLS: _split_calls,
    Repair.FOLD_AFTER_RESULTS: _fold_after_results,
    Repair.JOIN_NEIGHBOURS: _join_neighbours,
    Repair.SHORT_IDS: _short_ids,
    Repair.TEXT_AS_THOUGHT: _text_as_thought,
    Repair.RESULTS_INSIDE: _results_inside,
}


def _num_leading_system(messages: Messages) -> int:
    return sum(1 for _ in itertools.takewhile(lambda message: message["role"] == "system", messages))


def _turns(messages: Messages) -> list[Messages]:
    """Runs of messages that each begin with the assistant's, but for the first."""
    turns: list[Messages] = []
    for message in messages:
        if message["role"] == "assistant" or not turns:
            turns.append([])
        turns[-1].append(message)
    return turns


def _results(turn: Messages) -> Messages:
    return [message for message in turn if message["role"] == "tool"]


def _others(turn: Messages) -> Messages:
    """Messages of the turn besides its first one and results."""
    return [message for message in turn[1:] if message["role"] != "tool"]


def _owners(calls: Sequence[Mapping[str, Any]], results: Messages) -> list[int]:
    """Index of the call of each result: the next one of its id, or else the next that no result names.

    Args:
        calls: One or more.
        results: Results of these calls, or of none that is known.
    """
    by_id: dict[str, deque[int]] = {}
    for index, call in enumerate(calls):
        if call.get("id"):
            by_id.setdefault(call["id"], deque()).append(index)
    named: list[int | None] = []
    for result in results:
        same = by_id.get(result.get("tool_call_id") or "")
        named.append(None if same is None else same[0] if len(same) == 1 else same.popleft())
    free = iter(sorted(set(range(len(calls))) - set(named)))
    last = len(calls) - 1
    return [next(free, last) if owner is None else owner for owner in named]


def _short_id(text: str) -> str:
    if len(text) == _ID_CHARS and text.isascii() and text.isalnum():
        return text
    return hashlib.sha256(text.encode(errors="surrogatepass")).hexdigest()[:_ID_CHARS]


def _joined(messages: Messages, joins: Callable[[Messages, dict[str, Any]], bool]) -> Messages:
    """Messages, some of which became a part of the one before them.

    Args:
        messages: All messages.
        joins: Whether a message becomes a part of those before it that are one message already.
    """
    groups: list[Messages] = []
    for message in messages:
        if groups and joins(groups[-1], message):
            groups[-1].append(message)
        else:
            groups.append([message])
    return [_merged(group) for group in groups]


def _merged(group: Messages) -> dict[str, Any]:
    """One message of several: the fields of the first that has them, and all texts."""
    if len(group) == 1:
        return group[0]
    whole: dict[str, Any] = {}
    for message in reversed(group):
        whole |= message
    for name in ("content", "reasoning_content"):
        if name in whole:
            whole[name] = _text(message.get(name) for message in group)
    return whole


def _text(parts: Iterable[Any]) -> str:
    return _BETWEEN.join(part for part in parts if part)


def needs_of(render: Render, *, knows_tools: bool) -> Needs:
    """Repairs that a template needs: those of shapes that it refuses, leaves out or moves, in some place.

    What a shape needs depends on the template alone, not on where a conversation has it. So the beginning of
    a conversation is written alike in each of its turns, by other processes too: prefix caches find it. For
    this it matters as well that nothing is moved ahead, as some templates move all instructions.

    Args:
        render: Returns the prompt of a conversation with some tools; None if the template refuses it.
        knows_tools: Whether the template knows calls and results.
    """
    talk = _needs(render, _TALK, _TALK_PROBES, ()) or Repair(0)
    if not knows_tools:
        return Needs(talk, talk)
    calls = _needs(render, _CALLED, _CALL_PROBES, (PROBED_TOOL,))
    if calls is None:
        return Needs(talk, talk)
    if _takes_results_inside(render):
        calls |= Repair.RESULTS_INSIDE
    calls_without_tools = _needs(render, _CALLED, _CALL_PROBES, ())
    thinking = render(_THOUGHT_PROBES[0], (PROBED_TOOL,))
    if thinking is None or _THOUGHT not in thinking:
        # Text that is not shown beside calls would not be shown as reasoning either.
        calls &= ~Repair.TEXT_AS_THOUGHT
        calls_without_tools = calls_without_tools and calls_without_tools & ~Repair.TEXT_AS_THOUGHT
    # Some templates place tools in the user's message: they refuse instructions alone with tools only.
    return Needs(
        without_tools=talk
        | (calls if calls_without_tools is None else calls_without_tools | (calls & Repair.RESULTS_INSIDE)),
        with_tools=(talk & ~Repair.SYSTEM_AS_USER) | calls,
    )


def content_forms_of(
    render: Callable[[Sequence[Mapping[str, Any]], Sequence[Mapping[str, Any]], frozenset[str]], str | None],
) -> ContentForms:
    """Forms in which a template shows texts, found by what comes out.

    Templates of models that see loop over parts, and some show nothing of a text that is none.

    Args:
        render: Returns the prompt of a conversation with some tools, in which messages of the given roles
            have parts; None if the template refuses it.
    """
    in_parts: frozenset[str] = frozenset()
    hidden: frozenset[str] = frozenset()
    for role, (conversation, tools) in _FORM_PROBES.items():
        text = render(conversation, tools, in_parts)
        if text is not None and _shows(text, conversation):
            continue
        other = render(conversation, tools, in_parts | {role})
        if other is not None and _shows(other, conversation):
            in_parts |= {role}
        elif text is not None or other is not None:
            hidden |= {role}
    return ContentForms(in_parts, hidden)


def _takes_results_inside(render: Render) -> bool:
    """Whether a template knows no messages with results, and shows those within the message of a call."""
    role, result = "stranger", _result(_ONE)
    as_role, as_stranger, inside = (
        render(conversation, (PROBED_TOOL,))
        for conversation in (
            _CALLED[:3],
            (*_CALLED[:2], {**result, "role": role}),
            repaired(_CALLED[:3], Repair.RESULTS_INSIDE),
        )
    )
    is_known = as_role is None or as_stranger is None or as_stranger.replace(role, "tool") != as_role
    return not is_known and inside is not None and result["content"] in inside


def thought_form_of(render: Callable[[ThoughtForm, Conversation], str | None]) -> ThoughtForm:
    """Form in which a template shows earlier reasoning, found by what comes out; the usual one without any.

    Args:
        render: Returns the prompt of a conversation whose reasoning is in a form, with a tool; None if the
            template refuses it.
    """

    def shows(form: ThoughtForm) -> bool:
        texts = [render(form, conversation) for conversation in _THOUGHT_PROBES]
        # In quotes it is a part that is printed as it is.
        return any(text is not None and _SHOWN_THOUGHT.search(text) is not None for text in texts)

    return next(filter(shows, _THOUGHT_FORMS), _USUAL)


def hides_calls(render: Callable[[ThoughtForm, Conversation], str | None]) -> bool:
    """Whether a template takes calls and shows nothing of them.

    Args:
        render: See `thought_form_of`.
    """
    texts = [render(_USUAL, conversation) for conversation in _CALLED_OR_NOTHING]
    shown = [text for text in texts if text is not None]
    return bool(shown) and not any(_shows(text, (_calls(_ONE),)) for text in shown)


def _needs(
    render: Render,
    control: Conversation,
    probes: Probes,
    tools: Sequence[Mapping[str, Any]],
) -> Repair | None:
    """Needs by probes whose shapes are all that sets them apart from a control; None if that is refused."""
    text = render(control, tools)
    if text is None:
        return None
    is_shown = _shows(text, control)

    def takes(probe: Conversation) -> bool:
        found = render(probe, tools)
        return found is not None and (not is_shown or _shows(found, probe))

    needs = Repair(0)
    for repair, conversations in probes.items():
        if not all(map(takes, conversations)):
            needs |= repair
    return needs


def _shows(text: str, conversation: Conversation) -> bool:
    """Whether a prompt has all texts of a conversation, those of calls included, in their order."""
    place = 0
    for word in _words(conversation):
        place = text.find(word, place)
        if place < 0:
            return False
    return True


def _words(conversation: Conversation) -> Iterator[str]:
    for message in conversation:
        if message["content"]:
            yield message["content"]
        for call in message.get("tool_calls", ()):
            yield call["function"]["arguments"]["place"]


def _said(role: str, word: str) -> Mapping[str, Any]:
    return {"role": role, "content": word}


def _calls(*call_ids: str) -> Mapping[str, Any]:
    calls = [
        {"id": name, "type": "function", "function": {"name": "look", "arguments": {"place": f"place{name}"}}}
        for name in call_ids
    ]
    return {"role": "assistant", "content": "", "tool_calls": calls}


def _result(call_id: str) -> Mapping[str, Any]:
    return {"role": "tool", "tool_call_id": call_id, "content": f"result{call_id}"}


_SYSTEM: Final = _said("system", "systemone")


_NEWS: Final = _said("system", "systemtwo")


_USER: Final = _said("user", "userone")


_MORE: Final = _said("user", "usertwo")


_LAST: Final = _said("user", "userthree")


_ANSWER: Final = _said("assistant", "assistantone")


_FURTHER: Final = _said("assistant", "assistanttwo")


_TALK: Final[Conversation] = (_USER, _ANSWER, _MORE)


_TALK_PROBES: Final[Probes] = {
    Repair.DROP_EMPTY: ((_USER, _said("assistant", ""), _MORE),),
    Repair.JOIN_LEADING_SYSTEM: ((_SYSTEM, _NEWS, _USER),),
    Repair.PLACE_LATER_SYSTEM: (
        (_USER, _NEWS),
        (_USER, _NEWS, _ANSWER, _MORE),
        (_USER, _ANSWER, _NEWS, _MORE),
        (_SYSTEM, _USER, _NEWS, _ANSWER, _MORE),
    ),
    Repair.FOLD_SYSTEM: ((_SYSTEM, _USER),),
    Repair.SYSTEM_AS_USER: ((_SYSTEM,),),
    Repair.ADD_USER: ((_ANSWER,),),
    Repair.OPEN_WITH_USER: ((_ANSWER, _USER),),
    Repair.JOIN_NEIGHBOURS: (
        (_USER, _MORE),
        (_USER, _MORE, _ANSWER, _LAST),
        (_USER, _ANSWER, _FURTHER, _MORE),
    ),
}


_CALLED: Final[Conversation] = (_USER, _calls(_ONE), _result(_ONE), _ANSWER, _MORE)


# Some templates write calls only where there is no content at all.
_CALLED_OR_NOTHING: Final[tuple[Conversation, ...]] = (
    _CALLED,
    (_USER, {**_calls(_ONE), "content": None}, *_CALLED[2:]),
)


_CALL_PROBES: Final[Probes] = {
    Repair.RESULTS_FIRST: ((_USER, _calls(_ONE), _MORE, _result(_ONE), _ANSWER, _LAST),),
    Repair.ADD_RESULTS: (
        (_USER, _calls(_ONE), _MORE),
        (_USER, _calls(_ONE), _MORE, _ANSWER, _LAST),
        (_USER, _calls(_ONE), _ANSWER, _MORE),
    ),
    Repair.PLACE_LATER_SYSTEM: (
        (_USER, _calls(_ONE), _result(_ONE), _NEWS),
        (_USER, _calls(_ONE), _result(_ONE), _NEWS, _ANSWER, _MORE),
    ),
    Repair.SYSTEM_AS_USER: ((_SYSTEM,),),
    Repair.ADD_USER: (
        (_calls(_ONE), _result(_ONE)),
        (_SYSTEM, _calls(_ONE), _result(_ONE)),
        (_calls(_ONE), _result(_ONE), _ANSWER, _USER),
    ),
    Repair.SPLIT_CALLS: ((_USER, _calls(_ONE, _TWO), _result(_ONE), _result(_TWO), _ANSWER, _MORE),),
    Repair.FOLD_AFTER_RESULTS: (
        (_USER, _calls(_ONE), _result(_ONE), _MORE),
        (_USER, _calls(_ONE), _result(_ONE), _MORE, _ANSWER, _LAST),
    ),
    Repair.SHORT_IDS: ((_USER, _calls(_LONG), _result(_LONG), _ANSWER, _MORE),),
    Repair.TEXT_AS_THOUGHT: (
        (_USER, {**_calls(_ONE), "content": "textone"}, _result(_ONE)),
        (_USER, {**_calls(_ONE), "content": "textone", "reasoning_content": _THOUGHT}, _result(_ONE)),
    ),
}


# With a call that the conversation goes on from, and in an earlier turn: many templates drop the latter.
_THOUGHT_PROBES: Final[tuple[Conversation, ...]] = (
    (_USER, {**_calls(_ONE), "reasoning_content": _THOUGHT}, _result(_ONE)),
    (_USER, {**_ANSWER, "reasoning_content": _THOUGHT}, _MORE),
)


_FORM_PROBES: Final[Mapping[str, tuple[Conversation, Sequence[Mapping[str, Any]]]]] = {
    "user": ((_USER,), ()),
    "assistant": (_TALK, ()),
    "system": ((_SYSTEM, _USER), ()),
    "tool": (_CALLED, (PROBED_TOOL,)),
}
