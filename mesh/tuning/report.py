"""Reports of drafters: acceptance on recorded answers, gains, and how many tokens to draft.

Chat and raw completions are in tables of their own and never compared: the same drafter differs between them.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Final

from mesh.tuning.acceptance import (
    LEAST_PROMPTS,
    LEAST_TOKENS,
    Acceptance,
    Gain,
    Interval,
    acceptance_of,
    expected_at,
    gain,
)
from speculative.acceptance import Judgement, SpanClass, StageMeasure, WindowOutcome
from speculative.cost_model import Timing, best_rate
from speculative.proposer import EMPTY

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from mesh.tuning.conversation_file import Api
    from mesh.tuning.jobs import Measured

DELAYS_MS: Final = (0.1, 5.0, 20.0)
"""One-way delays of the links for which tokens a second are computed."""
_MOST_DRAFTED: Final = 8
_APIS: Final[tuple[Api, ...]] = ("chat", "raw")
# Below this a session rather decodes without drafts.
_LEAST_SPEEDUP: Final = 1.02


@dataclass(frozen=True)
class RingTimes:
    """Times of which tokens a second are computed."""

    rows_ms: tuple[tuple[int, float], ...]
    """Rows of a window, and the time of all stages together for them; one row first."""
    draft_ms: float
    """Time of a drafted token."""
    num_stages: int
    """Stages; a window crosses one link more."""


@dataclass(frozen=True)
class Rate:
    """Tokens a second for one number of drafted tokens."""

    num_drafted: int
    """0 without drafts."""
    tokens_per_s: float
    """Of one session, with one window at a time."""


@dataclass(frozen=True)
class Advice:
    """How many tokens to draft at one delay."""

    delay_ms: float
    """One way, of each link."""
    rates: tuple[Rate, ...]
    """By number of drafted tokens, from 0 on."""
    best: int
    """The number with most tokens a second; 0 for off."""
    in_flight: float
    """Tokens a second with several windows in flight, by the controller's own model."""

    @property
    def speedup(self) -> float:
        """Of the best number, over none."""
        return self.rates[self.best].tokens_per_s / self.rates[0].tokens_per_s


@dataclass(frozen=True)
class DrafterRow:
    """One drafter on the answers of one API."""

    name: str
    acceptance: Acceptance
    gain: Gain | None
    """Over the first drafter; None for the first one."""
    advice: tuple[Advice, ...]
    """By delay; empty if no times are known."""


@dataclass(frozen=True)
class ReportSection:
    """Drafters on the same answers."""

    title: str
    api: Api
    rows: tuple[DrafterRow, ...]
    notes: tuple[str, ...] = ()

    def as_dict(self) -> dict[str, Any]:
        """JSON-serialisable."""
        return asdict(self)


def sections_of(
    title: str, measured: Sequence[Measured], times: Sequence[RingTimes | None], notes: Iterable[str] = ()
) -> list[ReportSection]:
    """Sections of one recording: one for each API.

    Args:
        title: Of the recording.
        measured: Drafters; gains are over the first.
        times: For each of them.
        notes: Sentences about the recording.
    """
    found = []
    for api in _APIS:
        rows = []
        parts = [[answer for answer in each.answers if answer.api == api] for each in measured]
        for index, (each, part) in enumerate(zip(measured, parts, strict=True)):
            if (acceptance := acceptance_of(part)) is None:
                continue
            ring = times[index]
            rows.append(
                DrafterRow(
                    name=each.name,
                    acceptance=acceptance,
                    gain=gain(parts[0], part) if index else None,
                    advice=()
                    if ring is None
                    else tuple(advise(acceptance, ring, delay_ms) for delay_ms in DELAYS_MS),
                )
            )
        if rows:
            found.append(ReportSection(title, api, tuple(rows), tuple(notes)))
    return found


def advise(acceptance: Acceptance, times: RingTimes, delay_ms: float) -> Advice:
    """How many tokens to draft.

    One window at a time commits 1 + a₁ + … + aₙ tokens, and takes the links' time, the stages' for n + 1 rows
    and the drafter's for n tokens.

    Args:
        acceptance: Of the drafter.
        times: Of the ring and the drafter.
        delay_ms: One-way delay of each link.
    """
    network_ms = delay_ms * (times.num_stages + 1)
    accepted = expected_at(acceptance, _MOST_DRAFTED)
    rates = []
    for count in range(_MOST_DRAFTED + 1):
        took_ms = network_ms + _rows_ms(times, count + 1) + count * times.draft_ms
        rates.append(Rate(count, 1e3 * (1.0 + sum(accepted[:count])) / took_ms))
    best = max(rates, key=lambda rate: rate.tokens_per_s)
    pays = best.tokens_per_s >= _LEAST_SPEEDUP * rates[0].tokens_per_s
    # The controller's model has one acceptance for all positions: that with as many tokens a window.
    plan = best_rate(
        _timing(times, network_ms),
        acceptance.per_window.value / (1.0 + acceptance.per_window.value),
        max_width=_MOST_DRAFTED,
        max_depth=_MOST_DRAFTED,
        token_ms=times.draft_ms,
    )
    return Advice(delay_ms, tuple(rates), best.num_drafted if pays else 0, plan.tokens_per_s)


