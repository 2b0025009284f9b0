"""Earlier answers to the same key: proposed again, to nobody else, and bounded."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from speculative.lookup_proposers import Histories

ANSWER = list(range(100, 200))


def answer_once(histories: Histories, key: str, prompt: list[int], answer: list[int]) -> None:
    proposer = histories.open(key)
    proposer.extend(prompt)
    for token in answer:
        proposer.extend([token])
    proposer.close()


def test_the_same_question_gets_the_same_answer_proposed_from_its_first_token() -> None:
    histories = Histories()
    answer_once(histories, "alice", [1, 2, 3], ANSWER)
    proposer = histories.open("alice")
    proposer.extend([1, 2, 3])
    proposal = proposer.propose(16)
    assert list(proposal.tokens) == ANSWER[:16]
    assert proposal.proposer == "history"
    assert min(proposal.confidences) > 0.9


def test_another_question_gets_it_once_the_answer_says_the_same() -> None:
    histories = Histories()
    answer_once(histories, "alice", [1, 2, 3], ANSWER)
    proposer = histories.open("alice")
    proposer.extend([7, 2, 3])
    assert proposer.propose(8).tokens == ()
    proposer.extend([5, 6])
    proposer.extend(ANSWER[40:42])
    assert list(proposer.propose(3).tokens) == ANSWER[42:45]


def test_nothing_crosses_from_key_to_key() -> None:
    histories = Histories()
    answer_once(histories, "alice", [1, 2, 3], ANSWER)
    proposer = histories.open("bob")
    proposer.extend([1, 2, 3])
    assert proposer.propose(8).tokens == ()
    proposer.extend(ANSWER[:10])
    assert proposer.propose(8).tokens == ()


def test_an_answer_is_known_when_its_session_is_over() -> None:
    histories = Histories()
    running = histories.open("alice")
    running.extend([1])
    running.extend(ANSWER)
    other = histories.open("alice")
    other.extend([1])
    assert other.propose(8).tokens == ()
    running.close()
    late = histories.open("alice")
    late.extend([1])
    assert list(late.propose(2).tokens) == ANSWER[:2]


def test_the_latest_answer_counts() -> None:
    histories = Histories()
    answer_once(histories, "alice", [1], ANSWER)
    answer_once(histories, "alice", [1], ANSWER[::-1])
    proposer = histories.open("alice")
    proposer.extend([1])
    assert list(proposer.propose(4).tokens) == ANSWER[::-1][:4]


def test_a_repeated_answer_takes_no_room() -> None:
    histories = Histories(max_tokens=400)
    for _ in range(50):
        answer_once(histories, "alice", [1], ANSWER)
    answer_once(histories, "alice", [2], ANSWER[::-1])
    assert histories._histories["alice"].answers.stop == 200


def test_the_key_that_was_not_used_for_longest_is_forgotten() -> None:
    histories = Histories(max_keys=2)
    for key in ("alice", "bob", "alice", "carol"):
        answer_once(histories, key, [1], ANSWER)
    assert set(histories._histories) == {"alice", "carol"}


@given(st.lists(st.tuples(st.integers(0, 4), st.lists(st.integers(0, 9), max_size=50)), max_size=20))
def test_memory_is_bounded(answers: list[tuple[int, list[int]]]) -> None:
    """Sessions that overlap with others whose answers push theirs out go on, with what is left."""
    histories = Histories(max_tokens=60)
    old = histories.open("alice")
    old.extend([0])
    for prompt, answer in answers:
        answer_once(histories, "alice", [prompt], answer)
        kept = histories._histories["alice"].answers
        assert kept.stop - kept.first <= 60
        old.extend(answer[:3])
        assert set(old.propose(8).tokens) <= set(range(10))


def test_a_session_that_never_began_leaves_nothing() -> None:
    histories = Histories()
    histories.open("alice").close()
    assert histories._histories["alice"].answers.stop == 0


def test_a_key_s_sessions_learn_together_what_its_history_is_worth() -> None:
    """Answers that share two tokens with earlier ones and then differ, session after session."""

    def confidence() -> float:
        proposer = histories.open("alice")
        proposer.extend([1000])
        proposer.extend(ANSWER[50:52])
        (first,) = proposer.propose(1).confidences
        return first

    histories = Histories()
    answer_once(histories, "alice", [1, 2, 3], ANSWER)
    before = confidence()
    for prompt in range(20):
        answer_once(histories, "alice", [prompt], [*ANSWER[50:52], 2000 + prompt])
    assert confidence() < before / 2


@pytest.mark.parametrize("bounds", [{"max_keys": 0}, {"max_tokens": 1}])
def test_bounds_that_keep_nothing_are_refused(bounds: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="at least"):
        Histories(**bounds)
