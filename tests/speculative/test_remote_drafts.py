"""What is proposed of a draft that was made elsewhere, and may come late."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hypothesis import given
from hypothesis import strategies as st

from speculative.cost_model import DraftCost
from speculative.proposer import EMPTY, Draft, DraftReader
from speculative.remote_drafts import RemoteDrafter, RemoteDraftProposer

if TYPE_CHECKING:
    from collections.abc import Sequence

TOKENS = st.lists(st.integers(0, 2), max_size=8)


def proposer(
    committed: list[int], draft: Draft | None = None, *, p_min: float = 0.0, draft_min: int = 1
) -> RemoteDraftProposer:
    made = RemoteDraftProposer(RemoteDrafter(4, draft_min=draft_min, p_min=p_min))
    made.extend(committed)
    if draft is not None:
        made.take_draft(draft)
    return made


def test_it_is_told_of_drafts_and_says_when_there_is_one() -> None:
    made = proposer([5, 6, 7])
    assert isinstance(made, DraftReader)
    assert made.num_drafted == 4
    ready: list[bool] = []
    made.listen(lambda: ready.append(True))
    made.take_draft(Draft(3, (), (), 0.0))
    assert not ready
    made.take_draft(Draft(3, (8, 9), (0.5, 0.25), 2.0))
    assert ready == [True]
    proposal = made.propose(4)
    assert (proposal.tokens, proposal.confidences, proposal.proposer) == ((8, 9), (0.5, 0.25), "assistant")
    made.close()


def test_without_a_draft_or_room_it_proposes_nothing() -> None:
    assert proposer([5]).propose(4) == EMPTY
    assert proposer([5], Draft(1, (6,), (1.0,), 2.0)).propose(0) == EMPTY


def test_an_unlikely_token_ends_what_is_proposed_and_not_what_is_known() -> None:
    draft = Draft(1, (6, 7, 8, 9), (0.9, 0.1, 0.8, 0.3), 2.0)
    assert proposer([5], draft, p_min=0.2).propose(4).tokens == (6,)
    assert proposer([5, 6, 7], draft, p_min=0.2).propose(4).tokens == (8, 9)
    assert proposer([5, 6, 7], draft, p_min=0.5).propose(4).tokens == (8,)
    assert proposer([5, 6], draft, p_min=0.2).propose(4).tokens == ()


def test_fewer_than_the_fewest_are_proposed_only_where_fewer_are_asked_for() -> None:
    draft = Draft(1, (6, 7, 8), (0.9, 0.9, 0.1), 2.0)
    assert proposer([5], draft, draft_min=3).propose(4).tokens == (6, 7, 8)
    assert proposer([5, 6], draft, draft_min=3).propose(4) == EMPTY
    assert proposer([5, 6], draft, draft_min=3).propose(2).tokens == (7, 8)
    assert proposer([5], draft, draft_min=3, p_min=0.2).propose(4) == EMPTY


def test_what_stands_for_a_draft_is_asked_for_behind_the_text_that_it_follows() -> None:
    asked: list[tuple[list[int], int]] = []

    def replace(text: Sequence[int], count: int) -> tuple[Sequence[int], Sequence[float]]:
        asked.append(([*text], count))
        return (3, 4), (0.9, 0.8)

    made = RemoteDraftProposer(RemoteDrafter(4), replace)
    made.extend([5, 6])
    made.take_draft(Draft(3, (1, 1, 1), (0.5, 0.5, 0.5), 2.0))
    # What it follows is not known yet.
    assert made.propose(4) == EMPTY
    assert not asked
    assert made.propose(4, after=[7, 3]).tokens == (4,)
    made.extend([7])
    assert made.propose(4).confidences == (0.9, 0.8)
    assert asked == [([5, 6, 7], 3), ([5, 6, 7], 3)]


def test_what_drafting_costs_is_known_to_all_sessions() -> None:
    drafter = RemoteDrafter(4)
    one, other = RemoteDraftProposer(drafter), RemoteDraftProposer(drafter)
    assert one.draft_cost is None
    one.take_draft(Draft(3, (8, 9), (0.5, 0.25), 2.0))
    assert other.draft_cost == DraftCost(2.0, row_ms=2.0, is_at_tail=True)
    # One that is disturbed says little, and one without tokens nothing.
    other.take_draft(Draft(5, (8,), (0.5,), 2000.0))
    other.take_draft(Draft(5, (), (), 0.0))
    assert one.draft_cost is not None
    assert 2.0 < one.draft_cost.ms_per_token < 2.5


@given(TOKENS, TOKENS, st.integers(0, 20), TOKENS, st.integers(0, 8))
def test_a_draft_goes_on_behind_text_that_agrees_with_it(
    committed: list[int], after: list[int], start: int, drafted: list[int], most: int
) -> None:
    draft = Draft(start, tuple(drafted), tuple(0.5 for _ in drafted), 2.0)
    found = proposer(committed, draft).propose(most, after).tokens
    text = [*committed, *after]
    expected = []
    if start <= len(text) and text[start:] == drafted[: len(text) - start]:
        expected = drafted[len(text) - start :][:most]
    assert list(found) == expected
