"""What every command takes that speaks to a running mesh's head."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from mesh.commands.options import read_first_key
from mesh.util.child_environment import API_KEY

if TYPE_CHECKING:
    from collections.abc import Callable

Command = TypeVar("Command", bound="Callable[..., Any]")


def head_options(command: Command) -> Command:
    """Adds `--url` and `--api-key-file`."""
    where = click.option(
        "--url", default="http://127.0.0.1:8000", show_default=True, help="Where the mesh serves its API."
    )
    key = click.option(
        "--api-key-file",
        type=click.Path(path_type=Path, dir_okay=False),
        help=f"File whose first key opens the API; or set {API_KEY}.",
    )
    return where(key(command))


def key_of(api_key_file: Path | None) -> str | None:
    """The key that the user means.

    Raises:
        ClusterError: If the file holds none.
    """
    return os.environ.get(API_KEY) if api_key_file is None else read_first_key(api_key_file)
