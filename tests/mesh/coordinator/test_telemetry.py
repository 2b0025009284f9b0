"""What a session's windows came to: the same counts however often, and whenever, somebody asks."""

from collections import defaultdict
from dataclasses import replace
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mesh.coordinator import telemetry
from mesh.coordinator.plugs import SessionPlug  # noqa: TC001
from mesh.coordinator.telemetry import SessionTelemetry
from mesh.engine import FeatureCounts, GenerationStats, SpeculationReport
from speculative.acceptance import DepthStatistics, Judgement, SpeculationStatistics, judge, judge_unread
from speculative.proposer import Proposal


@st.composite
def judgements(draw: st.DrawFn) -> Judgement:
    proposed = draw(st.lists(st.integers(0, 9), max_size=6))
    is_unread = draw(st.integers(0, 3)) == 0
    if proposed and is_unread:
        return judge_unread(len(proposed))
    num_matched = draw(st.integers(0, len(proposed)))
    sampled = [*proposed[:num_matched], 10 + draw(st.integers(0, 1))]
    return judge(proposed, sampled, end_tokens={11}, max_committed=draw(st.none() | st.integers(1, 4)))


ASKED: Any = None
NGRAM = Proposal((7, 8, 9), (0.5, 0.5, 0.5), "ngram")


@given(
    events=st.lists(
        st.none() | st.tuples(st.sampled_from(["", "ngram", "draft"]), judgements()), max_size=60
    ),
    counted_at_once=st.sampled_from([1, 2, 7, 1000]),
)
def test_counts_are_those_of_all_windows(
    events: list[tuple[str, Judgement] | None], counted_at_once: int
) -> None:
    session = SessionTelemetry(0.0)
    all_so_far: defaultdict[str, list[Judgement]] = defaultdict(list)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(telemetry, "_COUNTED_AT_ONCE", counted_at_once)
        for event in [*events, ASKED]:
            if event is None:
                assert session.report().by_proposer == {
                    name: SpeculationStatistics.of(judged) for name, judged in all_so_far.items()
                }
                continue
            proposer, judgement = event
            all_so_far[proposer].append(judgement)
            session.add_unread(judgement, Proposal((), (), proposer))
    everything = [judgement for judged in all_so_far.values() for judgement in judged]
    assert session.stats().num_proposed == sum(judgement.num_proposed for judgement in everything)


def test_a_window_is_counted_once_however_often_somebody_asks(monkeypatch: pytest.MonkeyPatch) -> None:
    counted = 0
    count = SpeculationStatistics.of

    def counting(judged: list[Judgement]) -> SpeculationStatistics:
        nonlocal counted
        counted += len(judged)
        return count(judged)

    monkeypatch.setattr(SpeculationStatistics, "of", counting)
    session = SessionTelemetry(0.0)
    for _ in range(1000):
        session.add_unread(judge_unread(3), NGRAM)
        assert session.report().total.num_proposed % 3 == 0
    assert session.report().total.num_windows == counted == 1000
    session.add_unread(judge_unread(3), NGRAM)
    # What nobody asks about does not pile up either.
    for _ in range(10_000):
        session.add_unread(judge_unread(3), NGRAM)
    assert len(session._judged["ngram"]._fresh) < 1000


def test_drafted_tokens_are_counted_by_depth_in_void_windows_too() -> None:
    session = SessionTelemetry(0.0)
    chain = [Proposal((1, 2, 3), (0.5,) * 3, "mtp", depths) for depths in ((1, 2, 3), (4, 5, 6), (7, 8, 9))]
    # All of the first window, one token of the second; the third is void before its verdict.
    session.add_window(judge([1, 2, 3], [1, 2, 3, 1]), chain[0], (), sent_ms=0.0, arrived_ms=1.0)
    session.add_window(judge([2, 3], [5], num_confirmed=1), chain[1], (), sent_ms=0.0, arrived_ms=1.0)
    session.add_void(2, 3, chain[2])
    session.add_unread(judge_unread(3), NGRAM)
    (found,) = session.report().by_depth.values()
    assert found == DepthStatistics(proposed=(1,) * 9, reached=(1, 1, 1, 1, 1), accepted=(1, 1, 1, 1))
    assert found.acceptance() == (1.0, 1.0, 1.0, 1.0, 0.0, 0.0, 0.0, 0.0, 0.0)
    assert found.conditional_acceptance() == (1.0, 1.0, 1.0, 1.0, 0.0)
    merged = session.report().merge(session.report())
    assert merged.by_depth["mtp"].proposed == (2,) * 9
    proposer = merged.as_dict()["proposers"]["mtp"]
    assert proposer["reached_per_depth"] == [2, 2, 2, 2, 2]
    assert "drafted_per_depth" not in merged.as_dict()["proposers"]["ngram"]


def test_what_is_known_at_the_start_stays_in_the_statistics() -> None:
    session = SessionTelemetry(5.0, initial=GenerationStats(num_cached=7))
    session.add_prefilled(9.0)
    assert (session.stats().num_cached, session.stats().prefill_ms) == (7, 4.0)


def test_features_are_counted_where_a_drafter_reads_them() -> None:
    assert SessionTelemetry(0.0).report().as_dict()["features"] is None

    class Counting:
        @staticmethod
        def reported(report: SpeculationReport) -> SpeculationReport:
            return replace(report, features=FeatureCounts(10, 8, 4096))

    session = SessionTelemetry(0.0, plugs=[cast("SessionPlug", Counting)])
    both = SessionTelemetry(0.0).report().merge(session.report()).merge(session.report())
    assert both.as_dict()["features"] == {"wanted": 20, "received": 16, "missing": 4, "bytes": 8192}
