"""A recorded answer is proposed with certainty, for as long as it is the answer."""

import pytest

from speculative.lookup_proposers import RatedAnswer, ReplayProposer
from speculative.proposer import EMPTY

RECORD = tuple(range(100, 160))


def begun() -> ReplayProposer:
    proposer = ReplayProposer(RECORD)
    proposer.extend([1, 2, 3])
    return proposer


def test_is_certain_of_the_record() -> None:
    proposal = begun().propose(16)
    assert proposal.tokens == RECORD[:16]
    assert proposal.confidences == (1.0,) * 16
    assert proposal.proposer == "replay"


def test_goes_on_behind_what_is_committed_and_in_flight() -> None:
    proposer = begun()
    proposer.extend(RECORD[:7])
    proposer.extend(RECORD[7:8])
    assert proposer.propose(4).tokens == RECORD[8:12]
    assert proposer.propose(4, after=RECORD[8:30]).tokens == RECORD[30:34]
    assert proposer.propose(99, after=RECORD[8:58]).tokens == RECORD[58:]
    assert proposer.propose(9, after=RECORD[8:]) == EMPTY
    assert proposer.propose(0) == EMPTY


def test_without_a_record_it_has_nothing_to_say() -> None:
    proposer = ReplayProposer(())
    proposer.extend([1, 2, 3])
    proposer.extend([4])
    assert proposer.propose(8, after=[5]) == EMPTY


def test_finds_its_way_back_to_the_record_less_certain() -> None:
    proposer = begun()
    proposer.extend(RECORD[:20])
    proposer.extend([7])
    assert proposer.propose(4) == EMPTY
    proposer.extend([RECORD[21]])
    proposal = proposer.propose(4)
    assert proposal.tokens == RECORD[22:26]
    assert max(proposal.confidences) < 1.0


def test_what_is_in_flight_and_not_of_the_record_is_respected() -> None:
    proposer = begun()
    assert proposer.propose(4, after=[7]) == EMPTY
    assert proposer.propose(4, after=[7, RECORD[1]]).tokens == RECORD[2:6]
    assert proposer.propose(4).tokens == RECORD[:4]


def _replayed(rates: tuple[float, ...], seed: int = 0) -> list[list[bool]]:
    """Which tokens of each draft were right, in step, over a long answer."""
    answer = [index * 7 % 101 for index in range(4000)]
    proposer = ReplayProposer(answer, rates, seed)
    proposer.extend([1, 2, 3])
    drafts, place = [], 0
    while place < len(answer) - len(rates):
        proposal = proposer.propose(100)
        assert proposal.depths == tuple(range(1, len(rates) + 1))
        right = [token == answer[place + index] for index, token in enumerate(proposal.tokens)]
        drafts.append(right)
        num_committed = (right.index(False) if False in right else len(right)) + 1
        proposer.extend(answer[place : place + num_committed])
        place += num_committed
    return drafts


def test_rates_stand_for_a_drafter() -> None:
    rates = (0.75, 0.5, 0.9)
    drafts = _replayed(rates)
    for index, rate in enumerate(rates):
        reached = [right[index] for right in drafts if all(right[:index])]
        assert sum(reached) / len(reached) == pytest.approx(rate, abs=0.05)
    assert drafts == _replayed(rates)
    assert drafts != _replayed(rates, seed=1)
    assert all(all(right) for right in _replayed((1.0, 1.0)))
    assert not any(any(right) for right in _replayed((0.0,)))


def test_rates_end_the_chain_and_go_on_behind_wrong_tokens() -> None:
    proposer = ReplayProposer([5, 6, 7, 8, 9], (0.5, 0.5, 0.5))
    proposer.extend([1])
    assert proposer.propose(10, after=(99,)).depths == (2, 3)
    assert proposer.propose(1, after=(99, 98)).depths == (3,)
    assert proposer.propose(10, after=(99, 98, 97)) == EMPTY
    proposer.extend([4])
    assert proposer.propose(10) == EMPTY, "the answer is another one"
    alone = ReplayProposer([5], (0.0,))
    alone.extend([1])
    assert alone.propose(1).tokens == (6,)


def test_a_draft_follows_the_text_as_long_as_it_is_the_recorded_one() -> None:
    rated = RatedAnswer(RECORD, (1.0, 0.5, 0.0), num_before=3)
    prompt = [1, 2, 3]
    tokens, rates = rated.behind([*prompt, *RECORD[:7]], 9)
    assert (tokens[0], rates) == (RECORD[7], (1.0, 0.5, 0.0))
    assert len(tokens) == 3
    assert tokens[2] != RECORD[9]
    assert rated.behind(prompt, 1) == (RECORD[:1], (1.0,))
    assert rated.behind([*prompt, *RECORD[:59]], 3) == (RECORD[59:], (1.0,))
    assert rated.behind([*prompt, *RECORD[:6], 7], 3) == ((), ())
    assert rated.behind(prompt[:2], 3) == ((), ())


def test_no_two_answers_have_the_same_luck() -> None:
    rates = (0.5,) * len(RECORD)
    wrong = [
        [
            token != right
            for token, right in zip(RatedAnswer(answer, rates).drafted(0, 0, 60)[0], answer, strict=True)
        ]
        for answer in (RECORD, RECORD[::-1])
    ]
    assert wrong[0] != wrong[1]
    assert all(15 < sum(each) < 45 for each in wrong)


def test_a_token_that_is_right_far_behind_a_text_is_right_close_to_it() -> None:
    rated = RatedAnswer(RECORD, (0.9, 0.6, 0.3), num_before=0)
    for start in range(len(RECORD) - 3):
        (near, *_), _ = rated.behind(RECORD[: start + 2], 1)
        (*_, far), _ = rated.behind(RECORD[:start], 3)
        assert near == RECORD[start + 2] or far != RECORD[start + 2]
