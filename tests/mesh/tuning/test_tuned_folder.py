"""Tuned drafters of a recording: what is kept, and what goes with an API key."""

from __future__ import annotations

import errno
import shutil
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from mesh.tuning.tuned_folder import NO_KEY, TunedDrafter, TunedFolder, may_serve
from spanmesh_proto.errors import ModelError

if TYPE_CHECKING:
    from pathlib import Path

ALICE, BOB = "a" * 64, "b" * 64
DRAFTER = TunedDrafter(1, "base", 0, "staff", (ALICE, BOB), 7.5)


@pytest.fixture
def folder(tmp_path: Path) -> TunedFolder:
    tmp_path.chmod(0o700)
    return TunedFolder(tmp_path)


def put(folder: TunedFolder, drafter: TunedDrafter) -> list[Path]:
    """A drafter with all files that it may have, and half of one."""
    number = drafter.number
    folder.write(drafter)
    run = folder.path / f"{number:04d}.gguf.run"
    run.mkdir()
    (run / "latest.npz").write_bytes(b"weights")
    (run / "candidate.gguf").write_bytes(b"drafter")
    (folder.loaded(number) / "drafters").mkdir(parents=True)
    (folder.loaded(number) / "drafters" / "of.gguf").write_bytes(b"whole")
    half = folder.path / f".{number:04d}.gguf.11aa22bb.part"
    half.write_bytes(b"half")
    if drafter.is_chosen:
        folder.choose(drafter, run / "candidate.gguf")
    return [path for path in folder.path.rglob("*") if path.name.lstrip(".").startswith(f"{number:04d}.")]


def test_a_chosen_drafter_is_private_and_its_run_is_over(folder: TunedFolder) -> None:
    assert folder.drafters() == []
    candidate = replace(DRAFTER, number=folder.next_number())
    put(folder, candidate)
    assert folder.drafters() == [candidate]
    assert folder.has(candidate)
    chosen = replace(candidate, is_chosen=True, num_tokens=900, num_prompts=9, gain=0.25, time_s=1.5)
    run = folder.path / "0001.gguf.run"
    folder.choose(chosen, run / "candidate.gguf")
    assert folder.drafters() == [chosen]
    assert folder.file(1).read_bytes() == b"drafter"
    assert folder.file(1).stat().st_mode & 0o777 == 0o600
    assert folder.path.stat().st_mode & 0o777 == 0o700
    assert not run.exists()
    assert folder.next_number() == 2
    folder.file(1).unlink()
    assert not folder.has(chosen)


def test_three_are_kept(folder: TunedFolder) -> None:
    for number in range(1, 6):
        put(folder, replace(DRAFTER, number=number, is_chosen=True))
    put(folder, replace(DRAFTER, number=6))
    folder.prune()
    assert [each.number for each in folder.drafters()] == [3, 4, 5, 6]
    assert not any(path.name.lstrip(".").startswith(("0001", "0002")) for path in folder.path.iterdir())


@pytest.mark.parametrize("is_chosen", [False, True])
def test_nothing_is_left_of_what_learned_from_a_removed_key(folder: TunedFolder, *, is_chosen: bool) -> None:
    put(folder, replace(DRAFTER, number=1, keys=(ALICE,), is_chosen=True))
    of_both = put(folder, replace(DRAFTER, number=2, is_chosen=is_chosen))
    assert of_both
    assert folder.erase_key(BOB) == 1
    assert [each.number for each in folder.drafters()] == [1]
    assert not any(path.exists() for path in of_both)
    assert folder.erase_key(BOB) == 0
    assert folder.erase_key(ALICE) == 1
    assert list(folder.path.iterdir()) == []


