"""Where the configuration file is."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Final

from spanmesh_proto.errors import ClusterError

if TYPE_CHECKING:
    from collections.abc import Mapping

FILE_NAME: Final = "mesh.toml"
VARIABLE: Final = "MESH_CONFIG"


def find_config(wanted: Path | None, environment: Mapping[str, str], working_dir: Path) -> Path | None:
    """The file to read: the one named, or the first that exists of those that are looked for.

    Args:
        wanted: By `--config`.
        environment: May name one in `MESH_CONFIG`; XDG_CONFIG_HOME and HOME say where the user's own is.
        working_dir: Its `mesh.toml` is looked for before the user's own.

    Returns:
        None if none was named, and there is none.

    Raises:
        ClusterError: If one was named that does not exist.
    """
    named = wanted or (Path(environment[VARIABLE]) if environment.get(VARIABLE) else None)
    if named is not None:
        if not named.is_file():
            how = "--config" if wanted is not None else VARIABLE
            raise ClusterError(f"{named}, named by {how}, is no file", param="--config")
        return named
    return next((path for path in _places(environment, working_dir) if path.is_file()), None)


def _places(environment: Mapping[str, str], working_dir: Path) -> tuple[Path, ...]:
    home = environment.get("XDG_CONFIG_HOME") or (
        str(Path(environment["HOME"]) / ".config") if environment.get("HOME") else ""
    )
    own = (Path(home) / "spanmesh" / FILE_NAME,) if home else ()
    return (working_dir / FILE_NAME, *own)
