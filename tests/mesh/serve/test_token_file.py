"""The join token in a file."""

from pathlib import Path

import pytest

from mesh.serve.head import token_file
from spanmesh_proto.errors import ClusterError


def test_the_token_is_there_for_its_owner_only_while_the_mesh_is(tmp_path: Path) -> None:
    path = tmp_path / "token"
    with token_file(path, "secret-token"):
        assert path.read_text() == "secret-token\n"
        assert path.stat().st_mode & 0o777 == 0o600
    assert list(tmp_path.iterdir()) == []


def test_an_older_token_is_replaced_and_a_newer_one_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "token"
    path.write_text("older, and readable by all\n")
    path.chmod(0o644)
    with token_file(path, "mine"):
        assert path.read_text() == "mine\n"
        assert path.stat().st_mode & 0o777 == 0o600
        path.write_text("newer\n")
    assert path.read_text() == "newer\n"


def test_no_file_is_wanted() -> None:
    with token_file(None, "token"):
        pass


def test_a_place_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    with (
        pytest.raises(ClusterError, match=r"missing/token: No such file"),
        token_file(tmp_path / "missing" / "token", "token"),
    ):
        pytest.fail("the block must not run")
