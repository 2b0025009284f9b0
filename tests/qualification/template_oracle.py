"""Conversations that llama.cpp's own template code renders: whether they are rendered here too, and alike.

    python -m tests.qualification.template_oracle

Its `llama-server` of the version that is installed is the oracle: it is built once, in about eight minutes,
unless `--server` names one. Each template of its source is tried with each conversation, which both get as
the body of a request. A row is a conversation that one of them refuses, or whose prompts differ, with the
reason if it is known. The exit status is 1 if one is refused here only, or if a reason is not known.
"""

from __future__ import annotations

import argparse
import difflib
import json
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections import Counter
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from mesh.api.chat_prompt import conversation_of
from mesh.api.protocol import ChatBody
from mesh.cluster.addresses import free_port
from mesh.text.chat_template import ChatTemplate
from mesh.text.message_parts import knows_tools
from meshbench.lab.llama_cpp_build import build_llama_rpc
from spanmesh_proto.errors import InvalidRequest, MeshError
from tests.support.chat_templates import collected_templates
from tests.support.tiny_models import TinyModel

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

_PATIENCE_S: Final = 30.0
_PAUSE_S: Final = 0.01
_SHOWN_CHARS: Final = 400
# Of the vocabulary of tiny models.
_BOS: Final = "<s>"
_EOS: Final = "</s>"
# Ends of answers of models that are tried.
_ENDS: Final = ("<turn|>",)
# llama.cpp has values of its own for these.
_VARIABLES: Final = {"enable_thinking": True, "date_string": "30 Nov 2026", "datetime": "Nov 30 2026"}


def _said(role: str, content: Any) -> dict[str, Any]:
    return {"role": role, "content": content}


def _call(number: int, name: str, arguments: Any) -> dict[str, Any]:
    return {
        "id": f"{number}abcdefgh",
        "type": "function",
        "function": {"name": name, "arguments": json.dumps(arguments, ensure_ascii=False)},
    }


def _calls(*calls: dict[str, Any], content: str | None = "", **fields: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": content, "tool_calls": list(calls), **fields}


def _result(number: int, name: str) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": f"{number}abcdefgh", "name": name, "content": f"result {number}"}


def _tool(name: str, **fields: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, **fields}}


def _given_as(arguments: str) -> dict[str, Any]:
    """A call whose arguments are a text that need not be JSON."""
    call = _call(1, "look_up", {})
    return {**call, "function": {**call["function"], "arguments": arguments}}


def _without_id(message: dict[str, Any]) -> dict[str, Any]:
    rest = {name: value for name, value in message.items() if name != "tool_call_id"}
    calls = [{**call, "id": ""} for call in message.get("tool_calls", ())]
    return {**rest, "tool_calls": calls} if calls else rest


