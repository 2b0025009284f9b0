"""What `mesh bench spec --preset features` says of a drafter, from results that were made up."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from meshbench.speculation_acceptance import recommend
from meshbench.speculation_features import (
    WITH_FEATURES,
    chat_beside_raw,
    depths_table,
    features_lines,
)
from meshbench.speculation_results import WITH_RATES, DraftCounts, rows_of
from tests.support.spec_bench_samples import sample

if TYPE_CHECKING:
    from meshbench.report_tools import Line
    from meshbench.speculation_results import Sample

LOOP = "and so on " * 9
CATEGORIES = ("writing", "roleplay", "coding")


def turn(
    number: int, workload: str, delay_ms: float, *, server: str = WITH_FEATURES, **rates: float
) -> list[Sample]:
    """Answers to one question; `off` at 10 tokens/s."""
    where: dict[str, Any] = {"workload": workload, "delay_ms": delay_ms, "server": server}
    names = {"again": "off again", "step2": "in step/2", "step4": "in step/4"}
    rates = {"off": 10.0, **rates}
    return [sample(number, names.get(name, name), rate, **where) for name, rate in rates.items()]


def lines(samples: list[Sample]) -> dict[str, Line]:
    return {line.title: line for line in features_lines(samples, CATEGORIES)}


def test_chat_is_without_code_and_without_degenerate_answers() -> None:
    samples = turn(0, "writing", 5.0, draft=12.0) + turn(1, "coding", 5.0, draft=50.0)
    samples += [
        sample(2, "off", 10.0, workload="roleplay", server=WITH_FEATURES, text=LOOP),
        sample(2, "draft", 90.0, workload="roleplay", server=WITH_FEATURES, text=LOOP),
    ]
    found = lines(samples)["drafter over off, chat, 5 ms"]
    assert found.measured == pytest.approx(1.2)
    assert (found.wanted, found.verdict) == (1.10, "met")
    assert found.note == "1 questions, 1 more with degenerate answers left out"
    assert lines(samples)["drafter over off, chat, 20 ms"].verdict == "not measured"


def test_auto_is_held_against_n_grams_of_the_same_turn() -> None:
    samples = turn(0, "writing", 20.0, ngram=10.0, auto=12.0) + turn(1, "coding", 20.0, ngram=40.0, auto=36.0)
    found = lines(samples)["auto with drafter over n-gram alone, all categories, 20 ms"]
    assert found.measured == pytest.approx((1.2 + 0.9) / 2)
    assert found.verdict == "met"


def test_the_lowest_category_is_held_against_the_lowest_of_off() -> None:
    samples = turn(0, "writing", 0.1, auto=10.0, again=9.5) + turn(1, "coding", 0.1, auto=9.1, again=10.0)
    found = lines(samples)
    lowest = found["auto with drafter over off, lowest category, 0.1 ms"]
    assert lowest.measured == pytest.approx(0.91)
    assert lowest.wanted == pytest.approx(0.92)
    assert lowest.verdict == "missed"
    assert lowest.note.startswith("coding; 2 questions")
    mean = found["auto with drafter over off, mean of all categories, 0.1 ms"]
    assert mean.measured == pytest.approx(0.955)
    assert mean.verdict == "missed"


def test_a_replayed_drafter_in_flight_is_held_against_its_best_in_step() -> None:
    where: dict[str, Any] = {"server": WITH_RATES, "step2": 13.0, "step4": 12.0, "replay": 26.0}
    found = lines(turn(0, "writing", 5.0, **where))
    over_off = found["replay of given acceptance, 5 ms: in flight over off"]
    assert over_off.measured == pytest.approx(2.6)
    assert (over_off.verdict, over_off.note) == ("met", "foretold: 2.74")
    over_step = found["replay of given acceptance, 5 ms: in flight over the best in step"]
    assert over_step.measured == pytest.approx(2.0)
    assert over_step.verdict == "met"
    assert over_step.note == "foretold: 2.16; best: in step/2, 1.30 of off"


TIMINGS: dict[str, Any] = {
    "draft_n": 8,
    "draft_n_accepted": 3,
    "speculation": {
        "windows": 6,
        "proposers": {
            "eagle3": {
                "drafts": 5,
                "drafted_per_position": [5, 3],
                "accepted_per_position": [2, 1],
                "drafted_per_depth": [4, 4],
                "reached_per_depth": [4, 2],
                "accepted_per_depth": [2, 1],
            },
            "ngram": {"drafts": 0, "drafted_per_position": [], "accepted_per_position": []},
        },
        "features": {"wanted": 10, "received": 9, "missing": 1, "bytes": 31_104},
    },
}


def test_acceptance_by_depth_names_both_kinds_and_how_many() -> None:
    counts = DraftCounts.from_timings(TIMINGS)
    where: dict[str, Any] = {"server": WITH_FEATURES}
    table = depths_table(rows_of([sample(0, **where), sample(0, "auto", 20.0, counts=counts, **where)]))
    assert "| unconditional | 9 of 10, 0.0 MB | 0.50 (4) | 0.25 (4) |" in table
    assert "| conditional |  | 0.50 (4) | 0.50 (2) |" in table
    assert len(table.splitlines()) == 4


def test_chat_and_raw_stand_side_by_side_each_over_its_own_off() -> None:
    raw: dict[str, Any] = {"workload": "writing-raw", "is_raw": True, "server": WITH_FEATURES}
    samples = turn(0, "writing", 5.0, draft=12.0)
    samples += [sample(1, "off", 20.0, **raw), sample(1, "draft", 50.0, **raw)]
    table = chat_beside_raw(rows_of(samples))
    assert "| 5 | writing | draft | 1.20 |  | 2.50 |  |" in table
    assert len(table.splitlines()) == 3


def test_a_replay_is_never_recommended() -> None:
    samples = turn(0, "writing", 5.0, server=WITH_RATES, step4=30.0, replay=40.0)
    samples += turn(1, "writing", 5.0, draft=12.0)
    found = recommend(rows_of(samples))
    assert [candidate.setting for candidate in found.candidates] == ["draft"]
