"""Prompts from a file of JSON lines."""

from __future__ import annotations

from random import Random
from typing import TYPE_CHECKING, Any

from mesh.bench.json_lines import read_json_lines
from mesh.bench.serve.prompt import Prompt
from spanmesh_proto.errors import InvalidRequest

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from mesh.bench.serve.endpoint import EndpointName


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
    prompts = tuple(_prompt(path, number, line, endpoint) for number, line in read_json_lines(path))
    if not prompts:
        raise InvalidRequest(f"{path} holds no prompt; write one JSON object a line", param="--dataset")
    return prompts


def draw(prompts: Sequence[Prompt], count: int, seed: int) -> tuple[Prompt, ...]:
    """So many, in random order; all over again from the first where there are too few.

    Args:
        prompts: At least one.
        count: How many are wanted.
        seed: The same seed, the same order.
    """
    shuffled = Random(seed).sample(prompts, len(prompts))  # noqa: S311 - an order, not a secret
    return tuple(shuffled[index % len(shuffled)] for index in range(count))


def _prompt(path: Path, number: int, line: dict[str, Any], endpoint: EndpointName) -> Prompt:
    name = str(line.get("question_id", line.get("id", number)))
    match line:
        case {"messages": [_, *_] as messages} if all(isinstance(message, dict) for message in messages):
            if endpoint == "completions":
                raise InvalidRequest(
                    f"{path}, line {number}: raw completions take no messages; use --endpoint chat",
                    param="--dataset",
                )
            return Prompt(name, messages=tuple(messages))
        case {"prompt": str(text)} | {"turns": [str(text), *_]} if text:
            return Prompt(name, text)
    raise InvalidRequest(
        f"{path}, line {number}: neither `prompt`, a text, nor `messages`, a chat, nor `turns`, some texts",
        param="--dataset",
    )