_USER: Final = _said("user", "What is the weather?")
_MORE: Final = _said("user", "And now?")
_ANSWER: Final = _said("assistant", "It is fine.")
_SYSTEM: Final = _said("system", "Be brief.")
_OSLO: Final = _call(1, "look_up", {"place": "Oslo"})
_DEEP: Final = _call(
    1, "look_up", {"place": 'Köln "x" a<b', "count": 7, "is_so": True, "deep": {"k": ["é", 1.5, {"z": "y"}]}}
)
_FOUND: Final = _result(1, "look_up")
_PARAMETERS: Final = {
    "type": "object",
    "properties": {
        "place": {"type": "string", "description": "A place."},
        "count": {"type": "integer", "description": "A number."},
        "deep": {"type": "object", "properties": {}, "description": "An object."},
        "is_so": {"type": "boolean", "description": "Whether it is so."},
    },
    "required": ["place"],
}
_TOOLS: Final = [
    _tool("look_up", description="Looks something up.", parameters=_PARAMETERS),
    _tool("find", description="Finds something.", parameters=_PARAMETERS),
]
# Schemas that have more, or less, than a type each.
_TYPES: Final = {
    "type": "object",
    "properties": {
        "either": {"type": ["string", "null"], "description": "One of two."},
        "any_of": {"anyOf": [{"type": "string"}, {"type": "integer"}]},
        "one_of": {"oneOf": [{"type": "string"}, {"const": 1}], "default": 1},
        "word": {"enum": ["a", "b"]},
        "number": {"type": "number", "enum": [1, 2.5], "default": 1, "minimum": 0},
        "items": {"type": "array"},
        "texts": {"type": "array", "items": {"type": "string"}},
        "deep": {"type": "object", "properties": {"in": {"type": "boolean"}}, "required": ["in"]},
        "free": {"type": "object", "additionalProperties": {"type": "string"}},
        "other": {"$ref": "#/$defs/other"},
        "anything": {},
    },
    "additionalProperties": False,
    "$defs": {"other": {"type": "null"}},
}
CONVERSATIONS: Final[Mapping[str, Mapping[str, Any]]] = {
    "plain": {"messages": [_USER]},
    "answered": {"messages": [_USER, _ANSWER, _MORE]},
    "system": {"messages": [_SYSTEM, _USER]},
    "system, tools": {"messages": [_SYSTEM, _USER], "tools": _TOOLS},
    "developer": {"messages": [_said("developer", "Be brief."), _USER]},
    "parts": {
        "messages": [
            _said("system", [{"type": "text", "text": "Be brief."}]),
            _said("user", [{"type": "text", "text": "One."}, {"type": "text", "text": "Two."}]),
        ]
    },
    "tools": {"messages": [_USER], "tools": _TOOLS},
    "no description": {"messages": [_USER], "tools": [_tool("look_up", parameters=_PARAMETERS)]},
    "no descriptions within": {
        "messages": [_USER],
        "tools": [
            _tool(
                "look_up",
                description="Looks something up.",
                parameters={"type": "object", "properties": {"place": {"type": "string"}, "any": {}}},
            )
        ],
    },
    "no properties": {
        "messages": [_USER],
        "tools": [_tool("look_up", description="Looks something up.", parameters={"type": "object"})],
    },
    "no parameters": {
        "messages": [_USER],
        "tools": [_tool("look_up", description="Looks something up."), _tool("find")],
    },
    "empty parameters": {
        "messages": [_USER],
        "tools": [_tool("look_up", description="Looks something up.", parameters={})],
    },
    "types": {"messages": [_USER], "tools": [_tool("look_up", description="Looks.", parameters=_TYPES)]},
    "user twice": {"messages": [_USER, _MORE]},
    "assistant first": {"messages": [_ANSWER, _MORE]},
    "system later": {"messages": [_USER, _ANSWER, _SYSTEM, _MORE]},
    "system alone": {"messages": [_SYSTEM]},
    "call": {"messages": [_USER, _calls(_OSLO), _FOUND], "tools": _TOOLS},
    "call, no ids": {"messages": [_USER, _without_id(_calls(_OSLO)), _without_id(_FOUND)], "tools": _TOOLS},
    "call, no result": {"messages": [_USER, _calls(_OSLO), _MORE], "tools": _TOOLS},
    "call, arguments cut": {
        "messages": [_USER, _calls(_given_as('{"place": "Os')), _FOUND],
        "tools": _TOOLS,
    },
    "call, no result and no user": {"messages": [_calls(_OSLO)], "tools": _TOOLS},
    "call, null": {"messages": [_USER, _calls(_OSLO, content=None), _FOUND], "tools": _TOOLS},
    "call, last": {"messages": [_USER, _calls(_OSLO)], "tools": _TOOLS},
    "call, last, null": {"messages": [_USER, _calls(_OSLO, content=None)], "tools": _TOOLS},
    "call, no tools": {"messages": [_USER, _calls(_OSLO), _FOUND]},
    "text and call": {"messages": [_USER, _calls(_OSLO, content="I look."), _FOUND], "tools": _TOOLS},
    "two calls": {
        "messages": [
            _USER,
            _calls(_OSLO, _call(2, "find", {"count": 3})),
            _FOUND,
            _result(2, "find"),
        ],
        "tools": _TOOLS,
    },
    "nested": {"messages": [_USER, _calls(_DEEP), _FOUND], "tools": _TOOLS},
    "no arguments": {"messages": [_USER, _calls(_call(1, "find", {})), _result(1, "find")], "tools": _TOOLS},
    "result, answer": {"messages": [_USER, _calls(_OSLO), _FOUND, _ANSWER, _MORE], "tools": _TOOLS},
    "second call": {
        "messages": [
            _USER,
            _calls(_OSLO),
            _FOUND,
            _calls(_call(2, "find", {"count": 3})),
            _result(2, "find"),
        ],
        "tools": _TOOLS,
    },
    "second call, null": {
        "messages": [
            _USER,
            _calls(_OSLO, content=None),
            _FOUND,
            _calls(_call(2, "find", {"count": 3}), content=None),
            _result(2, "find"),
        ],
        "tools": _TOOLS,
    },
    "reasoning": {"messages": [_USER, {**_ANSWER, "reasoning_content": "I think."}, _MORE]},
    "reasoning and call": {
        "messages": [_USER, _calls(_OSLO, reasoning_content="I think."), _FOUND],
        "tools": _TOOLS,
    },
    "reasoning, call, answer": {
        "messages": [
            _USER,
            _calls(_OSLO, reasoning_content="I think."),
            _FOUND,
            {**_ANSWER, "reasoning_content": "I think again."},
            _MORE,
        ],
        "tools": _TOOLS,
    },
    "answer, last": {"messages": [_USER, _ANSWER]},
    "continued": {
        "messages": [_USER, _ANSWER],
        "continue_final_message": True,
        "add_generation_prompt": False,
    },
}
"""Bodies of requests, by what they have."""


