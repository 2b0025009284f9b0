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
        num_hung_up_early: How many broke off because their clients hung up before the first token.
        num_hung_up_late: The same after it. What they got until then is compared.
    """

    num_answers: int
    num_compared: int
    num_forks: int
    problems: tuple[Problem, ...]
    num_hung_up_early: int = 0
    num_hung_up_late: int = 0

    @property
    def num_hung_up(self) -> int:
        """Whose clients did not wait for the end."""
        return self.num_hung_up_early + self.num_hung_up_late

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
    num_compared = num_forks = num_early = num_late = 0
    for one in told:
        wanted = expected[one.record.prompt_id]
        failure, alone = one.record.failure, wanted.alone
        is_part = failure is not None and failure.is_hang_up
        if is_part:
            is_early = not one.token_ids and not one.text
            num_early += is_early
            num_late += not is_early
            if is_early:
                continue
        else:
            problems += _problems(one, wanted, text_of)
        if alone is None or alone.record.failure is not None or (failure is not None and not is_part):
            continue
        num_compared += 1
        is_as_alone = _begins(alone, one) if is_part else _equals(alone, one)
        if not is_as_alone:
            num_forks += 1
            if is_exact:
                place = f"differs from the answer given alone at character {_fork(one.text, alone.text)}"
                problems.append(Problem("text", one.record.prompt_id, place))
    return Judgement(len(told), num_compared, num_forks, tuple(problems), num_early, num_late)


def _equals(alone: Told, one: Told) -> bool:
    return one.text == alone.text and one.record.finish == alone.record.finish


def _begins(alone: Told, part: Told) -> bool:
    """Whether what came until the client hung up is how the answer given alone begins."""
    has_tokens = alone.token_ids[: len(part.token_ids)] == part.token_ids
    return alone.text.startswith(part.text) and (has_tokens or not alone.token_ids)


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
