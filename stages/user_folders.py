"""Folders of this user for files of spanmesh: cache, configuration and state."""

from __future__ import annotations

import os
from pathlib import Path

from spanmesh_proto.errors import ClusterError


def user_folder(variable: str, *below_home: str) -> Path:
    """A folder of the XDG base directories, `spanmesh` in it left out.

    Args:
        variable: Variable that names it, such as `XDG_CACHE_HOME`.
        below_home: Names of the folders that lead to it from the home directory, without the variable.

    Raises:
        ClusterError: If neither the variable nor a home directory is known, as for a user of a container that
            its list of users lacks.
    """
    named = os.environ.get(variable)
    if named:
        return Path(named)
    try:
        home = Path.home()
    except RuntimeError:
        home = Path()
    # A relative HOME would put the files wherever this was started.
    if not home.is_absolute():
        raise ClusterError(
            f"user {os.geteuid()} has no home directory, and {variable} is not set: set HOME or {variable} "
            "to a folder that this user may write to"
        )
    return home.joinpath(*below_home)
