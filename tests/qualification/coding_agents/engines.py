"""Engines of the turns: a scripted model that calls a tool, and bounded answers of a small one."""

from __future__ import annotations

import asyncio
import json
import re
from contextlib import aclosing
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

from mesh.engine import Committed, GenerationStats
from spanmesh_proto.errors import ContextLengthExceeded
from tests.qualification.coding_agents.model_kinds import NOTE as NOTED
from tests.qualification.coding_agents.model_kinds import THOUGHT

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Mapping, Sequence

    from mesh.engine import Engine, GenerationRequest
    from mesh.text.tokenizer import Tokenizer
    from tests.qualification.coding_agents.model_kinds import ModelKind

NOTE: Final = "note.txt"
COPY: Final = "copy.txt"
COMMAND: Final = f"cat {NOTE} | tee {COPY}"
# Answers to requests without tools, such as for a title; as JSON where a schema is given.
TITLE: Final = "A copied note"
_CODE_WORD: Final = re.compile(r"The code word is (\w+)\.")
_SHELLS: Final = ("Bash", "bash", "exec_command", "shell_command", "shell")
_PURPOSE: Final = "Copy the note"
_WAIT_MS: Final = 60_000
# More tokens than that belong to answers that a grammar shapes, which would be no JSON if they were cut.
_GRAMMAR_FACTOR: Final = 4
_NEVER: Final = -100.0


class ScriptedModel:
    """Engine that answers by `answer_to`, token by token.

    Args:
        tokenizer: Tokenizer of a model of that kind.
        context_length: Positions of a session; none of them takes memory.
        kind: Kind of the model.
    """

    def __init__(self, tokenizer: Tokenizer, context_length: int, kind: ModelKind = NOTED) -> None:
        self._tokenizer = tokenizer
        self._context_length = context_length
        self._kind = kind

    @property
    def context_length(self) -> int:
        """Positions that one session may use."""
        return self._context_length

    async def generate(self, request: GenerationRequest) -> AsyncGenerator[Committed, None]:
        """The next answer.

        Raises:
            ContextLengthExceeded: If the prompt does not fit.
        """
        if len(request.prompt) >= self._context_length:
            raise ContextLengthExceeded(
                f"the prompt has {len(request.prompt)} tokens, and the context holds {self._context_length}"
            )
        text = answer_to(self._text(request.prompt), self._kind, is_json=request.grammar is not None)
        tokens = self._tokenizer.encode(text, add_special=False, parse_special=True)
        if tokens[-1] not in request.end_tokens:
            tokens += sorted(request.end_tokens)[:1]
        steps = tokens[: request.max_tokens]
        for token in steps[:-1]:
            yield Committed((token,), None, GenerationStats())
            # Other requests are answered meanwhile.
            await asyncio.sleep(0)
        last = steps[-1]
        yield Committed((last,), "stop" if last in request.end_tokens else "length", GenerationStats())

    def _text(self, prompt: Sequence[int]) -> str:
        pieces = (self._tokenizer.piece(token) or self._tokenizer.name(token).encode() for token in prompt)
        return b"".join(pieces).decode("utf-8", "replace")


class BoundedAnswers:
    """Engine that ends free answers of another one after a number of tokens, and not before.

    A model of a hundred million parameters, behind an agent's prompt of many thousand tokens, ends its
    answer at once or never.

    Args:
        engine: The other one.
        num_tokens: Tokens of an answer, without the one that ends it.
    """

    def __init__(self, engine: Engine, num_tokens: int) -> None:
        self._engine = engine
        self._num_tokens = num_tokens

    @property
    def context_length(self) -> int:
        """The other engine's."""
        return self._engine.context_length

    async def generate(self, request: GenerationRequest) -> AsyncGenerator[Committed, None]:
        """As the other engine does, up to the bound."""
        if request.grammar is not None:
            most = min(request.max_tokens, _GRAMMAR_FACTOR * self._num_tokens)
            request = replace(request, max_tokens=most)
        end: int | None = None
        if request.grammar is None and request.end_tokens and request.max_tokens > self._num_tokens:
            end = min(request.end_tokens)
            request = _endless(request)
        count = 0
        async with aclosing(self._engine.generate(request)) as steps:
            async for step in steps:
                count += len(step.tokens)
                if end is not None and step.finish is None and count >= self._num_tokens:
                    logprobs = (*step.logprobs, *step.logprobs[-1:])
                    yield Committed((*step.tokens, end), "stop", step.stats, logprobs)
                    return
                yield step


def note_text(word: str) -> str:
    """Content of the note."""
    return f"The code word is {word}.\n"


def last_words(word: str) -> str:
    """Answer that ends the turn."""
    return f"The note is copied. Its code word is {word}."


def answer_to(prompt: str, kind: ModelKind = NOTED, *, is_json: bool) -> str:
    """Next answer of the scripted turn.

    First the shell is called to copy the note and to print it. The code word of the last answer is read from
    the result, so only an agent that has run the command and sent what it printed gets one. Reasoning ahead
    of the call must be in the prompt, of models that have it there.

    Args:
        prompt: Rendered prompt.
        kind: Kind of the model.
        is_json: Whether a grammar asks for JSON.
    """
    functions = kind.offered(prompt)
    if not functions:
        return kind.say(prompt, json.dumps({"title": TITLE}) if is_json else TITLE)
    results = kind.results(prompt)
    if results:
        if kind.reasons and THOUGHT not in prompt:
            return kind.say(prompt, "The reasoning ahead of the call is not there.")
        word = _CODE_WORD.search(results[-1])
        if word is None:
            return kind.say(prompt, f"The command printed something else: {results[-1][:200]}")
        return kind.say(prompt, last_words(word[1]))
    name = next((name for name in _SHELLS if name in functions), None)
    if name is None:
        return kind.say(prompt, f"There is no shell among the tools: {', '.join(sorted(functions))}")
    return kind.call(prompt, name, _shell_arguments(functions[name]))


def _shell_arguments(schema: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments of a shell; what else it requires gets a value of the type."""
    properties = schema.get("properties", {})
    key = "cmd" if "cmd" in properties else "command"
    is_list = properties.get(key, {}).get("type") == "array"
    others = {name: _filler(properties.get(name, {})) for name in schema.get("required", ()) if name != key}
    return {key: ["bash", "-c", COMMAND] if is_list else COMMAND, **others}


def _filler(schema: Mapping[str, Any]) -> Any:
    if "enum" in schema:
        return schema["enum"][0]
    kind = schema.get("type")
    # Of several types the first will do.
    name = kind[0] if isinstance(kind, list) and kind else kind
    fillers = {"integer": _WAIT_MS, "number": _WAIT_MS, "boolean": False, "array": [], "object": {}}
    return fillers.get(str(name), _PURPOSE)


def _endless(request: GenerationRequest) -> GenerationRequest:
    """The request with tokens that end an answer excluded."""
    sampling = request.sampling
    kept = [(token, bias) for token, bias in sampling.logit_bias if token not in request.end_tokens]
    ends = [(token, _NEVER) for token in sorted(request.end_tokens)]
    return replace(request, sampling=replace(sampling, logit_bias=(*kept, *ends)))
