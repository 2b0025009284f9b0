"""Workloads of `mesh bench spec`."""

from __future__ import annotations

import json
from dataclasses import dataclass, field, replace
from random import Random
from typing import TYPE_CHECKING, Any, Final

from mesh.util.completion_stream import CHAT_PATH, COMPLETION_PATH
from meshbench.datasets import BUILT_IN, read_spec_bench
from spanmesh_proto.errors import MeshError

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from mesh.text.tokenizer import Tokenizer

# Every workload that is not a category of Spec-Bench.
OURS: Final = "ours"
SPEC_BENCH: Final = "spec-bench"
# End of the names of workloads without a chat template.
RAW_END: Final = "-raw"
# Spec-Bench takes these from MT-Bench; its own tables call them multi-turn conversation.
CHAT: Final = ("writing", "roleplay", "reasoning", "extraction", "stem", "humanities")
CODING: Final = ("coding",)
_WISHES: Final = (
    ("weather", "What is the weather in Lisbon, Porto and Faro on 2026-05-02, in celsius?"),
    ("trains", "Book two seats from Berlin to Munich on 2026-03-14 and two seats back on 2026-03-16."),
    ("mails", "Tell anna@example.com and ben@example.com that the meeting moved to ten o'clock."),
    ("journey", "Book one seat from Rome to Naples on 2026-07-01 and mail the date to carla@example.com."),
)
_NUM_TOKENS: Final = 48
_STACK: Final = '''\
class Stack:
    """Last in, first out."""

    def __init__(self) -> None:
        self.items = []

    def push(self, item) -> None:
        self.items.append(item)

    def pop(self):
        if not self.items:
            raise IndexError("the stack is empty")
        return self.items.pop()

    def size(self) -> int:
        return len(self.items)
'''
_PRICES: Final = """\
TAX_RATE = 0.19


def net_price(order):
    total = 0
    for item in order:
        total += item.price * item.count
    return total


def gross_price(order):
    return net_price(order) * (1 + TAX_RATE)


def print_bill(order):
    for item in order:
        print(item.name, item.count, item.price)
    print("total", gross_price(order))
"""
_SETTINGS: Final = """\
server:
  host: 127.0.0.1
  port: 8080
  workers: 4
  timeout_seconds: 30
database:
  url: sqlite:///data/app.db
  pool_size: 5
  echo: false
logging:
  level: info
  format: json
  file: logs/app.log
"""
_TEXTS: Final = """\
def count_words(text):
    counts = {}
    for word in text.lower().split():
        word = word.strip(".,;:!?")
        if word:
            counts[word] = counts.get(word, 0) + 1
    return counts


def most_common(text, limit):
    counts = count_words(text)
    ordered = sorted(counts.items(), key=lambda pair: -pair[1])
    return ordered[:limit]
"""
_EDITS: Final = (
    ("stack", "stack.py", _STACK, "rename the method `size` to `length`"),
    ("prices", "prices.py", _PRICES, "change TAX_RATE to 0.21"),
    ("settings", "settings.yaml", _SETTINGS, "change the port to 9090"),
    ("texts", "texts.py", _TEXTS, "rename the function `count_words` to `word_counts`"),
)
WARM_REPEAT: Final = "warm-repeat"
# Characters, not words or tokens: the same for every script and every tokenizer.
_GRAM_CHARS: Final = 16
_LIMIT: Final = 0.4


@dataclass(frozen=True)
class Question:
    """One prompt."""

    id: str
    """Unique within its workload."""
    content: dict[str, Any]
    """Fields of the request body that carry it."""


@dataclass(frozen=True)
class Workload:
    """Questions of one kind."""

    name: str
    """Such as `writing` or `warm-repeat`."""
    questions: tuple[Question, ...]
    """Each is measured once under each setting."""
    source: str = OURS
    """`spec-bench` or `ours`."""
    is_warm: bool = False
    """Whether each question is answered once, unmeasured, before it is measured."""
    is_raw: bool = False
    """Whether it goes to the completion endpoint, without a chat template; such figures are never mixed with
    those of chat."""
    fields: dict[str, Any] = field(default_factory=dict)
    """Further fields of each request body."""

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

    @property
    def is_text(self) -> bool:
        """Whether all prompts are texts, not ids."""
        return all(isinstance(each.content.get("prompt", ""), str) for each in self.questions)

    def behind(self, text: str) -> Workload:
        """The same with a text ahead of each question, which must be text as well."""
        questions = []
        for each in self.questions:
            if self.is_raw:
                content: dict[str, Any] = {"prompt": f"{text}\n\n{each.content['prompt']}"}
            else:
                first, *later = each.content["messages"]
                content = {"messages": [first | {"content": f"{text}\n\n{first['content']}"}, *later]}
            questions.append(replace(each, content=content))
        return replace(self, questions=tuple(questions))

    def without_template(self) -> Workload:
        """The same prompts for the completion endpoint."""
        questions = tuple(
            replace(question, content={"prompt": question.content["messages"][0]["content"]})
            for question in self.questions
        )
        return Workload(f"{self.name}{RAW_END}", questions, is_raw=True)


