"""Folders in /tmp, where every user of the machine may put what they like."""

from __future__ import annotations

import os
import secrets
import shutil
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
    # As if it had been killed: the kernel gives up its lock.
    os.close(folder.lock)
    PrivateFolder(prefix).close()
    assert not folder.path.exists()
    other.close()
    assert not other.path.exists()


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
