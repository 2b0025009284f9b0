"""One controller's choices: switches, limits, reasons."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from speculative.acceptance import (
    Judgement,
    ProposalContext,
    SpanClass,
    StageMeasure,
    WindowOutcome,
    judge_unread,
)
from speculative.controller import Controller, ControllerOptions, SharedMeasures
from speculative.cost_model import DraftCost
from speculative.proposer import EMPTY, Proposal


def moment(
    now_ms: float = 0.0, num_in_flight: int = 0, room: int = 40, num_sessions: int = 1
) -> ProposalContext:
    return ProposalContext(now_ms, num_in_flight, 0, room, num_sessions)


def sure(width: int, confidence: float = 0.95, proposer: str = "ngram") -> Proposal:
    return Proposal((7,) * width, (confidence,) * width, proposer)


def plain(sent_ms: float, elapsed_ms: float = 50.0) -> WindowOutcome:
    stages = (StageMeasure(1, 0.0, 4.0),) * 3
    return WindowOutcome(
        Judgement((1,), 0, 0, SpanClass.PLAIN), EMPTY, 0, sent_ms, sent_ms + elapsed_ms, 0, stages, 0, 0
    )


def warm(options: ControllerOptions | None = None) -> Controller:
    """A controller that knows what a plain window takes."""
    controller = Controller(options or ControllerOptions(), SharedMeasures())
    for index in range(4):
        controller.wanted(moment(50.0 * index))
        controller.judged(plain(50.0 * index))
    return controller


class TestSwitches:
    def test_width_zero_never_proposes(self) -> None:
        controller = warm(ControllerOptions(fixed_width=0))
        assert controller.wanted(moment()) == 0
        assert controller.decide(moment(), sure(4)).width == 0

    def test_a_fixed_width_is_kept_whatever_it_is_worth(self) -> None:
        controller = Controller(ControllerOptions(fixed_width=3), SharedMeasures())
        assert controller.wanted(moment()) == 3
        assert controller.decide(moment(), sure(8, confidence=0.01)).width == 3
        assert controller.decide(moment(), sure(2)).width == 2
        assert controller.summary()["policy"] == "fixed"

    def test_a_fixed_depth_is_kept(self) -> None:
        controller = Controller(ControllerOptions(fixed_width=3, fixed_depth=2), SharedMeasures())
        assert controller.wanted(moment(num_in_flight=1)) == 3
        assert controller.wanted(moment(num_in_flight=2)) == 0

    def test_in_step_nothing_flies_behind(self) -> None:
        controller = warm(ControllerOptions(max_depth=1))
        assert controller.wanted(moment(num_in_flight=1)) == 0
        assert controller.wanted(moment(num_in_flight=0)) > 0

    def test_p_min_takes_the_place_of_prices(self) -> None:
        controller = Controller(ControllerOptions(fixed_width=8, p_min=0.5), SharedMeasures())
        assert controller.decide(moment(), sure(8, confidence=0.8)).width == 3  # 0.8³ = 0.51

    @pytest.mark.parametrize(
        "values",
        [
            {"max_width": 0},
            {"max_depth": 0},
            {"fixed_width": -1},
            {"fixed_depth": 0},
            {"p_min": 1.5},
            {"p_min": math.nan},
        ],
    )
    def test_nonsense_is_refused(self, values: dict[str, float]) -> None:
        with pytest.raises(ValueError, match=next(iter(values))):
            ControllerOptions(**values)  # type: ignore[arg-type]


class TestDraftLimit:
    """How many tokens a drafter is asked for."""

    def accepting(self, share: float) -> Controller:
        """A controller that has seen windows of two drafted tokens, of which this share was accepted."""
        controller = warm()
        for index in range(40):
            num_accepted = 2 if index < 40 * share else 0
            committed = (7,) * (num_accepted + 1)
            kind = SpanClass.FULL_ACCEPT if num_accepted else SpanClass.EARLY_REJECT
            judgement = Judgement(committed, 2, num_accepted, kind)
            stages = (StageMeasure(3, 0.0, 8.0),) * 3
            drafted = Proposal((7, 7), (0.5, 0.5), "eagle3", (1, 2))
            sent_ms = 1000.0 + 60.0 * index
            controller.judged(WindowOutcome(judgement, drafted, 0, sent_ms, sent_ms + 60.0, 0, stages, 0, 0))
        return controller

    def test_one_is_always_drafted_behind_the_committed_token(self) -> None:
        controller = self.accepting(0.0)
        controller.wanted(moment())
        assert controller.draft_limit("eagle3") == 1

    def test_the_likelier_the_more(self) -> None:
        limits = []
        for share in (0.1, 0.5, 0.9):
            controller = self.accepting(share)
            controller.wanted(moment())
            limits.append(controller.draft_limit("eagle3"))
        assert limits == sorted(limits)
        assert limits[0] < limits[-1] <= ControllerOptions().max_width

    def test_fewer_behind_windows_in_flight(self) -> None:
        controller = self.accepting(0.2)
        limits = []
        for number in range(20):
            now = moment(num_in_flight=number)
            controller.wanted(now)
            limits.append(controller.draft_limit("eagle3"))
            controller.decide(now, Proposal((7,), (0.5,), "eagle3", (number + 1,)))
        assert limits == sorted(limits, reverse=True)
        assert limits[-1] < limits[0]

    def test_fewer_where_each_row_of_a_block_takes_long(self) -> None:
        limits = []
        for row_ms in (0.01, 4.0, 12.0, 80.0):
            controller = self.accepting(0.3)
            controller.wanted(moment())
            controller._timing.note_draft_cost(DraftCost(2 * row_ms, 8.0, row_ms))
            limits.append(controller.draft_limit("eagle3"))
        assert limits == sorted(limits, reverse=True)
        assert limits[0] > limits[1] > limits[2] >= limits[3] == 1
        # Of other drafters each token costs the same; what they may draft is told by `best_rate`.
        controller._timing.note_draft_cost(DraftCost(80.0))
        assert controller.draft_limit("eagle3") == limits[0]

    @pytest.mark.parametrize(("elapsed_ms", "rests"), [(50.0, False), (65.0, True)])
    def test_a_drafter_that_only_slows_plain_windows_rests(self, elapsed_ms: float, *, rests: bool) -> None:
        controller, now_ms = warm(), 1000.0
        for _ in range(12):
            is_wanted = controller.wanted(moment(now_ms)) > 0
            if is_wanted:
                controller.draft_limit("dflash")
            # Its block is never ready when a window leaves.
            controller.decide(moment(now_ms), EMPTY)
            outcome = plain(now_ms, elapsed_ms if is_wanted else 50.0)
            controller.judged(outcome)
            now_ms = outcome.arrived_ms
        assert controller.is_resting == rests
        # What it slowed is not taken for a plain window.
        assert controller.summary()["plain_tokens_per_s"] == pytest.approx(20.0, rel=0.02)

    def test_a_fixed_width_is_drafted(self) -> None:
        assert warm(ControllerOptions(fixed_width=3)).draft_limit("eagle3") == 3


class TestReasons:
    def test_it_measures_a_plain_window_first(self) -> None:
        controller = Controller(ControllerOptions(), SharedMeasures())
        assert controller.wanted(moment()) == 0
        assert controller.summary()["reason"] == "measuring a plain window first"
        for index in range(2):
            controller.wanted(moment(50.0 * index))
            controller.judged(plain(50.0 * index))
        assert controller.wanted(moment(100.0)) > 0

    def test_it_says_which_token_is_not_worth_its_row(self) -> None:
        decision = warm().decide(moment(200.0, num_in_flight=1), sure(4, confidence=0.01))
        assert decision.width == 0
        assert decision.reason.startswith("ngram: token 1 is likely to 0.01, costs")

    def test_it_says_what_it_waits_for(self) -> None:
        controller = warm()
        for index in range(4):
            now_ms = 1000.0 + 400.0 * index
            controller.decide(moment(now_ms), sure(1))
            rejected = Judgement((1,), 1, 0, SpanClass.TAIL_REJECT)
            controller.judged(WindowOutcome(rejected, sure(1), 0, now_ms, now_ms + 400.0, 0, (), 0, 0))
        assert controller.wanted(moment(9000.0)) == 0
        assert "trying again in" in controller.summary()["reason"]

    def test_several_sessions_measure_plain_windows_together(self) -> None:
        controller = warm()
        assert controller.wanted(moment(num_sessions=4)) == 0
        assert controller.summary()["reason"] == "measuring plain windows of 4 sessions"

    def test_its_summary_has_figures(self) -> None:
        controller = warm()
        controller.decide(moment(200.0, num_in_flight=1), sure(4))
        summary = controller.summary()
        assert summary["plain_tokens_per_s"] == pytest.approx(20.0)
        assert summary["expected_tokens_per_s"] > 20.0
        assert summary["policy"] == "auto"


class TestLearning:
    def test_sessions_share_what_they_know_of_the_ring(self) -> None:
        shared = SharedMeasures()
        first, second = Controller(ControllerOptions(), shared), Controller(ControllerOptions(), shared)
        for index in range(2):
            first.wanted(moment(50.0 * index))
            first.judged(plain(50.0 * index))
        assert second.wanted(moment()) > 0

    def test_a_window_voided_unread_counts_against_its_first_token(self) -> None:
        controller = warm()
        for _ in range(40):
            controller.judged(WindowOutcome(judge_unread(4), sure(4), 0, 300.0, 350.0, 1, (), 0, 0))
        decision = controller.decide(moment(400.0, num_in_flight=1), sure(4))
        assert decision.width == 0

    def test_what_flew_behind_a_prompt_is_not_billed_for_it(self) -> None:
        shared = SharedMeasures()
        shared.add_plain(plain(0.0))
        shared.add_plain(plain(50.0))
        controller = Controller(ControllerOptions(), shared)
        controller.decide(moment(0.0, num_in_flight=3), sure(2))
        judgement = Judgement((1, 2), 2, 2, SpanClass.FULL_ACCEPT)
        controller.judged(WindowOutcome(judgement, sure(2), 0, 0.0, 60_000.0, 3, (), 0, 0))
        assert controller.wanted(moment(60_000.0)) > 0


events = st.lists(
    st.tuples(
        st.integers(0, 20),  # in flight
        st.integers(0, 40),  # room
        st.integers(1, 9),  # sessions
        st.lists(st.floats(0.0, 1.0), max_size=12),  # confidences
        st.integers(0, 12),  # accepted
        st.floats(0.0, 1e5),  # elapsed
        st.booleans(),  # has measures
    ),
    max_size=30,
)


@given(events)
def test_whatever_happens_it_keeps_within_the_room_and_never_speaks_of_nan(
    happenings: list[tuple[int, int, int, list[float], int, float, bool]],
) -> None:
    controller = Controller(ControllerOptions(), SharedMeasures())
    now_ms = 0.0
    for in_flight, room, sessions, confidences, accepted, elapsed_ms, has_measures in happenings:
        now = moment(now_ms, in_flight, room, sessions)
        proposal = Proposal((5,) * len(confidences), tuple(confidences), "draft")
        assert 0 <= controller.wanted(now) <= room
        decision = controller.decide(now, proposal)
        assert 0 <= decision.width <= min(room, len(confidences))
        sent = proposal.first(decision.width)
        num_accepted = min(accepted, decision.width)
        span = SpanClass.FULL_ACCEPT if num_accepted == decision.width else SpanClass.EARLY_REJECT
        judgement = Judgement((1,) * (num_accepted + 1), decision.width, num_accepted, span)
        stages = (StageMeasure(decision.width + 1, 0.0, elapsed_ms / 3),) * 2 if has_measures else ()
        controller.judged(
            WindowOutcome(judgement, sent, 0, now_ms, now_ms + elapsed_ms, in_flight, stages, 0, 0)
        )
        now_ms += elapsed_ms
    figures = [value for value in controller.summary().values() if isinstance(value, float)]
    assert all(math.isfinite(value) for value in figures)
    controller.close()
