"""Certifying in a process of its own: llama.cpp may abort there, and nothing stays."""

import os
import signal
import tempfile
import threading
from pathlib import Path

import pytest

from spanmesh_proto.errors import InvalidModel, UncuttableModel
from stages.certification.certify import CertifyOptions, certify, certify_isolated
from tests.support.tiny_models import TinyModel

SMALL = CertifyOptions(n_prompt=10, n_decode=3)


@pytest.fixture(autouse=True)
def temporary_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    return folder


def children() -> set[int]:
    """Processes that this one started, the helper that Python keeps for shared memory left out."""
    found = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
    return {int(pid) for pid in found if b"resource_tracker" not in Path(f"/proc/{pid}/cmdline").read_bytes()}


def test_the_same_certificate_as_in_this_process(tmp_path: Path, temporary_folder: Path) -> None:
    source = TinyModel("llama").write(tmp_path / "model.gguf")
    calls: list[tuple[int, int]] = []
    apart = certify_isolated(source, [2, 4], SMALL, progress=lambda done, total: calls.append((done, total)))
    assert apart == certify(source, [2, 4], SMALL)
    assert calls[-1] == (len(calls), len(calls))
    assert list(temporary_folder.iterdir()) == []


def test_errors_come_back_whole(tmp_path: Path, temporary_folder: Path) -> None:
    path = tmp_path / "other.gguf"
    path.write_bytes(b"text")
    with pytest.raises(InvalidModel, match=r"other\.gguf is not a GGUF file"):
        certify_isolated(path)
    assert list(temporary_folder.iterdir()) == []


def test_llama_cpp_aborts(tmp_path: Path, temporary_folder: Path) -> None:
    # It has a window and no layer for it, which llama.cpp asserts against.
    pattern = {"gemma2.attention.sliding_window_pattern": [0, 0]}
    source = TinyModel("gemma2", n_layers=2, is_tied=True).write(tmp_path / "gemma2.gguf", arrays=pattern)
    before = children()
    with pytest.raises(UncuttableModel, match=r"aborts on gemma2\.gguf, whole or cut: .*is_swa_any"):
        certify_isolated(source, [1], SMALL)
    assert children() == before
    assert list(temporary_folder.iterdir()) == []


def test_ctrl_c_leaves_nothing_behind(tmp_path: Path, temporary_folder: Path) -> None:
    source = TinyModel("llama", n_layers=40).write(tmp_path / "model.gguf")
    before = children()
    timer = threading.Timer(2.0, os.kill, (os.getpid(), signal.SIGINT))
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        certify_isolated(source)
    timer.join()
    assert children() == before
    assert list(temporary_folder.iterdir()) == []
