"""What folders of models hold, by name; and with which options a request loads one of them."""

from __future__ import annotations

import asyncio
import os
import threading
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
from structlog.testing import capture_logs

from mesh.cli.main import run
from mesh.serve.on_demand.library import Library, files_of, load_request_of, smallest_model
from mesh.serve.options import options_of_load
from stages.slicing.model_facts import read_model_facts
from stages.transport.hidden_codec import HiddenType
from tests.support.drafter_files import write_header
from tests.support.eagle3 import DRAFTER
from tests.support.on_demand import Clock, head_options
from tests.support.tiny_models import TinyModel
from tests.support.tiny_projectors import llava, text_model

if TYPE_CHECKING:
    from pathlib import Path

    from mesh.serve.on_demand.library import LibraryEntry
    from stages.slicing.model_facts import ModelFacts

TINY = TinyModel("llama", n_layers=2)
LARGER = replace(TINY, n_layers=3)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two models, one in several files, and much that is none."""
    deep = tmp_path / "org" / "repo"
    deep.mkdir(parents=True)
    TINY.write(tmp_path / "tiny.gguf")
    LARGER.write(deep / "large.gguf", tensors_per_file=10)
    (tmp_path / "notes.txt").write_text("GGUF")
    (tmp_path / "broken.gguf").write_bytes(b"GGUF of nothing")
    (tmp_path / "no name!.gguf").write_bytes((tmp_path / "tiny.gguf").read_bytes())
    (tmp_path / "lost-00001-of-00002.gguf").write_bytes((tmp_path / "tiny.gguf").read_bytes())
    hidden = tmp_path / ".cache"
    hidden.mkdir()
    TINY.write(hidden / "hidden.gguf")
    # Drafters are no models, also where they are the smallest files.
    write_header(tmp_path / "dflash.gguf", "dflash")
    write_header(tmp_path / "assistant.gguf", "gemma4-assistant", n_prediction_layers=1)
    (tmp_path / "eagle3.gguf").symlink_to(DRAFTER)
    return tmp_path


def found(library: Library) -> dict[str, LibraryEntry]:
    return library.search()


def test_models_are_found_once_and_by_the_names_that_they_have_elsewhere(folder: Path) -> None:
    entries = found(Library([folder], Clock()))
    assert list(entries) == ["large", "tiny"]
    large, tiny = entries["large"], entries["tiny"]
    assert large.path.name.startswith("large-00001-of-")
    assert large.summary.file_bytes == sum(path.stat().st_size for path in large.path.parent.iterdir())
    assert (tiny.path, tiny.summary.file_bytes) == (
        folder / "tiny.gguf",
        (folder / "tiny.gguf").stat().st_size,
    )
    assert (tiny.summary.n_ctx_train, tiny.summary.n_vocab) == (1024, 320)
    assert smallest_model([folder]) == tiny.path
    assert smallest_model([folder / ".cache" / "nothing"]) is None


def test_of_two_with_one_name_the_first_counts(folder: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    LARGER.write(other / "tiny.gguf")
    assert found(Library([other, folder], Clock()))["tiny"].path.parent == other


def test_folders_are_not_searched_without_end(tmp_path: Path) -> None:
    deep = tmp_path / "a" / "b" / "c" / "d" / "e"
    deep.mkdir(parents=True)
    (deep.parent / "four.gguf").touch()
    (deep / "five.gguf").touch()
    (tmp_path / "a" / "again").symlink_to(tmp_path)
    assert [path.name for path in files_of([tmp_path])] == ["four.gguf"]


async def test_what_is_no_file_does_not_hold_up_the_search(folder: Path) -> None:
    # To open a pipe waits for somebody who writes.
    os.mkfifo(folder / "pipe.gguf")
    (folder / "folder.gguf").mkdir()
    (folder / "link.gguf").symlink_to(folder / "tiny.gguf")
    (folder / "gone.gguf").symlink_to(folder / "nothing")
    library = Library([folder], Clock())
    searching = threading.Thread(target=library.search, daemon=True)
    searching.start()
    await asyncio.to_thread(searching.join, 10)
    assert not searching.is_alive()
    assert list(found(library)) == ["large", "link", "tiny"]


async def test_new_files_are_found_and_unchanged_ones_are_not_read_again(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock()
    read: list[str] = []
    library = Library([folder], clock)
    await library.refresh()
    assert list(library.entries) == ["large", "tiny"]

    def note(path: Path) -> ModelFacts:
        read.append(path.name)
        return read_model_facts(path)

    monkeypatch.setattr("mesh.serve.on_demand.library.read_model_facts", note)
    TINY.write(folder / "new.gguf")
    os.utime(folder / "tiny.gguf", (1, 1))
    # A moment ago is soon enough: any client may have the folders searched.
    await library.refresh()
    assert read == []
    clock.now_s += 3
    await asyncio.gather(*(library.refresh() for _ in range(5)))
    assert sorted(read) == ["new.gguf", "tiny.gguf"]
    assert list(library.entries) == ["large", "new", "tiny"]
    assert library.entries["tiny"].created_s == 1
    (folder / "new.gguf").unlink()
    clock.now_s += 3
    await library.refresh()
    assert list(library.entries) == ["large", "tiny"]


def test_a_model_is_loaded_with_the_options_of_the_server(folder: Path) -> None:
    (entry,) = [each for name, each in found(Library([folder], Clock())).items() if name == "tiny"]
    options = head_options(
        library=(folder,),
        library_threads=3,
        ctx_size=2048,
        parallel=2,
        kv_type="q8_0",
        exact=True,
        split=(1, 1),
        speculate="draft",
        draft_path=folder / "draft.gguf",
        draft_max=7,
        width=3,
        wire="f16",
    )
    request = load_request_of(entry, options)
    assert (request.served_name, request.model, request.evictable) == ("tiny", str(entry.path), True)
    loaded = options_of_load(request, options)
    assert (loaded.ctx_size, loaded.parallel, loaded.kv_type, loaded.exact) == (2048, 2, "q8_0", True)
    assert (loaded.hidden_type, request.threads) == (HiddenType.F16, 3)
    # A draft model, and a cut, are of the server's own model.
    assert (loaded.draft_path, loaded.speculate) == (None, "auto")
    assert (loaded.draft_max, loaded.width) == (7, 3)
    assert (loaded.split, loaded.stages) == (None, None)
    assert load_request_of(entry, options.changed(wire="auto")).wire == "auto"
    plain = load_request_of(entry, head_options(library=(folder,), speculate="off"))
    assert plain.speculate == "off"
    # All that a host has.
    assert (plain.threads or 0) >= 1024


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--idle-unload", "5"], "name a folder by --library"),
        (["--library", "{folder}/nowhere"], "does not exist"),
        (["--library", "{folder}"], "holds no model that can be served"),
    ],
)
def test_what_cannot_be_is_said_before_anything_starts(
    arguments: list[str], says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["serve", *(each.format(folder=tmp_path) for each in arguments)]) in {1, 2}
    assert says in " ".join(capsys.readouterr().err.split())


def test_a_projector_is_no_model_and_belongs_to_the_model_of_its_name(tmp_path: Path) -> None:
    text_model(tmp_path / "tiny.gguf")
    text_model(tmp_path / "other.gguf")
    for name in ("mmproj-tiny.gguf", "mmproj-F16.gguf", "vision.gguf"):
        llava(tmp_path / name)
    with capture_logs() as logs:
        entries = found(Library([tmp_path], Clock()))
    assert {name: entry.projector for name, entry in entries.items()} == {
        "other": None,
        "tiny": tmp_path / "mmproj-tiny.gguf",
    }
    told = [log for log in logs if log["event"] == "library_file_left_out"]
    left_out = {log["path"].rpartition("/")[2]: log["reason"] for log in told}
    assert set(left_out) == {"mmproj-tiny.gguf", "mmproj-F16.gguf", "vision.gguf"}
    assert all("encodes pictures for a model beside it" in reason for reason in left_out.values())
    options = head_options(mmproj="/of/the/first.gguf")
    for name, mmproj in (("tiny", str(tmp_path / "mmproj-tiny.gguf")), ("other", "none")):
        assert load_request_of(entries[name], options).mmproj == mmproj
