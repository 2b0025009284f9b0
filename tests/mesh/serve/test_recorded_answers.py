"""Recorded answers: read from their file, proposed as long as they are the ones given."""

from pathlib import Path

import pytest

from mesh.serve.preflight import latest_answer
from spanmesh_proto.errors import ClusterError
from speculative.lookup_proposers import ReplayProposer


def test_the_latest_line_counts(tmp_path: Path) -> None:
    path = tmp_path / "answers.jsonl"
    path.write_text("")
    assert latest_answer(path) == ()
    path.write_text('{"ask": {}, "tokens": [1, 2]}\n{"ask": {}, "tokens": [3]}\n')
    assert latest_answer(path) == (3,)


@pytest.mark.parametrize("line", ["nonsense", "[]", "{}", '{"tokens": 3}', '{"tokens": ["a"]}'])
def test_a_file_of_something_else_is_refused(tmp_path: Path, line: str) -> None:
    path = tmp_path / "answers.jsonl"
    path.write_text(line + "\n")
    with pytest.raises(ClusterError, match="records no answer"):
        latest_answer(path)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ClusterError, match=r"cannot read .*nowhere\.jsonl: No such file"):
        latest_answer(tmp_path / "nowhere.jsonl")


class TestReplayProposer:
    def test_it_goes_on_behind_what_flies(self) -> None:
        proposer = ReplayProposer([5, 6, 7, 8])
        proposer.extend([1, 2, 3])
        assert proposer.propose(2).tokens == (5, 6)
        assert proposer.propose(9, after=[5]).tokens == (6, 7, 8)
        proposer.extend([5, 6])
        assert proposer.propose(9).tokens == (7, 8)
        assert proposer.propose(9, after=[7, 8]).tokens == ()
        assert proposer.propose(0).tokens == ()

    def test_it_falls_silent_once_another_answer_is_given(self) -> None:
        proposer = ReplayProposer([5, 6, 7, 8])
        proposer.extend([1, 2, 3])
        proposer.extend([5, 9])
        assert proposer.propose(9).tokens == ()
