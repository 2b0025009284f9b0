"""Conversations of random shapes and texts, none of which has the name of a control token; pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from mesh.text.chat_template import Ending
from tests.support.conversations import TOOL, Conversation, said

if TYPE_CHECKING:
    from collections.abc import Sequence
    from random import Random

# Joined in any order, without anything between them, they make no name of a control token.
_PARTS: Final = (
    "hello",
    "World",
    "don't",
    " two  blanks ",
    "  leading",
    "trailing  ",
    "\n",
    "\n\nlines\n\n",
    "\r\nof Windows\r\n",
    "\ttab",
    "a < b > c",
    "x[0] = y[1]",
    'if (a<b && c>d) { return "q"; }',
    "def f(x):\n    return x ** 2\n",
    "`code` ```sh\nls -l | wc\n```",
    "<div class='x'>text</div>",
    "<br/>",
    "<table><tr><td>1</td></tr></table>",
    "&lt;b&gt; &amp;",
    "<!-- remark -->",
    '{"k": [1, 2, {"z": null}], "t": "\\n"}',
    "{{ braces }} {% per cent %}",
    "# Title\n* **bold** _slanted_",
    "[link](http://example.org/?a=1&b=2)",
    "|pipe|",
    "<",
    "> quote",
    "</",
    "<|",
    "|>",
    "<<EOF\ncat\nEOF",
    "[/x]",
    "### Instruction: ",
    "Human: ",
    "1234567 89 3.14159e-10",
    "日本語 テキスト。",
    "中文，标点！",
    "한국어",
    "émile Ünïcode ß",
    "e\u0301\u0323 combining",
    "Ελληνικά и русский",
    "العربية עברית",
    "हिन्दी ไทย",
    "🙂👍🏽\U0001f9d1\u200d\U0001f680",
    "\u00a0no break\u3000",
    "▁Ġ",
)
_SETTINGS: Final[Sequence[dict[str, Any]]] = (
    {},
    {},
    {"enable_thinking": True},
    {"enable_thinking": False, "reasoning_effort": "low"},
)


@dataclass(frozen=True)
class RandomConversation:
    """A conversation, and how a prompt is made of it: arguments of `ChatTemplate.render`."""

    messages: Conversation
    variables: dict[str, Any]
    tools: list[dict[str, Any]]
    ending: Ending


def random_conversation(random: Random) -> RandomConversation:
    """A conversation with or without instructions, tools, calls, results and reasoning.

    Args:
        random: Decides.
    """
    messages = [said("system", _text(random))] if random.random() < 0.5 else []
    for _ in range(random.randint(1, 3)):
        messages += _turn(random)
    is_continued = random.random() < 0.5 and not messages[-1].get("tool_calls")
    if messages[-1]["role"] == "assistant" and not is_continued:
        messages.append(said("user", _text(random)))
    if messages[-1]["role"] == "assistant":
        ending = Ending.CONTINUED
    else:
        ending = random.choice((Ending.ANSWER, Ending.ANSWER, Ending.MESSAGES))
    tools = [_tool(random), TOOL][: random.choice((0, 1, 1, 2))]
    return RandomConversation(messages, random.choice(_SETTINGS), tools, ending)


def _turn(random: Random) -> Conversation:
    """A question and what comes behind it: an answer, calls and their results, or nothing."""
    messages = [said("user", _text(random))]
    kind = random.random()
    if kind < 0.4:
        messages.append(_thought(random, said("assistant", _text(random))))
    elif kind < 0.7:
        ids = random.sample(("1abcdefgh", "call_12345678901", "toolu_01AbCdEf"), random.choice((1, 1, 2)))
        words = random.choice(("", _text(random)))
        calls = [_call(random, each) for each in ids]
        messages.append(_thought(random, said("assistant", words, tool_calls=calls)))
        messages += [said("tool", _text(random), tool_call_id=each, name="look") for each in ids]
        if random.random() < 0.5:
            messages.append(said("assistant", _text(random)))
    return messages


def _thought(random: Random, message: dict[str, Any]) -> dict[str, Any]:
    return {**message, "reasoning_content": _text(random)} if random.random() < 0.4 else message


def _call(random: Random, id: str) -> dict[str, Any]:
    arguments = {
        "place": _text(random),
        _text(random): _text(random),
        "number": random.choice((3, -0.5, True, None)),
        "list": [_text(random), {"key": _text(random)}],
    }
    return {"id": id, "type": "function", "function": {"name": "look", "arguments": arguments}}


def _tool(random: Random) -> dict[str, Any]:
    place = {"type": "string", "description": _text(random), "enum": [_text(random), "b"]}
    parameters = {"type": "object", "properties": {"place": place, "n": {"type": "integer"}}}
    function = {"name": "look_up", "description": _text(random), "parameters": parameters}
    return {"type": "function", "function": function}


def _text(random: Random) -> str:
    return random.choice(("", " ")).join(random.choices(_PARTS, k=random.randint(1, 8)))
