"""What is asked."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, Final

from mesh.bench.stream_client import CHAT_PATH, COMPLETION_PATH

# Every workload that is not a category of Spec-Bench.
OURS: Final = "ours"
SPEC_BENCH: Final = "spec-bench"


@dataclass(frozen=True)
class Question:
    """One prompt.

    Attributes:
        id: Unique within its workload.
        content: Fields of the request body that carry it.
    """

    id: str
    content: dict[str, Any]


@dataclass(frozen=True)
class Workload:
    """Questions of one kind.

    Attributes:
        name: Such as `writing` or `warm-repeat`.
        questions: Each is measured once under each setting.
        source: `spec-bench` or `ours`.
        is_warm: Whether each question is answered once, unmeasured, before it is measured.
        is_raw: Whether it goes to the completion endpoint, without a chat template; such figures are never
            mixed with those of chat.
        fields: Further fields of each request body.
    """

    name: str
    questions: tuple[Question, ...]
    source: str = OURS
    is_warm: bool = False
    is_raw: bool = False
    fields: dict[str, Any] = field(default_factory=dict)

    @property
    def path(self) -> str:
        """The endpoint."""
        return COMPLETION_PATH if self.is_raw else CHAT_PATH

    def first(self, count: int) -> Workload:
        """The same with at most `count` questions, evenly spread."""
        count = min(count, len(self.questions))
        chosen = tuple(self.questions[index * len(self.questions) // count] for index in range(count))
        return replace(self, questions=chosen)

    def without(self, other: Workload) -> Workload:
        """The same without the questions of `other`."""
        return replace(self, questions=tuple(each for each in self.questions if each not in other.questions))


def chat_question(id: str, prompt: str) -> Question:
    """One user message."""
    return Question(id, {"messages": [{"role": "user", "content": prompt}]})