_OFFERS: Final = frozenset(name for name, body in CONVERSATIONS.items() if "tools" in body)
_CALLS: Final = frozenset(
    name
    for name, body in CONVERSATIONS.items()
    if any(message.get("tool_calls") for message in body["messages"])
)
_EVERYWHERE: Final[Mapping[str, str]] = {
    "continued": "llama.cpp writes what begins the answer, and empty reasoning, by code of its own",
    "parts": "parts are lines of one text here; there they are handed on, or written as JSON",
    "no description": "there it is an empty one",
    "no parameters": "there they are {}, here an object without properties",
    "empty parameters": "there they are {}, here an object without properties",
    "system later": "the template moves instructions ahead or leaves them out: here they stay in place",
    "system alone": "the template leaves out what no user follows: here the user says it",
    "call, no ids": "the template wants ids: here they are made, or empty",
    "call, no result and no user": "the template wants a user ahead: here a note is there",
}
# Templates whose text tells of calls, and which write none.
_SILENT: Final = frozenset({"LFM2-8B-A1B", "LFM2.5-Instruct", "ibm-granite-granite-3.3-2B-Instruct"})
_NO_ANSWER: Final = "there the text of the answer is left out"
_LINE: Final = "an empty line parts instructions from what the user says"
# By template and conversation.
_CASES: Final[Mapping[tuple[str, str], str]] = {
    **{
        (name, "two calls"): "the template writes one call of a message: here each has a message"
        for name in ("GigaChat3-10B-A1.8B", "GigaChat3.1-10B-A1.8B", "openai-gpt-oss-120b")
    },
    **{
        (name, "text and call"): "there the text beside a call is left out, or is behind the result"
        for name in (
            "Cohere2MoE",
            "CohereForAI-c4ai-command-r7b-12-2024-tool_use",
            "google-gemma-4-31B-it",
            "google-gemma-4-31B-it-interleaved",
            "muse-glimmer",
            "upstage-Solar-Open-100B",
        )
    },
    ("google-gemma-2-2b-it", "system"): _LINE,
    ("google-gemma-2-2b-it", "developer"): _LINE,
    ("openbmb-MiniCPM5-1B", "nested"): "there an object within the arguments is left out",
    ("unsloth-mistral-Devstral-Small-2507", "reasoning"): _NO_ANSWER,
    ("unsloth-mistral-Devstral-Small-2507", "reasoning, call, answer"): _NO_ANSWER,
    ("upstage-Solar-Open-100B", "reasoning and call"): "there the reasoning is left out",
}


@dataclass(frozen=True)
class Outcome:
    """What a server makes of a conversation."""

    prompt: str | None
    """The prompt; None if the conversation is refused."""
    reason: str = ""
    """Why it is refused."""


@dataclass(frozen=True)
class Comparison:
    """A conversation, rendered here and by llama.cpp."""

    template: str
    """Name of the template."""
    conversation: str
    """Name of the conversation."""
    ours: Outcome
    """What is made of it here."""
    theirs: Outcome
    """What llama.cpp makes of it."""

    @property
    def outcome(self) -> str:
        """`equal`, `differs`, or who refuses it."""
        if self.ours.prompt is None:
            return "refused by both" if self.theirs.prompt is None else "refused here"
        if self.theirs.prompt is None:
            return "refused there"
        return "equal" if self.ours.prompt == self.theirs.prompt else "differs"

    @property
    def reason(self) -> str:
        """Why the prompts differ; empty if that is not known."""
        if self.outcome != "differs":
            return ""
        source = collected_templates()[self.template].read_text()
        if self.conversation in _OFFERS | _CALLS and not knows_tools(source):
            return "the template knows no functions: here a note of ours tells of them"
        if self.conversation in _OFFERS and "|safe + " in source:
            return "Jinja escapes what is added to a text that is marked as safe; llama.cpp does not"
        if self.conversation in _CALLS and self.template in _SILENT:
            return "the template leaves calls out: here they are written as it tells"
        known = _CASES.get((self.template, self.conversation), "")
        return known or _EVERYWHERE.get(self.conversation, "")

    @property
    def is_strange(self) -> bool:
        """Whether llama.cpp alone renders it, or the prompts differ for a reason that is not known."""
        return self.outcome == "refused here" or (self.outcome == "differs" and not self.reason)

    def difference(self) -> str:
        """Lines that differ."""
        theirs, ours = (side.prompt or side.reason for side in (self.theirs, self.ours))
        lines = difflib.unified_diff(
            theirs.splitlines(), ours.splitlines(), "llama.cpp", "here", lineterm="", n=1
        )
        return "\n".join(lines)


