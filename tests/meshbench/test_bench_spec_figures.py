"""From samples to figures: pairs, rows, floors, a recommendation."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshbench.report_tools import Line
from meshbench.speculation_acceptance import (
    EXACT,
    WITH_DRAFT,
    WITH_HISTORY,
    WITHOUT_DRAFT,
    acceptance_lines,
    closeness,
    recommend,
)
from meshbench.speculation_results import (
    LLAMA_RPC,
    ConcurrentRequests,
    DraftCounts,
    Row,
    Sample,
    mean_speed_up,
    median_ratio,
    pairs_with_off,
    pairs_with_rpc,
    rows_of,
)
from meshbench.speculation_workloads import is_degenerate, repeated_share
from tests.support.spec_bench_samples import sample


def test_a_pair_is_of_one_turn_and_not_of_the_means() -> None:
    samples = [
        sample(0, "off", 10), sample(0, "auto", 30), sample(1, "auto", 20), sample(1, "off", 20),
        sample(2, "auto", 99),
    ]  # fmt: skip
    assert [pair.speed_up for pair in pairs_with_off(samples)] == pytest.approx([3.0, 1.0])


def test_llama_cpp_is_a_base_of_its_own() -> None:
    peer = sample(0, "draft/8", 8, system=LLAMA_RPC)
    samples = [sample(0, "off", 10), peer, sample(0, "auto", 20), sample(1, "auto", 5)]
    assert [pair.speed_up for pair in pairs_with_rpc(samples, "auto")] == pytest.approx([2.5])
    assert len(pairs_with_off(samples)) == 1


def test_a_fork_says_how_far_the_texts_agree() -> None:
    base, same, other = (
        sample(0, "off", text="abcd"),
        sample(0, "auto", text="abcd"),
        sample(0, "ngram", text="abXY"),
    )
    first, second = pairs_with_off([base, same, other])
    assert (first.is_fork, first.common_share) == (False, 1.0)
    assert (second.is_fork, second.common_share) == (True, 0.5)


def row(*samples: Sample, setting: str = "auto") -> Row:
    (found,) = [row for row in rows_of(samples) if row.place.setting == setting]
    return found


def test_a_row_holds_what_was_measured() -> None:
    counts = DraftCounts(
        num_windows=5,
        num_drafts=4,
        num_drafted=8,
        num_accepted=5,
        drafted_per_position=(4, 3, 1),
        accepted_per_position=(3, 2),
    )
    other = DraftCounts(
        num_windows=5,
        num_drafts=1,
        num_drafted=1,
        num_accepted=1,
        drafted_per_position=(1,),
        accepted_per_position=(1,),
    )
    found = row(
        sample(0, "off", 10),
        sample(0, "auto", 20, counts=counts),
        sample(1, "off", 10),
        sample(1, "auto", 40, counts=other, text="x" * 100),
    )
    assert found.num_answers == 2
    assert found.speed_up == pytest.approx(3.0)
    assert (found.speed_up_low, found.speed_up_high) == pytest.approx((2.0, 4.0))
    assert found.tokens_per_s == pytest.approx(30.0)
    assert found.ttft_ms == 100.0
    assert found.itl_ms == pytest.approx((37.5, 50.0, 50.0))
    assert found.tokens_per_window == pytest.approx(20 / 10)
    assert found.mean_accepted == pytest.approx(6 / 5)
    assert found.acceptance == pytest.approx(6 / 9)
    assert found.acceptance_per_position == pytest.approx((4 / 5, 2 / 3, 0.0))
    assert (found.fork_rate, found.degenerate_rate) == (0.5, 0.5)
    assert found.sound_speed_up == pytest.approx(2.0)


def test_a_row_of_off_has_nothing_to_be_compared_with() -> None:
    found = row(sample(0, "off"), setting="off")
    assert (found.speed_up, found.fork_rate, found.tokens_per_window, found.acceptance) == (None,) * 4


def test_raw_and_chat_warm_and_cold_never_share_a_row() -> None:
    kinds: list[dict[str, Any]] = [{}, {"is_raw": True}, {"is_warm": True}, {"temperature": 0.8}]
    samples = [sample(turn, "auto", **kind) for turn, kind in enumerate(kinds)]
    assert len(rows_of(samples)) == 4


def test_each_workload_weighs_the_same() -> None:
    samples = []
    for turn, (workload, rate) in enumerate([("a", 20), ("a", 20), ("a", 20), ("b", 40)]):
        samples += [sample(turn, "off", workload=workload), sample(turn, "auto", rate, workload=workload)]
    assert mean_speed_up(rows_of(samples), lambda _place: True) == pytest.approx(3.0)
    assert mean_speed_up(rows_of(samples), lambda _place: False) is None


def test_counts_come_from_either_servers_timings() -> None:
    ngram = {"drafts": 3, "drafted_per_position": [3, 2], "accepted_per_position": [2, 1]}
    draft = {"drafts": 1, "drafted_per_position": [1, 1, 1], "accepted_per_position": [1, 0, 0]}
    ours = {"windows": 9, "stale_rows": 4, "reason": "it pays", "proposers": {"ngram": ngram, "draft": draft}}
    found = DraftCounts.from_timings({"draft_n": 8, "draft_n_accepted": 4, "speculation": ours})
    assert (found.num_windows, found.num_drafts, found.num_drafted, found.num_accepted) == (9, 4, 8, 4)
    assert (found.drafted_per_position, found.accepted_per_position) == ((4, 3, 1), (3, 1, 0))
    assert (found.num_stale_rows, found.reason) == (4, "it pays")
    assert DraftCounts.from_timings({"draft_n": 8}) == DraftCounts(num_drafted=8)
    assert DraftCounts.from_timings({}) == DraftCounts()


@given(st.text())
def test_a_repeated_share_is_a_share(text: str) -> None:
    assert 0.0 <= repeated_share(text) < 1.0
    assert repeated_share(text * 40) >= repeated_share(text) or len(text) < 16


def test_text_that_goes_in_circles_is_told_from_text_that_does_not() -> None:
    assert is_degenerate("The answer is 42. " * 10)
    assert is_degenerate("Let us begin at the beginning, where the story of the sea is told. " + "la " * 40)
    prose = (
        "The sea is salty because rivers carry salts from rocks, and only water leaves it again as vapour."
    )
    code = "def area(a, b):\n    return a * b\n\n\ndef edge(width, height):\n    return 2 * (width + height)"
    assert not is_degenerate(prose)
    assert not is_degenerate(code)
    assert repeated_share("short") == 0.0


def speeds(server: str, setting: str, by_place: dict[tuple[str, float], float]) -> list[Sample]:
    samples = []
    for turn, ((workload, delay_ms), speed_up) in enumerate(by_place.items(), start=hash(server + setting)):
        where: dict[str, Any] = {"server": server, "workload": workload, "delay_ms": delay_ms}
        samples += [sample(turn, "off", 10, **where), sample(turn, setting, 10 * speed_up, **where)]
    return samples


def test_the_recommended_setting_harms_no_workload() -> None:
    bold = speeds("s", "draft/16", {("a", 5): 4.0, ("b", 5): 0.9})
    fair = speeds("s", "auto", {("a", 5): 2.0, ("b", 5): 1.0})
    slow = speeds("s", "ngram", {("a", 5): 1.1, ("b", 5): 1.0})
    found = recommend(rows_of([*bold, *fair, *slow]))
    assert found.chosen is not None
    assert (found.chosen.setting, found.chosen.worst_at) == ("auto", "b at 5 ms")
    assert found.chosen.speed_ups == {5: pytest.approx(1.5)}
    assert [candidate.setting for candidate in found.candidates] == ["draft/16", "auto", "ngram"]
    assert "1 of 3 are faster" in found.reason


def test_a_setting_must_have_met_every_delay() -> None:
    easy = speeds("s", "draft", {("a", 20): 9.0})
    both = speeds("s", "auto", {("a", 5): 1.5, ("a", 20): 2.0})
    found = recommend(rows_of([*easy, *both]))
    assert [candidate.setting for candidate in found.candidates] == ["auto"]


def test_where_nothing_pays_speculation_stays_off() -> None:
    found = recommend(rows_of(speeds("s", "auto", {("a", 5): 0.9})))
    assert found.chosen is None
    assert "leave speculation off" in found.reason
    assert recommend(()).chosen is None


def test_ceilings_controls_and_raw_text_recommend_nothing() -> None:
    ceiling = speeds("s", "replay", {("a", 5): 9.0})
    again = speeds("s", "off again", {("a", 5): 1.1})
    raw = [sample(7, "off", 10, is_raw=True), sample(7, "auto", 90, is_raw=True)]
    assert recommend(rows_of([*ceiling, *again, *raw])).candidates == ()


def lines_by_title(samples: list[Sample], groups: tuple[ConcurrentRequests, ...] = ()) -> dict[str, Line]:
    lines = acceptance_lines(samples, rows_of(samples), groups, {"writing", "coding", "rag"})
    return {line.title: line for line in lines}


def test_every_line_of_the_table_is_judged() -> None:
    at = {"writing": 3.0, "coding": 5.0, "rag": 1.0}
    samples = [
        *speeds(WITH_DRAFT, "replay", {("writing", 5.0): 6.5, ("writing", 20.0): 17.0}),
        *speeds(
            WITH_DRAFT,
            "draft",
            {(name, delay): ratio for name, ratio in at.items() for delay in (5.0, 20.0)},
        ),
        *speeds(
            WITH_DRAFT,
            "auto",
            {(name, delay): ratio for name, ratio in at.items() for delay in (0.1, 5.0, 20.0)},
        ),
        *speeds(WITH_DRAFT, "off again", {("writing", 0.1): 0.8, ("coding", 0.1): 1.1}),
        *speeds(WITHOUT_DRAFT, "auto", {("writing", 5.0): 0.9, ("rag", 5.0): 1.6}),
        *speeds(EXACT, "draft", {("writing", 20.0): 3.0}),
    ]
    warm = {"is_warm": True, "workload": "warm-repeat", "server": WITH_HISTORY}
    samples += [sample(1, "off", 10, **warm), sample(1, "auto", 45, **warm)]
    drawn = {"server": EXACT, "delay_ms": 20.0, "temperature": 0.8}
    samples += [sample(2, "off", 10, **drawn), sample(2, "draft", 24, **drawn)]
    peer = {"delay_ms": 20.0, "workload": "rag"}
    samples += [
        sample(3, "draft/8", 10, system=LLAMA_RPC, **peer),
        sample(3, "auto", 20, server="other", **peer),
    ]
    lines = lines_by_title(
        samples,
        (
            ConcurrentRequests(4, 5.0, "auto", 100.0, 99.0, 0),
            ConcurrentRequests(8, 5.0, "auto", 100.0, 90.0, 0),
        ),
    )
    found = {title: (line.measured, line.verdict) for title, line in lines.items()}
    assert found == {
        "replay over off, mean of all workloads, 5 ms": (pytest.approx(6.5), "met"),
        "replay over off, mean of all workloads, 20 ms": (pytest.approx(17.0), "missed"),
        "draft over off, mean of chat and coding, 5 ms": (pytest.approx(4.0), "met"),
        "draft over off, mean of chat and coding, 20 ms": (pytest.approx(4.0), "met"),
        "auto over off, mean of all Spec-Bench categories, 20 ms": (pytest.approx(3.0), "met"),
        "auto over llama.cpp RPC at its best, mean of all Spec-Bench categories, 20 ms": (
            pytest.approx(2.0),
            "met",
        ),
        "auto without a draft model over off, warm-repeat with history, 5 ms": (
            pytest.approx(4.5),
            "met",
        ),
        "auto without a draft model over off, mean of all Spec-Bench categories, 5 ms": (
            pytest.approx(1.25),
            "met",
        ),
        "auto over off, the worst of the categories and random-token, 0.1 ms": (
            pytest.approx(1.0),
            "met",
        ),
        "auto over off, the worst of the categories and random-token, 5 ms": (pytest.approx(0.9), "missed"),
        "auto over off, the worst of the categories and random-token, 20 ms": (pytest.approx(1.0), "met"),
        "off again over off, the worst of the categories and random-token, 0.1 ms": (pytest.approx(0.8), ""),
        "temperature 0.8, seeded, draft: answers with the text of off, exact, 20 ms": (1.0, "met"),
        "temperature 0.8, seeded, draft: share of the greedy speed-up, 20 ms": (
            pytest.approx(0.8),
            "met",
        ),
        "auto over off, 4 requests at once, total tokens/s, 5 ms": (pytest.approx(0.99), "met"),
        "auto over off, 8 requests at once, total tokens/s, 5 ms": (pytest.approx(0.9), "missed"),
    }
    assert (
        lines["auto over off, the worst of the categories and random-token, 5 ms"].note
        == f"writing, {WITHOUT_DRAFT}; mean of all 2.30"
    )


def test_what_was_not_measured_is_not_called_missed() -> None:
    assert {line.verdict for line in lines_by_title([]).values()} == {"not measured"}


def test_auto_is_held_against_replay_of_the_same_place() -> None:
    samples = [
        *speeds(WITH_DRAFT, "replay", {("writing", 5.0): 8.0}),
        *speeds(WITH_DRAFT, "auto", {("writing", 5.0): 2.0, ("rag", 5.0): 2.0}),
    ]
    (found,) = closeness(rows_of(samples))
    assert (found.delay_ms, found.workload, found.server) == (5.0, "writing", WITH_DRAFT)
    assert found.share == pytest.approx(0.25)


def test_the_median_round_speaks_for_a_crowd() -> None:
    groups = [ConcurrentRequests(4, 5.0, "auto", 100.0, rate, 0) for rate in (90.0, 120.0, 105.0)]
    assert median_ratio(groups, 4, "auto") == pytest.approx(1.05)
    assert median_ratio(groups, 8, "auto") is None
