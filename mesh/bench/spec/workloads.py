"""The named workloads."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Final

from mesh.bench.prompts import BUILT_IN
from mesh.bench.spec.edits import repository_edit
from mesh.bench.spec.random_tokens import random_tokens, raw_random_tokens
from mesh.bench.spec.spec_bench import spec_bench_workloads
from mesh.bench.spec.tool_calls import tool_call
from mesh.bench.spec.workload import Question, Workload, chat_question
from spanmesh_proto.errors import MeshError

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from mesh.text.tokenizer import Tokenizer

WARM_REPEAT: Final = "warm-repeat"


def all_workloads(
    tokenizer: Tokenizer, *, spec_bench: Path | None, per_workload: int, seed: int
) -> dict[str, Workload]:
    """Every workload by its name: Spec-Bench's categories if there is a file, and the project's own.

    Args:
        tokenizer: Of the model to be measured.
        spec_bench: Spec-Bench's `question.jsonl`.
        per_workload: At most so many questions of each.
        seed: For random prompts.

    Raises:
        MeshError: If the file is not of that kind.
    """
    built_in = Workload("built-in", tuple(chat_question(str(n), text) for n, text in enumerate(BUILT_IN)))
    found = () if spec_bench is None else spec_bench_workloads(spec_bench, per_workload)
    edit, call = repository_edit(), tool_call()
    ours = (
        built_in,
        edit,
        call,
        random_tokens(tokenizer, seed, per_workload),
        warm_repeat((edit, call, built_in)),
        _without_template(built_in),
        raw_random_tokens(tokenizer, seed, per_workload),
    )
    return {workload.name: workload.first(per_workload) for workload in (*found, *ours)}


def choose(workloads: dict[str, Workload], names: Sequence[str]) -> tuple[Workload, ...]:
    """The workloads of these names.

    Raises:
        MeshError: If there is none of a name.
    """
    unknown = [name for name in names if name not in workloads]
    if unknown:
        raise MeshError(f"no workload is called {unknown[0]}; there are {', '.join(workloads)}")
    return tuple(workloads[name] for name in names)


def warm_repeat(sources: Sequence[Workload]) -> Workload:
    """Questions that were asked before, the sources' in turn."""
    longest = max(len(source.questions) for source in sources)
    questions = tuple(
        Question(f"{source.name}-{source.questions[index].id}", source.questions[index].content)
        for index in range(longest)
        for source in sources
        if index < len(source.questions)
    )
    return Workload(WARM_REPEAT, questions, is_warm=True)


def _without_template(workload: Workload) -> Workload:
    """What a completion endpoint makes of the same prompts."""
    questions = tuple(
        replace(question, content={"prompt": question.content["messages"][0]["content"]})
        for question in workload.questions
    )
    return Workload(f"{workload.name}-raw", questions, is_raw=True)
