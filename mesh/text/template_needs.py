"""Needs of a chat template: which repairs of conversations it depends on, found by trying short ones."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from mesh.text.conversation_repair import Repair

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    Conversation = tuple[Mapping[str, Any], ...]
    Probes = Mapping[Repair, tuple[Conversation, ...]]
    Render = Callable[[Sequence[Mapping[str, Any]], Sequence[Mapping[str, Any]]], str | None]

# Mistral's templates want ids of nine letters and digits.
_ONE, _TWO, _LONG = "1abcdefgh", "2abcdefgh", "call_0123456789abcdef"
_TOOL: Final[Mapping[str, Any]] = {
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


@dataclass(frozen=True, slots=True)
class Needs:
    """Repairs that a template needs."""

    without_tools: Repair
    """For conversations in which the model may call nothing."""
    with_tools: Repair
    """For others."""


@dataclass(frozen=True, slots=True)
class ContentForms:
    """Forms in which a template shows the texts of messages."""

    in_parts: frozenset[str]
    """Roles whose `content` it shows as a list of parts only: `[{"type": "text", "text": …}]`."""
    hidden: frozenset[str]
    """Roles whose texts it shows in neither form."""


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
    calls = _needs(render, _CALLED, _CALL_PROBES, (_TOOL,))
    if calls is None:
        return Needs(talk, talk)
    calls_without_tools = _needs(render, _CALLED, _CALL_PROBES, ())
    # Some templates place tools in the user's message: they refuse instructions alone with tools only.
    return Needs(
        without_tools=talk | (calls if calls_without_tools is None else calls_without_tools),
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
}
_FORM_PROBES: Final[Mapping[str, tuple[Conversation, Sequence[Mapping[str, Any]]]]] = {
    "user": ((_USER,), ()),
    "assistant": (_TALK, ()),
    "system": ((_SYSTEM, _USER), ()),
    "tool": (_CALLED, (_TOOL,)),
}
