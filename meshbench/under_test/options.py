"""Options of benchmarks that measure a running mesh by its URL, and refusal of those that only a lab has."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

import click
from click.core import ParameterSource

from mesh.cli.shared_options import key_of, option_group
from mesh.util.child_environment import API_KEY
from meshbench.shared_options import FILE, Url

if TYPE_CHECKING:
    from collections.abc import Collection

    from meshbench.http_client import Server

# Parameters of `remote_options` besides the URL.
_REMOTE_ONLY: Final = frozenset({"model_name", "api_key_file", "links_file"})
remote_options: Final = option_group(
    click.option(
        "--url",
        "server",
        type=Url(),
        help="Measure the running mesh at this URL from outside, in place of one in the lab; MODEL is then "
        "the file of its vocabulary, and may be left out.",
    ),
    click.option(
        "--model",
        "model_name",
        metavar="NAME",
        help="With --url: name of the served model; the first one unless given.",
    ),
    click.option(
        "--api-key-file",
        type=click.Path(path_type=Path, dir_okay=False),
        help=f"With --url: file whose first key is sent to the API; or set {API_KEY}.",
    ),
    click.option(
        "--net",
        "links_file",
        type=FILE,
        help="With --url: output of `mesh bench net --json`; the links are measured again unless given.",
    ),
)


@dataclass(frozen=True)
class RemoteTarget:
    """A running mesh, as the command line names it."""

    server: Server
    """Its address."""
    api_key: str | None
    """API key; None for an open API."""
    model: str | None = None
    """Id of the measured model; None takes the first."""
    model_file: Path | None = None
    """GGUF with the vocabulary of that model, or None."""
    links_file: Path | None = None
    """Output of `mesh bench net --json`, or None to measure the links."""


def target_of(
    context: click.Context,
    *,
    server: Server | None,
    model: Path | None,
    model_name: str | None,
    api_key_file: Path | None,
    links_file: Path | None,
    lab_only: Collection[str],
) -> RemoteTarget | None:
    """The running mesh that the user names; None for a lab.

    Args:
        context: Context of the command.
        server: See `remote_options`.
        model: Value of MODEL.
        model_name: See `remote_options`.
        api_key_file: Likewise.
        links_file: Likewise.
        lab_only: Names of the parameters that have a meaning in the lab only.

    Raises:
        click.UsageError: Naming options that have no meaning together.
        ClusterError: If the file of API keys holds none.
    """
    if server is None:
        if flags := _given(context, _REMOTE_ONLY):
            raise click.UsageError(f"without --url, the address of a running mesh, leave out {flags}")
        return None
    if flags := _given(context, lab_only):
        raise click.UsageError(
            f"--url measures a mesh that runs already: leave out what is for one started in the lab, {flags}"
        )
    return RemoteTarget(server, key_of(api_key_file) or None, model_name, model, links_file)


def _given(context: click.Context, names: Collection[str]) -> str:
    """Flags of the parameters among these that the user has set, in the order of the command's options."""
    unset = {ParameterSource.DEFAULT, None}
    flags = [
        param.opts[0]
        for param in context.command.params
        if param.name in names and context.get_parameter_source(param.name or "") not in unset
    ]
    return ", ".join(flags)