@pytest.mark.parametrize(
    ("groups", "stays"),
    [
        ({ALICE: "staff", BOB: "staff"}, True),
        ({ALICE: "staff"}, False),
        ({ALICE: "staff", BOB: "other"}, False),
        ({ALICE: "staff", BOB: None}, False),
        ({}, False),
    ],
)
def test_keys_are_to_be_of_the_group_still(
    folder: TunedFolder, groups: dict[str, str | None], *, stays: bool
) -> None:
    put(folder, DRAFTER)
    put(folder, replace(DRAFTER, number=2, keys=(NO_KEY,)))
    assert folder.erase_others(groups) == int(not stays)
    # What was recorded without keys stays, as its recording does.
    assert [each.number for each in folder.drafters()] == [*([1] if stays else []), 2]


@pytest.mark.parametrize("said", ["", "{}", '{"number": 1}', "[" * 100_000, '{"number": 2}'])
def test_what_nothing_is_known_of_is_erased(folder: TunedFolder, said: str) -> None:
    put(folder, DRAFTER)
    (folder.path / "0001.json").write_text(said)
    assert folder.drafters() == []
    assert folder.erase_others({ALICE: "staff", BOB: "staff"}) == 1
    assert list(folder.path.iterdir()) == []


def test_a_link_is_removed_itself(folder: TunedFolder, tmp_path_factory: pytest.TempPathFactory) -> None:
    put(folder, DRAFTER)
    # There was more room elsewhere.
    elsewhere = tmp_path_factory.mktemp("elsewhere") / "loaded"
    folder.loaded(1).rename(elsewhere)
    folder.loaded(1).symlink_to(elsewhere)
    assert folder.erase_key(ALICE) == 1
    assert list(folder.path.iterdir()) == []
    assert elsewhere.exists()


def test_what_cannot_be_removed_keeps_nothing_else(
    folder: TunedFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in (1, 2):
        put(folder, replace(DRAFTER, number=number))
    removed = shutil.rmtree

    def remove(path: Path) -> None:
        if path.name == "0001.gguf.run":
            raise PermissionError(errno.EACCES, "Permission denied")
        removed(path)

    monkeypatch.setattr(shutil, "rmtree", remove)
    with pytest.raises(ModelError, match=r"cannot write .*0001\.gguf\.run: Permission denied"):
        folder.erase_key(ALICE)
    # What is said of it stays, so that it is known as what is to go.
    assert sorted(path.name for path in folder.path.iterdir()) == ["0001.gguf.run", "0001.json"]
    monkeypatch.undo()
    assert folder.erase_key(ALICE) == 1
    assert list(folder.path.iterdir()) == []


def test_what_begins_to_be_written_is_left_alone(folder: TunedFolder) -> None:
    folder.path.mkdir()
    half = folder.path / ".0001.json.11aa22bb.part"
    half.write_text("{")
    assert folder.erase_others({}) == 0
    assert half.exists()


def test_what_was_tried_counts_for_one_group_and_drafter(folder: TunedFolder) -> None:
    assert folder.tried("base", "staff") == -1
    folder.write(DRAFTER)
    folder.note_tried(DRAFTER)
    assert folder.tried("base", "staff") == 7.5
    assert folder.tried("base", "other") == -1
    assert folder.tried("another", "staff") == -1
    (folder.path / "tried.json").write_text("[]")
    assert folder.tried("base", "staff") == -1


def test_a_group_is_served_with_what_it_taught_alone() -> None:
    members = frozenset({ALICE, BOB})
    assert may_serve(DRAFTER, "base", "staff", members)
    assert not may_serve(DRAFTER, "base", "staff", frozenset({ALICE}))
    assert not may_serve(DRAFTER, "base", "other", members)
    assert not may_serve(DRAFTER, "another", "staff", members)
    open_one = replace(DRAFTER, keys=(NO_KEY,))
    assert may_serve(open_one, "base", "staff", frozenset({NO_KEY}))
    assert not may_serve(open_one, "base", "staff", members)
    assert not may_serve(DRAFTER, "base", "staff", frozenset({NO_KEY}))
