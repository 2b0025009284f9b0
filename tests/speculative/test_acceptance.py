"""Verdicts against windows, and the counts over them."""

from functools import reduce

import pytest
from hypothesis import given
from hypothesis import strategies as st

from speculative.acceptance import Judgement, SpanClass, SpanKind, SpeculationStatistics, judge

tokens = st.integers(0, 5)


class TestJudge:
    @pytest.mark.parametrize(
        ("proposed", "sampled", "num_accepted", "span"),
        [
            ([], [4], 0, SpanClass.PLAIN),
            ([7], [7, 4], 1, SpanClass.FULL_ACCEPT),
            ([7, 8, 9], [7, 8, 9, 4], 3, SpanClass.FULL_ACCEPT),
            ([7, 8, 9], [7, 8, 5], 2, SpanClass.TAIL_REJECT),
            ([7], [5], 0, SpanClass.TAIL_REJECT),
            ([7, 8, 9], [7, 5], 1, SpanClass.EARLY_REJECT),
            ([7, 8, 9], [6], 0, SpanClass.EARLY_REJECT),
        ],
    )
    def test_all_that_was_drawn_is_committed(
        self, proposed: list[int], sampled: list[int], num_accepted: int, span: SpanClass
    ) -> None:
        judgement = judge(proposed, sampled)
        assert judgement == Judgement(tuple(sampled), len(proposed), num_accepted, span)
        assert judgement.is_rejected == (num_accepted < len(proposed))

    @pytest.mark.parametrize(
        ("sampled", "committed", "num_accepted", "span"),
        [
            ([7, 2, 9, 4], (7, 2), 2, SpanClass.FULL_ACCEPT),
            ([7, 2, 9, 2], (7, 2), 2, SpanClass.FULL_ACCEPT),
            ([7, 2, 5], (7, 2), 2, SpanClass.TAIL_REJECT),
            ([2], (2,), 0, SpanClass.EARLY_REJECT),
            ([7, 0], (7, 0), 1, SpanClass.EARLY_REJECT),
        ],
    )
    def test_a_stop_inside_ends_the_text(
        self, sampled: list[int], committed: tuple[int, ...], num_accepted: int, span: SpanClass
    ) -> None:
        judgement = judge([7, 2, 9], sampled, end_tokens={0, 2})
        assert judgement == Judgement(committed, 3, num_accepted, span, has_stop=True)

    def test_a_limit_cuts_before_it_looks_for_a_stop(self) -> None:
        judgement = judge([7, 8, 2], [7, 8, 2, 4], end_tokens={2}, max_committed=2)
        assert judgement == Judgement((7, 8), 3, 2, SpanClass.FULL_ACCEPT)

    @pytest.mark.parametrize(
        ("proposed", "sampled"),
        [
            ([7, 8], []),
            ([7, 8], [7, 8, 9, 9]),  # more rows than were asked for
            ([7, 8], [6, 8]),  # went on behind a difference
            ([7, 8], [7]),  # stopped although nothing differed
            ([], []),
            ([], [1, 2]),
        ],
    )
    def test_a_verdict_of_another_window_is_refused(self, proposed: list[int], sampled: list[int]) -> None:
        with pytest.raises(ValueError, match="a verdict of"):
            judge(proposed, sampled)

    @given(st.lists(tokens, max_size=6), st.lists(tokens, min_size=7, max_size=7), st.sets(tokens))
    def test_commits_what_plain_decoding_would(
        self, proposed: list[int], target: list[int], end_tokens: set[int]
    ) -> None:
        """Where the target would draw `target` token by token, a window changes the pace, not the text."""
        differs = (row for row, token in enumerate(proposed) if token != target[row])
        sampled = target[: next(differs, len(proposed)) + 1]
        committed = judge(proposed, sampled, end_tokens=end_tokens).committed
        stop = next((index for index, token in enumerate(target) if token in end_tokens), len(target))
        assert list(committed) == target[: min(len(sampled), stop + 1)]


JUDGEMENTS = (
    judge([], [4]),
    judge([7, 8, 9], [7, 8, 9, 4]),
    judge([7, 8, 9], [7, 5]),
    judge([7, 8], [6]),
    judge([7, 2], [7, 2, 1], end_tokens={2}),
)


class TestStatistics:
    def test_counts_what_it_is_given(self) -> None:
        counts = reduce(SpeculationStatistics.add, JUDGEMENTS, SpeculationStatistics())
        assert (counts.num_windows, counts.num_drafts, counts.num_committed) == (5, 4, 1 + 4 + 2 + 1 + 2)
        assert counts.proposed_per_position == (4, 4, 2)
        assert counts.accepted_per_position == (3, 2, 1)
        assert counts.reached_per_position == (4, 3, 1)
        assert counts.acceptance_per_position() == (0.75, 0.5, 0.5)
        assert counts.conditional_acceptance_per_position() == (0.75, 2 / 3, 1.0)
        assert (counts.num_proposed, counts.num_accepted) == (10, 6)
        assert counts.mean_accepted == 1.5
        assert counts.mean_committed == 2.0
        assert counts.spans == {
            SpanKind(SpanClass.PLAIN, has_stop=False): 1,
            SpanKind(SpanClass.FULL_ACCEPT, has_stop=False): 1,
            SpanKind(SpanClass.EARLY_REJECT, has_stop=False): 2,
            SpanKind(SpanClass.FULL_ACCEPT, has_stop=True): 1,
        }

    def test_nothing_yet_is_zero_and_not_an_error(self) -> None:
        none = SpeculationStatistics()
        assert (none.mean_accepted, none.mean_committed, none.acceptance_per_position()) == (0.0, 0.0, ())

    @given(st.lists(st.sampled_from(JUDGEMENTS)), st.lists(st.sampled_from(JUDGEMENTS)))
    def test_sessions_merge(self, left: list[Judgement], right: list[Judgement]) -> None:
        none = SpeculationStatistics()
        apart = reduce(SpeculationStatistics.add, left, none).merge(
            reduce(SpeculationStatistics.add, right, none)
        )
        assert apart == reduce(SpeculationStatistics.add, [*left, *right], none)
