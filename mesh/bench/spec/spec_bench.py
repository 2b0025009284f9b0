"""Spec-Bench's questions, one workload for each category."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from mesh.bench.prompts import read_spec_bench
from mesh.bench.spec.workload import SPEC_BENCH, Workload, chat_question

if TYPE_CHECKING:
    from pathlib import Path

# Spec-Bench takes these from MT-Bench; its own tables call them multi-turn conversation.
CHAT: Final = ("writing", "roleplay", "reasoning", "extraction", "stem", "humanities")
CODING: Final = ("coding",)


def spec_bench_workloads(path: Path, per_category: int) -> tuple[Workload, ...]:
    """First turns of the questions, evenly spread over each category, categories in the file's order.

    Args:
        path: `question.jsonl`.
        per_category: At most so many of each.

    Raises:
        MeshError: If the file is not of that kind.
    """
    by_category: dict[str, list[tuple[str, str]]] = {}
    for question in read_spec_bench(path):
        by_category.setdefault(question.category, []).append((question.id, question.prompt))
    return tuple(
        Workload(
            name, tuple(chat_question(number, prompt) for number, prompt in questions), source=SPEC_BENCH
        ).first(per_category)
        for name, questions in by_category.items()
    )
