"""Whether an answer under load is what it should be. Pure."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from mesh.bench.stress.script import Turn
    from mesh.bench.stress.told import Told

Kind = Literal["failure", "stream", "length", "pieces", "prompt", "text"]


@dataclass(frozen=True)
class Expected:
    """What a request was answered alone.

    Attributes:
        turn: The request.
        alone: The answer, or None if it was not asked alone.
    """

    turn: Turn
    alone: Told | None = None


@dataclass(frozen=True)
class Problem:
    """Something that must not be.

    Attributes:
        kind: `failure`: no answer, or not all of it. `stream`: chunks that are missing, twice, or out of
            order. `length`: a finish reason that does not go with the number of tokens. `pieces`: a text that
            is not that of its own tokens. `prompt`: another number of prompt tokens than alone. `text`:
            another answer than alone, where that was promised.
        request: Which.
        detail: For a person.
    """

    kind: Kind
    request: str
    detail: str


@dataclass(frozen=True)
class Judgement:
    """Of many answers.

    Attributes:
        num_answers: How many were looked at.
        num_compared: How many of them were answered alone too.
        num_forks: How many of those became another text at some token. The fast mode allows it, the exact
            mode does not.
        problems: In the order of the answers.
    """

    num_answers: int
    num_compared: int
    num_forks: int
    problems: tuple[Problem, ...]

    @property
    def fork_rate(self) -> float:
        """Share of the compared answers, 0 to 1."""
        return self.num_forks / self.num_compared if self.num_compared else 0.0

    @property
    def by_kind(self) -> dict[str, int]:
        """Problems of each kind, the most frequent first."""
        return dict(Counter(problem.kind for problem in self.problems).most_common())


def judge_all(
    told: Sequence[Told],
    expected: Mapping[str, Expected],
    *,
    is_exact: bool,
    text_of: Callable[[Sequence[int]], str] | None,
) -> Judgement:
    """Look at every answer.

    Args:
        told: The answers.
        expected: By `record.prompt_id`.
        is_exact: Whether every text must be the one that was given alone.
        text_of: The text that an answer's tokens make; None if the server does not send them.
    """
    problems: list[Problem] = []
    num_compared = num_forks = 0
    for one in told:
        wanted = expected[one.record.prompt_id]
        problems += _problems(one, wanted, text_of)
        alone = wanted.alone
        if alone is None or one.record.failure is not None or alone.record.failure is not None:
            continue
        num_compared += 1
        if one.text != alone.text or one.record.finish != alone.record.finish:
            num_forks += 1
            if is_exact:
                place = f"differs from the answer given alone at character {_fork(one.text, alone.text)}"
                problems.append(Problem("text", one.record.prompt_id, place))
    return Judgement(len(told), num_compared, num_forks, tuple(problems))


def _problems(
    one: Told, wanted: Expected, text_of: Callable[[Sequence[int]], str] | None
) -> Iterable[Problem]:
    record, turn = one.record, wanted.turn
    request = record.prompt_id
    if record.failure is not None:
        yield Problem("failure", request, f"{record.failure.kind}: {record.failure.message}")
        return
    for fault in one.faults:
        yield Problem("stream", request, fault)
    count = record.num_output_tokens
    finishes = {"length"} if turn.is_full else {"stop", "length"}
    if record.finish not in finishes or (record.finish == "length") != (count == turn.max_tokens):
        # An end token may be the last that was allowed.
        is_last_stop = record.finish == "stop" and count <= turn.max_tokens and not turn.is_full
        if not is_last_stop:
            yield Problem("length", request, f"{record.finish} after {count} of {turn.max_tokens} tokens")
    if len(record.parts_s) > count:
        yield Problem("stream", request, f"{len(record.parts_s)} chunks with tokens for {count} tokens")
    if text_of is not None and one.token_ids and text_of(one.token_ids) != one.text:
        yield Problem("pieces", request, "the text is not that of its own tokens")
    alone = wanted.alone
    if alone is not None and record.num_input_tokens != alone.record.num_input_tokens:
        counts = f"{record.num_input_tokens} prompt tokens, alone {alone.record.num_input_tokens}"
        yield Problem("prompt", request, counts)


def _fork(text: str, other: str) -> int:
    pairs = zip(text, other, strict=False)
    return next((at for at, (a, b) in enumerate(pairs) if a != b), min(len(text), len(other)))
