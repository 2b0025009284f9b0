"""Datasets of prompts: files, random and built-in ones."""

from __future__ import annotations

import json
from dataclasses import dataclass
from random import Random
from typing import TYPE_CHECKING, Any, Final

from mesh.util.completion_stream import CHAT_PATH, COMPLETION_PATH
from spanmesh_proto.errors import InvalidRequest, MeshError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from meshbench.http_client import EndpointName

PATHS: Final[dict[EndpointName, str]] = {"chat": CHAT_PATH, "completions": COMPLETION_PATH}
# Each is one token, with the space before it, in the vocabularies of the models that this was tried with.
_TEXT: Final = """
    able about above across after again against air all almost along also always among and animal another
    answer any area around ask away back ball bank base because bed before began being below best better
    between big bird black blue board boat body book both box boy bring brown build business but call came
    can car care carry center certain change check child children city class clear close cold color come
    common complete cost could country course cover cut dark day decide deep different direction dog done
    door down draw drive dry during each early earth east easy eat end enough even every example eye face
    """
_WORDS: Final = tuple(_TEXT.split())
# Spec-Bench's share of chat questions; its other categories are long documents or translations.
CHAT_CATEGORIES: Final = frozenset(
    {"writing", "roleplay", "reasoning", "math", "coding", "extraction", "stem", "humanities"}
)
BUILT_IN: Final = (
    "Explain to a child why the sea is salty.",
    "Write a short story about a lighthouse keeper who finds a message in a bottle.",
    "List the steps to change a flat bicycle tyre, and say what each tool is for.",
    "What are the main differences between a virus and a bacterium?",
    "Write a Python function that returns the n-th Fibonacci number, and explain how it works.",
    "Describe a walk through a forest in autumn, with all five senses.",
    "How does compound interest work? Give an example with numbers.",
    "Compare trains and aeroplanes for a journey of five hundred kilometres.",
)


@dataclass(frozen=True)
class Prompt:
    """One prompt."""

    id: str
    """Distinguishes it from others of its source."""
    text: str = ""
    """A user's message, or a raw prompt."""
    messages: tuple[dict[str, Any], ...] = ()
    """A whole chat in place of the text; only the chat endpoint takes one."""


@dataclass(frozen=True)
class Asking:
    """Settings of all requests of a run."""

    endpoint: EndpointName
    """Which."""
    model: str
    """Name that requests give."""
    max_tokens: int
    """Of each answer."""
    temperature: float | None = None
    """Of sampling; None leaves it to the server."""
    ignore_eos: bool = False
    """Whether the server is asked to go on to the last token."""
    extra_body: dict[str, Any] | None = None
    """Further fields; they win over the others, and a null takes a field out."""

    def body(self, prompt: Prompt) -> bytes:
        """A streamed request with usage, as JSON."""
        fields: dict[str, Any] = {"model": self.model}
        if self.endpoint == "completions":
            fields["prompt"] = prompt.text
        else:
            fields["messages"] = list(prompt.messages) or [{"role": "user", "content": prompt.text}]
        fields |= {
            "max_tokens": self.max_tokens,
            "temperature": self.temperature,
            # Sent only if requested, since a server may not know the field.
            "ignore_eos": True if self.ignore_eos else None,
            "stream": True,
            "stream_options": {"include_usage": True},
            **(self.extra_body or {}),
        }
        return json.dumps({name: value for name, value in fields.items() if value is not None}).encode()


@dataclass(frozen=True)
class SpecBenchQuestion:
    """One line of Spec-Bench."""

    id: str
    """Its number, as text."""
    category: str
    """Such as `writing`."""
    prompt: str
    """Its first turn."""


def read_dataset(path: Path, endpoint: EndpointName) -> tuple[Prompt, ...]:
    """All prompts of a file.

    A line has `prompt`, a text; or `messages`, a chat; or `turns`, of which the first is asked, as in
    Spec-Bench's `question.jsonl`. It may have an `id` or a `question_id`.

    Args:
        path: The file.
        endpoint: Raw completions take no `messages`.

    Raises:
        MeshError: If the file cannot be read, or naming the line that is not of that kind.
    """
    prompts = tuple(_prompt(path, number, line, endpoint) for number, line in _read_json_lines(path))
    if not prompts:
        raise InvalidRequest(f"{path} holds no prompt; write one JSON object a line", param="--dataset")
    return prompts


