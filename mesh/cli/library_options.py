"""Options of `mesh serve` for models that requests load."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Final

import click

from mesh.cli.option_types import float_option, int_option, option_group
from mesh.util import session_defaults
from spanmesh_proto.errors import ClusterError

if TYPE_CHECKING:
    from mesh.serve.options import LibraryOptions


library_options: Final = option_group(
    click.option(
        "--library",
        "folders",
        type=click.Path(path_type=Path, file_okay=False, exists=True),
        multiple=True,
        metavar="DIR",
        help="Folder with GGUF files that requests may have loaded; may be given several times.",
    ),
    float_option(
        "--idle-unload",
        "idle_unload_min",
        metavar="MINUTES",
        help="Unload a model that a request loaded when none used it for so long.  [default: never]",
    ),
    float_option(
        "--min-stay",
        "min_stay_s",
        default=session_defaults.MIN_STAY_S,
        metavar="SECONDS",
        help="Time for which a model stays at least, once a request loaded it.",
    ),
    float_option(
        "--load-wait",
        "load_wait_s",
        default=session_defaults.LOAD_WAIT_S,
        metavar="SECONDS",
        help="Longest wait of a request for its model to be loaded, unless it asked for a stream.",
    ),
    int_option(
        "--library-threads",
        most=1024,
        metavar="N",
        help="Threads of each host for each model that a request loaded.  [default: all]",
    ),
)
LIBRARY_FLAGS: Final = ("--library", "--idle-unload", "--min-stay", "--load-wait", "--library-threads")


def library_from(
    folders: tuple[Path, ...],
    idle_unload_min: float | None,
    min_stay_s: float,
    load_wait_s: float,
    library_threads: int | None,
) -> LibraryOptions:
    """What the user says of models on demand.

    Raises:
        click.UsageError: If models without a library are to be unloaded.
    """
    from mesh.serve.options import LibraryOptions  # noqa: PLC0415 - keeps --help quick

    if idle_unload_min is not None and not folders:
        raise click.UsageError("--idle-unload is for models that requests load: name a folder by --library")
    return LibraryOptions(
        folders=tuple(folder.absolute() for folder in folders),
        idle_unload_s=None if idle_unload_min is None else idle_unload_min * 60,
        min_stay_s=min_stay_s,
        load_wait_s=load_wait_s,
        num_threads=library_threads,
    )


def library_model(folders: tuple[Path, ...]) -> Path:
    """The smallest model of the library.

    Raises:
        ClusterError: If there is none.
    """
    from mesh.serve.on_demand.library import smallest_model  # noqa: PLC0415 - keeps --help quick

    found = smallest_model(folders)
    if found is None:
        raise ClusterError(
            f"--library holds no model that can be served: put GGUF files into {folders[0]}",
            param="--library",
        )
    return found