def compared(name: str, source: Path, server: Path) -> Iterator[Comparison]:
    """Each conversation with a template.

    Args:
        name: Name of the template.
        source: File with its Jinja source.
        server: `llama-server`.

    Raises:
        MeshError: If the server does not start.
    """
    with tempfile.TemporaryDirectory() as folder:
        model = TinyModel("llama", n_layers=1).write(Path(folder, "tiny.gguf"))
        yield from _compared(name, source, server, model)


def _compared(name: str, source: Path, server: Path, model: Path) -> Iterator[Comparison]:
    with _llama_server(server, model, source) as url:
        template = ChatTemplate(
            source.read_text(), bos=_BOS, eos=_EOS, ends=_ENDS, now=lambda: datetime.now().astimezone()
        )
        for conversation, given in CONVERSATIONS.items():
            body = {**given, "chat_template_kwargs": _VARIABLES}
            yield Comparison(name, conversation, rendered_here(template, body), _theirs(url, body))


def rendered_here(template: ChatTemplate, body: Mapping[str, Any]) -> Outcome:
    """What is made of the body of a request here."""
    try:
        conversation = conversation_of(ChatBody.model_validate(body))
        tools = [] if conversation.tools is None else conversation.tools.for_template()
        prompt = template.render(
            conversation.messages, conversation.variables, tools=tools, ending=conversation.ending
        )
    except InvalidRequest as error:
        return Outcome(None, error.message)
    # The vocabulary adds it, to the prompts of both.
    return Outcome(prompt.removeprefix(_BOS))


@contextmanager
def _llama_server(server: Path, model: Path, template: Path) -> Iterator[str]:
    """A server with a template; its URL.

    Raises:
        MeshError: If it does not start.
    """
    port = free_port("127.0.0.1")
    url = f"http://127.0.0.1:{port}"
    options = [
        "--jinja",
        "--chat-template-file",
        str(template),
        "--no-prefill-assistant",
        "--offline",
        "--no-reasoning-preserve",
    ]
    small = ["--ctx-size", "512", "--threads", "1", "--no-warmup", "--no-ui"]
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(
            [str(server), "--model", str(model), "--port", str(port), *options, *small],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
        )
        try:
            if not _is_healthy(url, process):
                log.seek(0)
                said = log.read().decode(errors="replace").strip()
                raise MeshError(f"llama-server does not start with {template.name}: {said[-_SHOWN_CHARS:]}")
            yield url
        finally:
            process.kill()
            process.wait()


def _is_healthy(url: str, process: subprocess.Popen[bytes]) -> bool:
    """Whether a server answers before it ends or patience does."""
    end_s = time.monotonic() + _PATIENCE_S
    while process.poll() is None and time.monotonic() < end_s:
        try:
            with urllib.request.urlopen(f"{url}/health", timeout=_PATIENCE_S):
                return True
        except OSError:
            time.sleep(_PAUSE_S)
    return False


def _theirs(url: str, body: Mapping[str, Any]) -> Outcome:
    request = urllib.request.Request(f"{url}/apply-template", json.dumps(body).encode())
    try:
        with urllib.request.urlopen(request, timeout=_PATIENCE_S) as answer:
            prompt = json.load(answer)["prompt"]
    except urllib.error.HTTPError as error:
        return Outcome(None, json.load(error)["error"]["message"])
    return Outcome(prompt.removeprefix(_BOS))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--server", type=Path, help="llama-server of the version that is installed")
    parser.add_argument("--template", action="append", help="name of a template; by default all")
    parser.add_argument("--differences", action="store_true", help="show lines that differ")
    options = parser.parse_args()
    server = options.server or build_llama_rpc().server
    found = [
        each
        for name, source in sorted(collected_templates().items())
        if not options.template or name in options.template
        for each in compared(name, source, server)
    ]
    for each in found:
        if each.outcome not in {"equal", "refused by both"}:
            print(f"{each.template:45} {each.conversation:25} {each.outcome:13} {each.reason}")
            if options.differences:
                print(each.difference())
    numbers = Counter(each.outcome for each in found)
    num_strange = sum(each.is_strange for each in found)
    print(*(f"{number} {outcome}" for outcome, number in numbers.items()), sep=", ")
    print(f"{num_strange} refused here only, or other prompts for a reason that is not known")
    sys.exit(num_strange > 0)


if __name__ == "__main__":
    main()
