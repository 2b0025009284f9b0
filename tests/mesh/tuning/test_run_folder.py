"""Folders of tunings under way: begun, gone on with, refused; a process killed while it writes."""

from __future__ import annotations

import multiprocessing
import os
import signal
from typing import TYPE_CHECKING

import numpy as np
import pytest

from mesh.tuning.run_folder import Checkpoint, RunFolder
from spanmesh_proto.errors import ModelError

if TYPE_CHECKING:
    from multiprocessing.connection import Connection
    from pathlib import Path

SETTINGS = {"seed": 1, "is_bf16": False}
SHAPES = {"fc.weight": (500, 400)}


def checkpoint(value: float) -> Checkpoint:
    return Checkpoint({"fc.weight": np.full((500, 400), value, np.float32)}, {"step": value})


def save_forever(output: Path, sender: Connection) -> None:
    folder = RunFolder(output)
    for step in range(1, 1_000_000):
        folder.save("latest", checkpoint(float(step)))
        if step == 3:
            sender.send(step)


def test_a_checkpoint_is_read_as_it_was_saved(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "out.gguf")
    folder.begin(SETTINGS)
    assert folder.path == tmp_path / "out.gguf.run"
    assert folder.path.stat().st_mode & 0o777 == 0o700
    assert folder.load("latest", SHAPES) is None
    folder.save("latest", checkpoint(7.0))
    assert all(path.stat().st_mode & 0o777 == 0o600 for path in folder.path.iterdir())
    found = folder.load("latest", SHAPES)
    assert found is not None
    assert found.state == {"step": 7.0}
    assert (found.arrays["fc.weight"] == 7.0).all()
    folder.close()
    RunFolder(tmp_path / "out.gguf").resume(SETTINGS)
    folder.remove()
    assert list(tmp_path.iterdir()) == []


def test_a_run_goes_on_with_its_own_settings_only(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "out.gguf")
    with pytest.raises(ModelError, match="holds no run to go on with: leave out --resume"):
        folder.resume(SETTINGS)
    folder.begin(SETTINGS)
    with pytest.raises(ModelError, match="holds an unfinished run: go on with --resume, or remove"):
        folder.begin(SETTINGS)
    with pytest.raises(ModelError, match=r"out\.gguf\.run: another process works on this run: let it end"):
        RunFolder(tmp_path / "out.gguf").resume(SETTINGS)
    folder.close()
    with pytest.raises(ModelError, match="a run with another seed: give the same options"):
        folder.resume(SETTINGS | {"seed": 2})
    folder.close()
    (folder.path / "run.json").write_text("[]")
    with pytest.raises(ModelError, match="a run with another seed"):
        folder.resume(SETTINGS)
    folder.close()
    (folder.path / "run.json").write_text("[" * 100_000)
    with pytest.raises(ModelError, match="holds no run to go on with"):
        folder.resume(SETTINGS)


def test_a_damaged_checkpoint_is_refused(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "out.gguf")
    folder.begin(SETTINGS)
    folder.save("latest", checkpoint(1.0))
    with pytest.raises(ModelError, match="is of another drafter"):
        folder.load("latest", {"fc.weight": (400, 500)})
    with pytest.raises(ModelError, match="is damaged"):
        folder.load("latest", SHAPES | {"more": (1,)})
    path = folder.path / "latest.npz"
    path.write_bytes(path.read_bytes()[:1000])
    with pytest.raises(ModelError, match="is damaged: remove"):
        folder.load("latest", SHAPES)
    with path.open("wb") as file:
        np.savez(
            file, allow_pickle=True, **{"state": np.array([{"step": 1}], object), "fc.weight": np.zeros(1)}
        )
    with pytest.raises(ModelError, match="is damaged"):
        folder.load("latest", SHAPES)
    # One array, and no archive.
    with path.open("wb") as file:
        np.save(file, np.zeros(3))
    with pytest.raises(ModelError, match="is damaged"):
        folder.load("latest", SHAPES)
    for state in ("[1]", "7", "[" * 100_000):
        with path.open("wb") as file:
            np.savez(
                file,
                allow_pickle=False,
                state=np.array(state),
                **{"fc.weight": np.zeros((500, 400), np.float32)},
            )
        with pytest.raises(ModelError, match="is damaged"):
            folder.load("latest", SHAPES)


def test_a_process_that_is_killed_while_it_writes_leaves_a_whole_checkpoint(tmp_path: Path) -> None:
    output = tmp_path / "out.gguf"
    folder = RunFolder(output)
    folder.begin(SETTINGS)
    spawning = multiprocessing.get_context("spawn")
    receiver, sender = spawning.Pipe(duplex=False)
    process = spawning.Process(target=save_forever, args=(output, sender), daemon=True)
    process.start()
    assert receiver.recv() == 3
    assert process.pid is not None
    os.kill(process.pid, signal.SIGKILL)
    process.join()
    found = folder.load("latest", SHAPES)
    assert found is not None
    assert found.state["step"] >= 3
    assert (found.arrays["fc.weight"] == found.state["step"]).all()
