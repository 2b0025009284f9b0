"""A recorded answer is proposed with certainty, for as long as it is the answer."""

from speculative.lookup_proposers import ReplayProposer
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