def draw(prompts: Sequence[Prompt], count: int, seed: int) -> tuple[Prompt, ...]:
    """This many prompts, in random order; repeated where there are too few.

    Args:
        prompts: At least one.
        count: How many are wanted.
        seed: The same seed, the same order.
    """
    shuffled = Random(seed).sample(prompts, len(prompts))  # noqa: S311 - an order, not a secret
    return tuple(shuffled[index % len(shuffled)] for index in range(count))


def _read_json_lines(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """The objects of a file and their line numbers, from 1; empty lines are passed over.

    Raises:
        MeshError: If the file cannot be read, or naming the line that is no JSON object.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise MeshError(f"cannot read {path}: {reason}") from None
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            fields = json.loads(line)
        except json.JSONDecodeError as error:
            raise MeshError(f"{path}, line {number}: not JSON ({error})") from None
        if not isinstance(fields, dict):
            raise MeshError(f"{path}, line {number}: not a JSON object")
        yield number, fields


def _prompt(path: Path, number: int, line: dict[str, Any], endpoint: EndpointName) -> Prompt:
    name = str(line.get("question_id", line.get("id", number)))
    match line:
        case {"messages": [_, *_] as messages} if all(isinstance(message, dict) for message in messages):
            if endpoint == "completions":
                raise InvalidRequest(
                    f"{path}, line {number}: raw completions have no messages; use --endpoint chat",
                    param="--dataset",
                )
            return Prompt(name, messages=tuple(messages))
        case {"prompt": str(text)} | {"turns": [str(text), *_]} if text:
            return Prompt(name, text)
    raise InvalidRequest(
        f"{path}, line {number}: neither `prompt`, a text, nor `messages`, a chat, nor `turns`, some texts",
        param="--dataset",
    )


def made_up_prompts(count: int, num_tokens: int, seed: int) -> tuple[Prompt, ...]:
    """Random words, as many as tokens are wanted.

    A server's own vocabulary is not known here, so the length is close, not exact, and a chat template comes
    on top: the report says what the server counted. Prompts differ from their first words on, so that a cache
    of prefixes has nothing to gain.

    Args:
        count: How many.
        num_tokens: Of each, about.
        seed: The same seed, the same prompts.
    """
    random = Random(seed)  # noqa: S311 - prompts, not secrets
    return tuple(
        Prompt(f"made-up-{seed}-{index}", " ".join(random.choices(_WORDS, k=num_tokens)))
        for index in range(count)
    )


def read_spec_bench(path: Path) -> tuple[SpecBenchQuestion, ...]:
    """All questions of a file of JSON lines with `question_id`, `category` and `turns`.

    Raises:
        MeshError: If the file is not of that kind.
    """
    try:
        questions = tuple(
            SpecBenchQuestion(str(line["question_id"]), line["category"], line["turns"][0])
            for _, line in _read_json_lines(path)
        )
    except (LookupError, TypeError) as error:
        raise MeshError(f"{path} is not a Spec-Bench question file: {error}") from error
    if not questions:
        raise MeshError(f"{path} is not a Spec-Bench question file: it is empty")
    return questions


def load_prompts(path: Path | None, limit: int) -> tuple[str, ...]:
    """First turns of the chat questions of a Spec-Bench file, evenly spread over it, or the built-in ones.

    Args:
        path: Spec-Bench's `question.jsonl`, or None for the built-in prompts.
        limit: At most so many.

    Raises:
        MeshError: If the file is not of that kind.
    """
    prompts = BUILT_IN if path is None else _chat_prompts(path)
    limit = min(limit, len(prompts))
    return tuple(prompts[index * len(prompts) // limit] for index in range(limit))


def _chat_prompts(path: Path) -> tuple[str, ...]:
    prompts = tuple(
        question.prompt for question in read_spec_bench(path) if question.category in CHAT_CATEGORIES
    )
    if not prompts:
        raise MeshError(f"{path} has no chat questions")
    return prompts
