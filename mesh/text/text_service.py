"""Client of the processes for text, and the memory that these take; see `mesh.text.text_worker`.

The memory was measured with the vocabularies that llama.cpp's repository holds, of 30,000 to 262,000 tokens,
after every token had been in an answer: on x86-64 Linux the bounds are 1.07 to 1.34 times what a process
took. What a job needs while it runs is not part of them.
"""

from __future__ import annotations

import asyncio
from array import array
from dataclasses import asdict, dataclass
from functools import cache
from typing import TYPE_CHECKING, Any, Final

import structlog

from mesh.text.answer_format import format_told
from mesh.text.text_jobs import TextModel, packed_job
from mesh.util.worker_pool import WorkerEnded, WorkerPool, unpacked_answer
from spanmesh_proto.errors import InvalidRequest, RequestError
from stages.gguf import read_one_header
from stages.process_limits import num_usable

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from datetime import datetime
    from pathlib import Path

    from mesh.text.answer_format import AnswerFormat
    from mesh.text.reasoning_switches import ReasoningWish
    from stages.gguf import GgufHeader

# Python, its libraries and llama.cpp's code.
PROCESS_BYTES: Final = 64 * 2**20
# The chat template as a program, and small things.
_BASE_BYTES: Final = 5 * 2**20
# llama.cpp keeps a token by id and by text, and its piece; the process keeps pieces that were in answers.
_TOKEN_BYTES: Final = 340
# Ranks of merges, by the pair of their texts.
_MERGE_BYTES: Final = 176
# Vocabularies of these kinds are searched by a tree with a node for each beginning of a token, of 112 bytes;
# beginnings are shared.
_TREES: Final = frozenset({"t5", "rwkv", "plamo2"})
_TREE_BYTES_PER_BYTE: Final = 44
_LENGTH_BYTES: Final = 8
# Of each key one may be busy for long, and another one answers all others meanwhile.
_LEAST_WORKERS: Final = 2
_MOST_WORKERS: Final = 4
# Computing: ample for any template, and for the first use of a large vocabulary; more for long texts.
_CPU_LIMIT_S: Final = 10.0
_CPU_S_PER_BYTE: Final = 10e-6
# By the clock, on a machine that does other things as well.
_WALL_LIMIT_S: Final = 600.0
# Of address space, stacks included: a word of a million letters takes 0.9 GB, vocabularies up to 0.2 GB each.
_MEMORY_BYTES: Final = 4 * 2**30
# Of the pool that parses bodies; here, since memory is planned before anything of the API is imported.
NUM_BODY_WORKERS: Final = 2
log = structlog.get_logger()


@dataclass(frozen=True)
class TextRequest:
    """A text to be tokenized."""

    text: str
    """The text."""
    param: str
    """The field that it came from, for errors."""
    add_special: bool = True
    """Add the tokens that the model wants around a sequence, such as BOS."""
    parse_special: bool = True
    """Whether names such as `<|im_end|>` become the control tokens that they name."""


@dataclass(frozen=True)
class ToldFormat:
    """What was found out of a model's answers."""

    format: AnswerFormat
    """Their format."""
    has_short_ids: bool
    """Whether ids of calls are nine letters and digits."""


@dataclass(frozen=True)
class PromptIds:
    """A rendered conversation."""

    tokens: list[int]
    """Token ids."""
    thought_end: str | None
    """End mark of the reasoning that the prompt begins, if it does."""
    may_think: bool
    """Whether the answer may begin with reasoning."""
    has_one_call: bool
    """Whether a message holds at most one call for the template."""
    knows_reasoning: bool
    """Whether the template has a setting for the amount of reasoning, if one was wanted."""
    knows_budget: bool
    """Whether it has one for the most tokens of reasoning, likewise."""
    places: Sequence[tuple[int, int]] = ()
    """Of each gap in the prompt, in order, its index and the number of token ids ahead of it."""