def as_markdown(title: str, sections: Sequence[ReportSection], notes: Sequence[str] = ()) -> str:
    """The report as text."""
    parts = [f"# {title}", *notes]
    for section in sections:
        parts += [f"## {section.title}: {section.api}", _counts(section), *section.notes]
        parts += [_acceptance_table(section), _gains(section), _advice_table(section)]
    parts.append(
        "Windows as served: the next begins behind the corrected token. Intervals are 95 %, by bootstrap "
        "over prompts. Acceptance on recorded answers is no time: `mesh bench spec` measures that."
    )
    return "\n\n".join(part for part in parts if part) + "\n"


def _counts(section: ReportSection) -> str:
    found = section.rows[0].acceptance
    text = (
        f"{found.num_prompts} prompts, {found.num_tokens:,} tokens of answers, {found.num_windows:,} windows"
    )
    if found.num_degenerate:
        text += f"; {found.num_degenerate} answers that repeat themselves are left out"
    text += "."
    if not found.is_enough:
        text += f" Too few to tell: at least {LEAST_PROMPTS} prompts and {LEAST_TOKENS:,} tokens are needed."
    return text


def _acceptance_table(section: ReportSection) -> str:
    num = len(section.rows[0].acceptance.unconditional)
    head = ["drafter", *(f"token {index + 1}" for index in range(num))]
    head += [f"{index + 1} behind {index}" for index in range(1, num)] + ["accepted a window", "coverage"]
    rows = []
    for row in section.rows:
        found = row.acceptance
        conditional = ("-" if each is None else f"{each:.2f}" for each in found.conditional[1:])
        rows.append(
            [
                row.name,
                *(f"{each.value:.3f}" for each in found.unconditional),
                *conditional,
                _shown(found.per_window),
                f"{found.coverage:.3f}",
            ]
        )
    return _table(head, rows)


def _gains(section: ReportSection) -> str:
    first = section.rows[0].name
    lines = [
        f"- {row.name} over {first}, paired: first token {_shown(row.gain.first, is_signed=True)}, "
        f"accepted a window {_shown(row.gain.per_window, is_signed=True)}"
        for row in section.rows
        if row.gain is not None
    ]
    return "\n".join(lines)


def _advice_table(section: ReportSection) -> str:
    rows = [
        [
            row.name,
            f"{advice.delay_ms:g} ms",
            f"{advice.rates[0].tokens_per_s:.1f}",
            str(advice.best or "off"),
            f"{advice.rates[advice.best].tokens_per_s:.1f}",
            f"{advice.speedup:.2f}",
            f"{advice.in_flight:.1f}",
        ]
        for row in section.rows
        for advice in row.advice
    ]
    if not rows:
        return ""
    head = ["drafter", "delay of a link", "tokens/s without", "tokens to draft", "tokens/s", "times"]
    return "Computed, not measured:\n\n" + _table([*head, "tokens/s, windows in flight"], rows)


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _shown(estimate: Interval, *, is_signed: bool = False) -> str:
    sign = "+" if is_signed else ""
    return f"{estimate.value:{sign}.3f} [{estimate.low:{sign}.3f}, {estimate.high:{sign}.3f}]"


def _rows_ms(times: RingTimes, num_rows: int) -> float:
    """Time of a number of rows, on the lines between and behind the known ones."""
    known = times.rows_ms
    for (rows, ms), (next_rows, next_ms) in pairwise(known):
        if num_rows <= next_rows or (next_rows, next_ms) == known[-1]:
            return ms + (next_ms - ms) * (num_rows - rows) / (next_rows - rows)
    return known[0][1]


def _timing(times: RingTimes, network_ms: float) -> Timing:
    """The controller's model of these times, with stages of the same size."""
    timing = Timing()
    for num_rows in range(1, _MOST_DRAFTED + 2):
        ms = _rows_ms(times, num_rows) / times.num_stages
        outcome = WindowOutcome(
            judgement=Judgement((0,), 0, 0, SpanClass.PLAIN),
            proposal=EMPTY,
            position=0,
            sent_ms=0.0,
            arrived_ms=network_ms + times.num_stages * ms,
            num_in_flight=0,
            stages=(StageMeasure(num_rows, 0.0, ms),) * times.num_stages,
            num_stale=0,
            num_behind=0,
        )
        timing.add(outcome, is_alone=True)
    return timing
