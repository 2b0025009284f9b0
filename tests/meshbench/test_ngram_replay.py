"""Recorded edits, replayed: the figures mean what they say."""

import json
import zipfile
from collections.abc import Sequence
from itertools import count
from pathlib import Path

import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from meshbench.ngram_replay import (
    FileEdit,
    ReleasePair,
    ReplayTotals,
    download,
    edits_between,
    main,
    measure,
    read_folder,
    read_wheel,
    replay,
    tokenize,
    verdict_on,
)
from spanmesh_proto.errors import MeshError
from speculative.lookup_proposers import NgramOptions, NgramProposer
from speculative.proposer import EMPTY, Proposal


class Knower(NgramProposer):
    """Knows the text, and errs at every token that is a multiple of ten."""

    def __init__(self, text: Sequence[int]) -> None:
        self.heard: list[int] = []
        self._text = text

    def extend(self, tokens: Sequence[int]) -> None:
        self.heard.extend(tokens)

    def propose(self, max_tokens: int, after: Sequence[int] = ()) -> Proposal:
        start = len(self.heard) + len(after)
        tokens = tuple(token if token % 10 else -1 for token in self._text[start : start + max_tokens])
        return Proposal(tokens, (0.5,) * len(tokens), "knower") if tokens else EMPTY


def test_steps_and_acceptance_are_counted_by_hand() -> None:
    prompt, target = [1, 2, 3], list(range(4, 34))
    proposer = Knower([*prompt, *target])
    totals = ReplayTotals()
    replay(proposer, prompt, target, totals, max_width=4, clock_ns=count(step=1000).__next__)
    assert proposer.heard == [*prompt, *target]
    # 4-8, 9-10 (10 was wrong), 11-15, 16-20 (20 comes free), 21-25, 26-30, 31-33
    assert (totals.num_steps, totals.num_tokens) == (7, 30)
    assert (totals.num_proposed, totals.num_accepted) == (4 * 6 + 2, 4 + 1 + 4 * 4 + 2)
    assert totals.tokens_per_step == pytest.approx(30 / 7)
    assert totals.acceptance == pytest.approx(23 / 26)
    # A clock that ticks a microsecond whenever it is read.
    assert totals.propose_us == totals.extend_us == [1.0] * 7
    assert totals.prompt_us_per_token == pytest.approx(1 / 3)


@given(st.lists(st.integers(0, 2), max_size=8), st.lists(st.integers(0, 2), min_size=9, max_size=9))
def test_a_verdict_ends_at_the_first_difference(proposed: list[int], target: list[int]) -> None:
    verdict = verdict_on(proposed, target[: len(proposed) + 1])
    assert list(verdict) == target[: len(verdict)]
    assert list(verdict[:-1]) == proposed[: len(verdict) - 1]
    assert len(verdict) == len(proposed) + 1 or verdict[-1] != proposed[len(verdict) - 1]


@given(
    st.lists(st.integers(0, 30), min_size=1, max_size=80),
    st.lists(st.integers(0, 30), min_size=1, max_size=80),
)
def test_any_edit_comes_out_whole(before: list[int], after: list[int]) -> None:
    totals = measure([(before, after)], 8, NgramOptions())
    assert totals.num_tokens == len(after)
    assert len(after) / 9 <= totals.num_steps <= len(after)
    assert totals.num_steps + totals.num_accepted == len(after)


def test_a_small_edit_of_a_long_file_takes_few_steps() -> None:
    """Every length of step in it: the beginning, the stretch before the edit, the way back."""
    before = [(place * 7919) % 1009 for place in range(3000)]
    after = [*before[:1000], 5000, 5001, *before[1003:2000], *before[2100:]]
    totals = measure([(before, after)], 32, NgramOptions())
    assert totals.tokens_per_step > 24
    assert totals.acceptance > 0.9


def test_edits_are_the_files_that_changed(tmp_path: Path) -> None:
    for folder, files in {
        "old": {"pkg/a.py": "a = 1\n", "pkg/b.py": "b\n", "pkg/gone.py": "", "pkg/x.txt": "1"},
        "new": {"pkg/a.py": "a = 2\n", "pkg/b.py": "b\n", "pkg/new.py": "", "pkg/x.txt": "2"},
    }.items():
        files |= {"pkg/_vendor/c.py": folder}
        with zipfile.ZipFile(tmp_path / f"{folder}.whl", "w") as wheel:
            for path, text in files.items():
                (tmp_path / folder / path).parent.mkdir(parents=True, exist_ok=True)
                (tmp_path / folder / path).write_text(text)
                wheel.writestr(path, text)
    expected = [FileEdit("pkg/a.py", "a = 1\n", "a = 2\n")]
    assert edits_between(read_folder(tmp_path / "old"), read_folder(tmp_path / "new")) == expected
    assert edits_between(read_wheel(tmp_path / "old.whl"), read_wheel(tmp_path / "new.whl")) == expected
    with pytest.raises(MeshError, match="is not a folder"):
        read_folder(tmp_path / "neither")


def test_wheels_that_are_there_are_not_fetched_again(tmp_path: Path) -> None:
    for version, text in (("1.0", "old"), ("2.0", "new")):
        folder = tmp_path / f"no-such-package=={version}"
        folder.mkdir()
        with zipfile.ZipFile(folder / "no_such_package.whl", "w") as wheel:
            wheel.writestr("a.py", text)
    pair = ReleasePair("no-such-package", "1.0", "2.0")
    assert list(download([pair], tmp_path)) == [FileEdit("a.py", "old", "new")]


def test_files_of_no_usual_size_are_left_out() -> None:
    sizes = [(63, 100), (64, 8192), (100, 8193)]
    edits = [FileEdit(str(size), "x" * size[0], "x" * size[1]) for size in sizes]
    assert [(len(one), len(other)) for one, other in tokenize(edits, lambda text: [0] * len(text))] == [
        (64, 8192)
    ]


@pytest.mark.model
def test_two_folders_are_replayed_and_the_figures_written(tmp_path: Path) -> None:
    text = "".join(f"def f{line}(x):\n    return x + {line * line}\n\n\n" for line in range(60))
    for name, content in (("old", text), ("new", text.replace("def f30(x)", "def renamed(x, y)"))):
        (tmp_path / name).mkdir()
        (tmp_path / name / "module.py").write_text(content)
    arguments = ["--releases", str(tmp_path / "old"), str(tmp_path / "new"), "--widths", "8,32"]
    result = CliRunner().invoke(main, [*arguments, "--json", str(tmp_path / "figures.json")])
    assert result.exit_code == 0, result.output
    rows = json.loads((tmp_path / "figures.json").read_text())
    assert [row["max_width"] for row in rows] == [8, 32]
    assert rows[0]["edits"] == 1
    assert 4 < rows[0]["tokens_per_step"] < 9
    assert rows[0]["tokens_per_step"] < rows[1]["tokens_per_step"] < 33
    assert all(row["acceptance"] > 0.8 for row in rows)


@pytest.mark.model
@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--widths", "8,x"], "not a list of positive numbers"),
        (["--tokens-per-evidence", "0"], "must be positive"),
        (["--releases", ".", "."], "no file in common that changed"),
    ],
)
def test_what_cannot_be_measured_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], says: str
) -> None:
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(main, arguments)
    assert result.exit_code != 0
    assert says in result.output