class TextService:
    """Texts of one model, in processes that are shared by all models and started at the first request.

    Args:
        model: The model.
        pool: The processes, in which clients take turns; those of this process unless given.
    """

    def __init__(self, model: TextModel, pool: WorkerPool | None = None) -> None:
        self._model = model
        self._told: ToldFormat | None = None
        self._pool = shared_text_pool() if pool is None else pool

    async def prompt(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        variables: Mapping[str, Any],
        tools: Sequence[Mapping[str, Any]],
        ending: str,
        now: datetime,
        most_tokens: int,
        param: str,
        client: str | None,
        reasoning: ReasoningWish | None = None,
        gaps: Sequence[str] = (),
    ) -> PromptIds:
        """Render and tokenize a conversation; see `text_worker.do_prompt`.

        Raises:
            InvalidRequest: If the template rejects it, or it took too much time or memory.
            ContextLengthExceeded: If it is far too long.
            Overloaded: If too many texts wait.
        """
        values = {
            "messages": messages,
            "variables": variables,
            "reasoning": {} if reasoning is None else asdict(reasoning),
            "tools": tools,
            "ending": ending,
            "now": now.isoformat(),
            "most_tokens": most_tokens,
            "param": param,
            # Found once: other processes need not find them again.
            "marks": None if self._told is None else list(map(asdict, self._told.format.reasoning)),
            "gaps": gaps,
        }
        told, data = await self._run("prompt", values, client, param=param)
        return PromptIds(_ids(data).tolist(), **told)

    async def ids(
        self, texts: Sequence[TextRequest], *, most_tokens: int, client: str | None
    ) -> list[list[int]]:
        """Token ids of each of some texts; see `text_worker.do_ids`.

        Raises:
            InvalidRequest: If a text has a lone surrogate, or they took too much time or memory.
            ContextLengthExceeded: If a text is far too long.
            Overloaded: If too many texts wait.
        """
        values = {"given": [vars(each) for each in texts], "most_tokens": most_tokens}
        told, data = await self._run("ids", values, client, param=texts[0].param if texts else None)
        whole, at, found = _ids(data), 0, []
        for count in told["counts"]:
            found.append(whole[at : at + count].tolist())
            at += count
        return found

    async def listing(
        self,
        ids: Sequence[int],
        *,
        context_length: int,
        has_names: bool,
        client: str | None,
    ) -> bytes:
        """The JSON of an answer that lists token ids, with their names if wanted."""
        values = {"ids": ids, "context_length": context_length, "has_names": has_names}
        _, data = await self._run("listing", values, client)
        return bytes(data)

    async def text(self, ids: Sequence[int], *, client: str | None) -> str:
        """The text of token ids, control tokens left out."""
        _, data = await self._run("text", {"ids": ids}, client)
        return str(data, "utf-8")

    @property
    def told_format(self) -> ToldFormat | None:
        """What was found out of the model's answers; None before."""
        return self._told

    async def answer_format(self, now: datetime, *, client: str | None = None) -> ToldFormat:
        """What is found out of the model's answers, once.

        Raises:
            InvalidRequest: If it took too much time or memory.
            Overloaded: If too many texts wait.
        """
        if self._told is None:
            told, _ = await self._run("format", {"now": now.isoformat()}, client)
            self._told = ToldFormat(format_told(told["format"]), told["has_short_ids"])
        return self._told

    async def check(self, now: datetime) -> None:
        """Render and tokenize short conversations; logs what is wrong. Starts the processes."""
        self._pool.start()
        try:
            await self.answer_format(now)
            told, _ = await self._run("check", {"now": now.isoformat()}, None)
        except RequestError as error:
            log.warning("chat_template_fails", reason=error.message)
            return
        for problem in told["problems"]:
            log.warning(problem.pop("event"), **problem)

    async def _run(
        self,
        kind: str,
        values: Mapping[str, Any],
        client: str | None,
        *,
        param: str | None = None,
    ) -> tuple[dict[str, Any], memoryview]:
        try:
            header, payload = packed_job(kind, self._model, values)
        except RecursionError:
            raise InvalidRequest(
                "the request is nested too deeply: send flatter values", param=param
            ) from None
        limit_s = _CPU_LIMIT_S + _CPU_S_PER_BYTE * len(payload)
        try:
            answer = await self._pool.run(header, payload, client=client, cpu_limit_s=limit_s)
        except WorkerEnded as error:
            # A 4xx: what ended a process once would end the next one as well.
            raise InvalidRequest(
                f"reading the request's texts {error.reason}: send shorter texts", param=param
            ) from None
        return unpacked_answer(answer)


def vocabulary_bytes(header: GgufHeader) -> int:
    """Bytes that one process for texts takes for a model: its vocabulary, and what is computed from it.

    Args:
        header: Header of the model.

    Returns:
        Bytes, rather too many than too few.
    """
    tokens = header.metadata.get("tokenizer.ggml.tokens")
    merges = header.metadata.get("tokenizer.ggml.merges")
    num_bytes = _BASE_BYTES
    if tokens is not None:
        num_bytes += _TOKEN_BYTES * (tokens.count or 0) + len(tokens.payload)
        if header.text("tokenizer.ggml.model", "") in _TREES:
            text_bytes = len(tokens.payload) - _LENGTH_BYTES * (tokens.count or 0)
            num_bytes += _TREE_BYTES_PER_BYTE * text_bytes
    if merges is not None:
        num_bytes += _MERGE_BYTES * (merges.count or 0)
    return num_bytes


def num_text_workers() -> int:
    """Processes for text that a head starts at most."""
    return min(max(_LEAST_WORKERS, num_usable() // 2), _MOST_WORKERS)


def worker_bytes() -> int:
    """Memory of the processes for bodies and for texts on the head's host, vocabularies aside."""
    return (NUM_BODY_WORKERS + num_text_workers()) * PROCESS_BYTES


def text_bytes_of(model: Path) -> int:
    """Memory of a model's vocabulary in all processes for texts, from the header of its file.

    Args:
        model: Path of the model, or of its first file if it is split.

    Raises:
        InvalidModel: If the file cannot be read, is no GGUF, or is truncated.
    """
    return num_text_workers() * vocabulary_bytes(read_one_header(model))


def told_format_of(model: Path, now: datetime) -> ToldFormat:
    """What is found out of the answers of a model by its file, in a process for texts.

    Args:
        model: Path of the model, or of its first file if it is split.
        now: The local time.

    Raises:
        InvalidModel: If llama.cpp cannot read the file.
        InvalidRequest: If it took too much time or memory.
    """
    from mesh.text.chat_template import template_source_of  # noqa: PLC0415 - loads llama.cpp
    from mesh.text.tokenizer import Tokenizer  # noqa: PLC0415

    tokenizer = Tokenizer(model)
    texts = TextModel(str(tokenizer.path), tokenizer.stamp, template_source_of(tokenizer))
    return asyncio.run(TextService(texts).answer_format(now))


def _ids(data: memoryview) -> array[int]:
    found = array("i")
    found.frombytes(data)
    return found


@cache
def shared_text_pool() -> WorkerPool:
    """The processes for texts of all models; they end with this process."""
    return WorkerPool(
        "mesh.text.text_worker",
        num_workers=num_text_workers(),
        cpu_limit_s=_CPU_LIMIT_S,
        wall_limit_s=_WALL_LIMIT_S,
        memory_bytes=_MEMORY_BYTES,
    )
