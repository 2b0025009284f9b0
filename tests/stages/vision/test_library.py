"""libmtmd: where it is looked for, and what is said where it is missing or of no use."""

from __future__ import annotations

import hashlib
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from spanmesh_proto.errors import ClusterError
from stages.vision.library import load_mtmd, mtmd_build, mtmd_path

if TYPE_CHECKING:
    from pathlib import Path

LOAD = "from stages.vision.library import load_mtmd; print(load_mtmd()._libmtmd._name)"


def test_it_lies_beside_the_libraries_that_are_loaded(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("LLAMA_CPP_LIB_PATH", str(tmp_path))
    monkeypatch.setenv("MTMD_CPP_LIB", "/elsewhere")
    for name in ("libggml-base.so", "libggml-cuda.so"):
        (tmp_path / name).touch()
    with pytest.raises(ClusterError, match=r"libmtmd, is not in .*`make pictures BACKEND=cuda`"):
        mtmd_path()
    (tmp_path / "libmtmd.dylib").touch()
    assert mtmd_path() == tmp_path / "libmtmd.dylib"


def test_the_command_for_the_ordinary_build_names_no_backend(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("stages.vision.library.library_folder", lambda: tmp_path)
    with pytest.raises(ClusterError, match="`make pictures` makes it"):
        mtmd_path()


def test_the_binding_has_the_library_of_this_environment() -> None:
    assert load_mtmd()._libmtmd._name == str(mtmd_path())
    assert mtmd_build() == hashlib.sha256(mtmd_path().read_bytes()).digest()


def test_one_that_does_not_load_is_named(tmp_path: Path) -> None:
    for path in mtmd_path().parent.iterdir():
        (tmp_path / path.name).symlink_to(path)
    (tmp_path / "libmtmd.so").unlink()
    (tmp_path / "libmtmd.so").write_text("no library")
    done = subprocess.run(
        [sys.executable, "-c", LOAD],
        env={"LLAMA_CPP_LIB_PATH": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert f"{tmp_path}/libmtmd.so does not load" in done.stderr
    assert "make it again: make pictures" in done.stderr
