"""Folders in /tmp, where every user of the machine may put what they like."""

from __future__ import annotations

import errno
import fcntl
import os
import secrets
import shutil
import subprocess
import sys
import tempfile
import time
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from mesh.cluster.ray_node import PrivateFolder
from spanmesh_proto.errors import ClusterError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

ELSEWHERE = "elsewhere"


@pytest.fixture
def prefix() -> Iterator[str]:
    """Of folders that are this test's own."""
    made = f"mesh-test-{secrets.token_hex(4)}-"
    yield made
    for left in Path("/tmp").glob(f"{made}*"):
        left.unlink() if left.is_symlink() else shutil.rmtree(left)


def planted(prefix: str, mode: int = 0o700) -> Path:
    folder = Path(f"/tmp/{prefix}planted")
    folder.mkdir()
    folder.chmod(mode)
    return folder


def opens(path: Path) -> None:
    PrivateFolder.of_another(path)


def makes_another(path: Path) -> None:
    PrivateFolder(path.name.removesuffix("planted")).close()
    if path.exists():
        raise ClusterError("it is left alone")


def test_it_is_private_and_goes_with_its_owner(prefix: str) -> None:
    folder = PrivateFolder(prefix)
    assert folder.path.stat().st_mode & 0o777 == 0o700
    assert (folder.path / "lock").stat().st_mode & 0o777 == 0o600
    other = PrivateFolder(prefix)
    assert folder.path.exists()
    # As if it had been killed: the kernel gives up its locks.
    folder.release()
    PrivateFolder(prefix).close()
    assert not folder.path.exists()
    other.close()
    assert not other.path.exists()


HOLDING = """
import sys
from mesh.cluster.ray_node import PrivateFolder
print(PrivateFolder(sys.argv[1]).path, flush=True)
sys.stdin.read()
"""
# Leaves a child, which inherits the locks, and ends.
LEAVING = """
import subprocess, sys
from mesh.cluster.ray_node import PrivateFolder
folder = PrivateFolder(sys.argv[1])
wait = [sys.executable, "-c", "import sys; sys.stdin.read()"]
child = subprocess.Popen(wait, stdout=subprocess.DEVNULL, pass_fds=folder.descriptors)
print(folder.path, flush=True)
"""


@contextmanager
def held(prefix: str, code: str) -> Iterator[Path]:
    """A folder that another process has made, until the end of the block."""
    arguments = [sys.executable, "-c", code, prefix]
    with subprocess.Popen(arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        # All of it for a process that ends: then only its child is left.
        text = process.stdout.read() if code is LEAVING else process.stdout.readline()
        yield Path(text.strip())


def may_be_cleaned(path: Path) -> bool:
    """Whether systemd-tmpfiles would look for old files in a folder: only if it can lock it."""
    folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    finally:
        os.close(folder)
    return True


@pytest.mark.parametrize("code", [HOLDING, LEAVING])
def test_programs_that_clean_tmp_leave_it_alone_while_it_is_in_use(prefix: str, code: str) -> None:
    with held(prefix, code) as path:
        assert not may_be_cleaned(path)
        # Neither does the next one take it away, nor whoever goes on with it.
        PrivateFolder(prefix).close()
        assert path.exists()
        heir = PrivateFolder.of_another(path)
        assert not may_be_cleaned(path)
    assert not may_be_cleaned(path)
    heir.release()
    # Its process ends a moment after the block.
    while not may_be_cleaned(path):
        time.sleep(0.01)
    PrivateFolder(prefix).close()
    assert not path.exists()


def test_a_folder_of_an_earlier_version_is_left_alone_while_it_is_in_use(prefix: str) -> None:
    folder = planted(prefix)
    with (folder / "lock").open("wb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        PrivateFolder(prefix).close()
        assert folder.exists()
    PrivateFolder(prefix).close()
    assert not folder.exists()


@pytest.mark.parametrize("takes", [opens, makes_another])
def test_a_link_in_the_place_of_a_lock_is_not_followed(
    prefix: str, tmp_path: Path, takes: Callable[[Path], None]
) -> None:
    victim = tmp_path / ELSEWHERE
    victim.write_text("precious")
    folder = planted(prefix)
    (folder / "lock").symlink_to(victim)
    with pytest.raises((OSError, ClusterError)):
        takes(folder)
    assert folder.exists()
    assert victim.read_text() == "precious"


@pytest.mark.parametrize("takes", [opens, makes_another])
def test_a_link_in_the_place_of_a_folder_is_not_followed(
    prefix: str, tmp_path: Path, takes: Callable[[Path], None]
) -> None:
    victim = tmp_path / ELSEWHERE
    victim.mkdir(mode=0o700)
    (victim / "lock").touch(mode=0o600)
    folder = Path(f"/tmp/{prefix}planted")
    folder.symlink_to(victim)
    with pytest.raises((OSError, ClusterError)):
        takes(folder)
    assert (victim / "lock").exists()


@pytest.mark.parametrize("takes", [opens, makes_another])
@pytest.mark.parametrize("mode", [0o777, 0o750])
def test_a_folder_that_others_may_enter_is_refused(
    prefix: str, takes: Callable[[Path], None], mode: int
) -> None:
    folder = planted(prefix, mode)
    (folder / "lock").touch(mode=0o600)
    with pytest.raises(ClusterError, match=f"not private to this user .*mode {mode:o}|left alone"):
        takes(folder)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can make another user's folder")
@pytest.mark.parametrize("takes", [opens, makes_another])
def test_another_user_s_folder_is_refused(prefix: str, takes: Callable[[Path], None]) -> None:
    folder = planted(prefix)
    (folder / "lock").touch(mode=0o600)
    os.chown(folder, 12345, 12345)
    with pytest.raises(ClusterError, match=r"it is user 12345's|left alone"):
        takes(folder)


@pytest.mark.parametrize("takes", [opens, makes_another])
def test_a_lock_that_is_a_pipe_keeps_nobody_waiting(prefix: str, takes: Callable[[Path], None]) -> None:
    folder = planted(prefix)
    os.mkfifo(folder / "lock", 0o600)
    with pytest.raises(ClusterError, match=r"not a regular file|left alone"):
        takes(folder)


def test_a_temporary_folder_that_takes_nothing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(**_options: object) -> str:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(tempfile, "mkdtemp", full)
    with pytest.raises(ClusterError, match=r"cannot make files in /tmp: No space left on device.*make room"):
        PrivateFolder("mesh-test-")
