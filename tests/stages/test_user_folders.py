"""Folders of a user, also of one without a home directory."""

import os
from pathlib import Path

import pytest

from spanmesh_proto.errors import ClusterError
from stages.files import user_folder


def test_the_variable_counts_and_else_the_home(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/ann")
    monkeypatch.delenv("XDG_STATE_HOME", raising=False)
    assert user_folder("XDG_STATE_HOME", ".local", "state") == Path("/home/ann/.local/state")
    monkeypatch.setenv("XDG_STATE_HOME", "/state")
    assert user_folder("XDG_STATE_HOME", ".local", "state") == Path("/state")


@pytest.mark.parametrize("home", [None, "nowhere"])
def test_a_home_that_is_none_is_named_with_the_remedy(
    home: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    if home is None:
        monkeypatch.delenv("HOME", raising=False)
        # As in a container whose list of users lacks this one.
        monkeypatch.setattr(os, "getuid", lambda: 2**31 - 5)
    else:
        monkeypatch.setenv("HOME", home)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    with pytest.raises(ClusterError, match=r"no home directory.*set HOME or XDG_CACHE_HOME"):
        user_folder("XDG_CACHE_HOME", ".cache")