def chat_question(id: str, prompt: str) -> Question:
    """One user message."""
    return Question(id, {"messages": [{"role": "user", "content": prompt}]})


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


def _tool(name: str, about: str, **parameters: str) -> dict[str, Any]:
    properties = {key: {"type": kind} for key, kind in parameters.items()}
    return {
        "name": name,
        "description": about,
        "parameters": {"type": "object", "properties": properties, "required": list(parameters)},
    }


_TOOLS: Final = (
    _tool("get_weather", "The weather of a day.", city="string", date="string", unit="string"),
    _tool("book_train", "Book seats.", origin="string", destination="string", date="string", seats="integer"),
    _tool("send_mail", "Send a message.", to="string", subject="string", body="string"),
)


def tool_call() -> Workload:
    """The same three tools and several wishes."""
    tools = json.dumps(_TOOLS, indent=1)
    return Workload(
        "tool-call",
        tuple(
            chat_question(
                label,
                f"These are your tools, as JSON schemas:\n{tools}\n\n"
                "Answer with a JSON array of calls, each an object with `name` and `arguments`, and with "
                f"nothing else.\n\n{wish}",
            )
            for label, wish in _WISHES
        ),
    )


def random_tokens(tokenizer: Tokenizer, seed: int, count: int) -> Workload:
    """As a user's message.

    Args:
        tokenizer: Tokenizer with the vocabulary; control tokens are left out.
        seed: The same seed, the same prompts.
        count: How many.
    """
    questions = []
    for index, ids in enumerate(_draw(tokenizer, seed, count)):
        text = b"".join(tokenizer.piece(token) for token in ids).decode(errors="ignore")
        questions.append(chat_question(f"seed-{seed}-{index}", text))
    return Workload("random-token", tuple(questions))


def raw_random_tokens(tokenizer: Tokenizer, seed: int, count: int) -> Workload:
    """The very ids as a raw prompt."""
    drawn = _draw(tokenizer, seed, count)
    questions = tuple(
        Question(f"seed-{seed}-{index}", {"prompt": list(ids)}) for index, ids in enumerate(drawn)
    )
    return Workload("random-token-raw", questions, is_raw=True)


def _draw(tokenizer: Tokenizer, seed: int, count: int) -> list[tuple[int, ...]]:
    random = Random(seed)  # noqa: S311 - prompts, not secrets
    # Control tokens have no text, and would end the message.
    visible = [token for token in range(tokenizer.n_vocab) if tokenizer.piece(token)]
    return [tuple(random.choices(visible, k=_NUM_TOKENS)) for _ in range(count)]


def repository_edit() -> Workload:
    """Files of 12 to 19 lines, each with the change to make."""
    return Workload(
        "repository-edit",
        tuple(
            chat_question(
                label,
                f"This is the file {name}:\n\n```\n{content}```\n\n"
                f"In this file, {change}. Answer with the whole file after the change and nothing else.",
            )
            for label, name, content, change in _EDITS
        ),
    )


def all_workloads(
    tokenizer: Tokenizer | None, *, spec_bench: Path | None, per_workload: int, seed: int
) -> dict[str, Workload]:
    """Every workload by its name: Spec-Bench's categories if there is a file, and the project's own.

    Args:
        tokenizer: Of the model to be measured; without one there are no random prompts.
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
        *(() if tokenizer is None else (random_tokens(tokenizer, seed, per_workload),)),
        warm_repeat((edit, call, built_in)),
        built_in.without_template(),
        *(() if tokenizer is None else (raw_random_tokens(tokenizer, seed, per_workload),)),
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
    """Questions that were asked before, in turn by source."""
    longest = max(len(source.questions) for source in sources)
    questions = tuple(
        Question(f"{source.name}-{source.questions[index].id}", source.questions[index].content)
        for index in range(longest)
        for source in sources
        if index < len(source.questions)
    )
    return Workload(WARM_REPEAT, questions, is_warm=True)


def repeated_share(text: str) -> float:
    """Share of the text's 16-character spans that occurred before in it, in [0, 1].

    The measure is seq-rep-n of Welleck et al., Neural Text Generation With Unlikelihood Training (2020), on
    characters instead of tokens. A line that is said over and over comes near 1; ordinary prose, code and
    JSON stay below 0.2.
    """
    num_grams = len(text) - _GRAM_CHARS + 1
    if num_grams < 1:
        return 0.0
    return 1 - len({text[start : start + _GRAM_CHARS] for start in range(num_grams)}) / num_grams


def is_degenerate(text: str) -> bool:
    """Whether the text repeats itself for 40 % of its length or more."""
    return repeated_share(text) >= _LIMIT
