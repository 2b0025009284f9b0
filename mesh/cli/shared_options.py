"""Options that several commands share, and what they mean on this host."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Final

import click

from mesh.cli.option_types import option_group, read_first_key, sendable_key
from mesh.util.child_environment import API_KEY

if TYPE_CHECKING:
    from collections.abc import Callable

    from mesh.hub import PulledModel
    from mesh.options.host import HostOptions
    from mesh.util.terminal import ProgressBars

_FILE: Final = click.Path(path_type=Path, dir_okay=False)
head_options: Final = option_group(
    click.option("--url", default="http://127.0.0.1:8000", show_default=True, help="URL of the mesh's API."),
    click.option(
        "--api-key-file",
        type=_FILE,
        help=f"File whose first key is sent to the API; or set {API_KEY}.",
    ),
)


def use_storage(options: HostOptions) -> None:
    """Tell processes that are started from now on where weights and KV rows are kept on this host."""
    from stages.weights.disk_cache import StorageOptions  # noqa: PLC0415 - keeps --help quick

    models = None if options.models_dir is None else options.models_dir.absolute()
    StorageOptions(models, options.cache_bytes, options.kv_disk_bytes).to_environment()


def key_of(api_key_file: Path | None) -> str | None:
    """The key that the user means.

    Raises:
        ClusterError: If the file holds none, or the key cannot be sent.
    """
    if api_key_file is not None:
        return sendable_key(read_first_key(api_key_file), str(api_key_file), param="--api-key-file")
    key = os.environ.get(API_KEY)
    # Files of variables that were written on Windows leave the end of the line in it.
    return None if key is None else sendable_key(key.strip(), API_KEY)


def local_model(model: Path) -> PulledModel:
    """A model on this host.

    Args:
        model: A file, the first if there are several, or `hf:org/repo:QUANT`.

    Raises:
        ModelError: If it is at the hub, and cannot be had there.
    """
    from mesh.hub import HubLibrary, PulledModel, is_reference, parse_reference  # noqa: PLC0415
    from mesh.util.terminal import progress_bars  # noqa: PLC0415
    from stages.weights.disk_cache import default_root  # noqa: PLC0415

    if not is_reference(str(model)):
        return PulledModel(model, ())
    reference = parse_reference(str(model))
    with progress_bars() as bars:
        return HubLibrary(default_root()).pull(reference, _in_bytes(bars))


def _in_bytes(bars: ProgressBars) -> Callable[[str], Callable[[int, int], None]]:
    def begin(label: str) -> Callable[[int, int], None]:
        bar = bars.add(label)
        return lambda done, total: bar(done / total if total else 1.0)

    return begin
