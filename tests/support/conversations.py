"""Conversations as clients send them, in the form of chat templates; each text in them is another word."""

from typing import Any

Conversation = list[dict[str, Any]]

TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "look",
        "description": "Look at a place.",
        "parameters": {"type": "object", "properties": {"place": {"type": "string"}}, "required": ["place"]},
    },
}


def said(role: str, content: str, **fields: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **fields}


def call(id: str, place: str) -> dict[str, Any]:
    return {"id": id, "type": "function", "function": {"name": "look", "arguments": {"place": place}}}


def calling(*calls: dict[str, Any], content: str = "") -> dict[str, Any]:
    return said("assistant", content, tool_calls=list(calls))


def result(id: str | None, content: str) -> dict[str, Any]:
    return said("tool", content) if id is None else said("tool", content, tool_call_id=id)


OSLO, ROME = call("toolu_01AbCdEfGhIjKlMnOpQr", "oslo"), call("call_0123456789abcdef", "rome")
SUN, RAIN = result(OSLO["id"], "sun"), result(ROME["id"], "rain")

SYSTEM, USER, MORE, LAST = (
    said("system", "sys1"),
    said("user", "ask1"),
    said("user", "ask2"),
    said("user", "ask3"),
)
ANSWER, FURTHER = said("assistant", "say1"), said("assistant", "say2")
NEWS, LATEST = said("system", "news1"), said("system", "news2")

CONVERSATIONS: dict[str, Conversation] = {
    "a chat": [SYSTEM, USER, ANSWER, MORE],
    # Claude Code.
    "instructions behind the first question": [SYSTEM, USER, NEWS],
    "instructions behind a result": [SYSTEM, USER, NEWS, calling(OSLO), SUN, LATEST],
    "instructions in several turns": [SYSTEM, USER, NEWS, ANSWER, MORE, LATEST, FURTHER, LAST],
    "text behind a result": [SYSTEM, USER, calling(OSLO), SUN, MORE],
    "text behind a result, earlier": [SYSTEM, USER, calling(OSLO), SUN, MORE, ANSWER, LAST],
    "text and instructions behind results": [USER, calling(OSLO, ROME), SUN, RAIN, MORE, NEWS],
    # Codex.
    "several questions": [SYSTEM, USER, MORE, LAST],
    "instructions between questions": [SYSTEM, USER, NEWS, MORE, LATEST],
    "instructions before a question": [USER, ANSWER, NEWS, MORE],
    "instructions between a call and its result": [USER, calling(OSLO), NEWS, SUN],
    # OpenCode and LangChain.
    "several instructions at the beginning": [SYSTEM, NEWS, USER],
    # Agents of all kinds.
    "a call": [SYSTEM, USER, calling(OSLO), SUN],
    "a call with words": [USER, calling(OSLO, content="say1"), SUN],
    "calls in a row": [USER, calling(OSLO), SUN, calling(ROME), RAIN, ANSWER, MORE],
    "parallel calls": [SYSTEM, USER, calling(OSLO, ROME), SUN, RAIN],
    "parallel calls, results in another order": [USER, calling(OSLO, ROME), RAIN, SUN, ANSWER, MORE],
    "calls without ids": [
        USER,
        calling(call("", "oslo"), call("", "rome")),
        result(None, "sun"),
        result(None, "rain"),
    ],
    "several answers": [USER, ANSWER, FURTHER, MORE],
    "an answer, then a call": [USER, ANSWER, calling(OSLO), SUN, FURTHER, MORE],
    "reasoning": [USER, {**calling(OSLO, ROME), "reasoning_content": "think1"}, SUN, RAIN],
    "reasoning alone": [USER, said("assistant", "", reasoning_content="think1"), MORE],
    "a call that was interrupted": [USER, calling(OSLO), MORE],
    # Harnesses, and clients that cut the beginning off.
    "instructions alone": [SYSTEM],
    "an answer first": [SYSTEM, ANSWER, USER],
    "a call first": [SYSTEM, calling(OSLO), SUN],
    "a result first": [SUN, USER, ANSWER, MORE],
    "a result alone": [USER, RAIN],
}


def words_of(conversation: Conversation) -> set[str]:
    """All texts of a conversation but reasoning, which templates drop."""
    words = {message["content"] for message in conversation}
    calls = [each for message in conversation for each in message.get("tool_calls", ())]
    return (words | {each["function"]["arguments"]["place"] for each in calls}) - {""}
