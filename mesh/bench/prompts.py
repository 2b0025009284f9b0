"""What the benchmarks ask."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from mesh.bench.json_lines import read_json_lines
from spanmesh_proto.errors import MeshError

if TYPE_CHECKING:
    from pathlib import Path

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
class SpecBenchQuestion:
    """One line of Spec-Bench.

    Attributes:
        id: Its number, as text.
        category: Such as `writing`.
        prompt: Its first turn.
    """

    id: str
    category: str
    prompt: str


def read_spec_bench(path: Path) -> tuple[SpecBenchQuestion, ...]:
    """All questions of a file of JSON lines with `question_id`, `category` and `turns`.

    Raises:
        MeshError: If the file is not of that kind.
    """
    try:
        questions = tuple(
            SpecBenchQuestion(str(line["question_id"]), line["category"], line["turns"][0])
            for _, line in read_json_lines(path)
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
        raise MeshError(f"{path} has no chat question")
    return prompts
