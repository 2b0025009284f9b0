"""`mesh doctor`."""

from __future__ import annotations

import json
import socket
from pathlib import Path
from typing import TYPE_CHECKING, Final

import click

from mesh.cli.head_client import ask_head
from mesh.cli.options import options_of
from mesh.cli.shared_options import int_option, key_of, local_model
from mesh.options.host import HostOptions
from mesh.util.child_environment import API_KEY
from mesh.util.printable import say
from spanmesh_proto.errors import MeshError

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from mesh.doctor import Check
    from spanmesh_proto.addresses import PortRange

_FILE: Final = click.Path(path_type=Path, dir_okay=False)
_MARKS: Final = {"ok": "ok  ", "warn": "WARN", "fail": "FAIL"}
_NUM_PROBES: Final = 20
_BULK_BYTES: Final = 4 * 10**6
# Longer than the head's own timeout for a host that reads its stage files: the head then names the slow host.
_PATIENCE_S: Final = 660.0


@click.command()
@click.argument("model", required=False, type=click.Path(path_type=Path))
@click.option("--url", help="URL of a mesh to check, too; run this on its head.")
@click.option(
    "--api-key-file", type=_FILE, help=f"File whose first key is sent to that API; or set {API_KEY}."
)
@click.option("--token-file", type=_FILE, help="Check the connection to the head of this join token.")
@click.option("--advertise", metavar="IP", help="Address at which other hosts reach this one.")
@options_of(HostOptions, "port_range")
@int_option("--port", most=65535, default=8000, help="Port at which the API would listen.")
@click.option("--json", "is_json", is_flag=True, help="Print every check as JSON.")
def doctor(
    *,
    model: Path | None,
    url: str | None,
    api_key_file: Path | None,
    token_file: Path | None,
    advertise: str | None,
    port_range: PortRange | None,
    port: int,
    is_json: bool,
) -> None:
    """Check this host, MODEL if it is named, and a running mesh if --url is given.

    MODEL is a GGUF file, the first one if there are several, or hf:org/repo:QUANT: how it writes calls and
    reasoning is shown, too.

    Versions, llama.cpp's devices, memory, disk, ports and addresses; of a mesh every host and every link in
    both directions: round trips, bandwidth, port ranges, clocks, and the hashes of stage files. Each failure
    comes with a remedy. Exits with 1 if anything failed.
    """
    from mesh.cluster.join_token import read_token  # noqa: PLC0415 - keeps --help quick
    from mesh.doctor import exit_code, this_host_checks, token_checks  # noqa: PLC0415

    name = socket.gethostname()
    model = None if model is None else local_model(model).path
    checks = [
        *this_host_checks(name, port=port, advertise=advertise, model=model, url=url, port_range=port_range)
    ]
    if token_file is not None:
        checks += token_checks(name, read_token(token_file))
    if url is not None:
        checks += _of_mesh(url.rstrip("/"), key_of(api_key_file))
    if is_json:
        say(json.dumps([check.as_dict() for check in checks], indent=2))
    else:
        _print(checks)
    click.get_current_context().exit(exit_code(checks))


def _of_mesh(url: str, key: str | None) -> Iterable[Check]:
    from mesh.doctor import fail, format_checks, mesh_checks  # noqa: PLC0415 - keeps --help quick
    from mesh.status import read_status  # noqa: PLC0415

    try:
        status = read_status(ask_head(f"{url}/mesh/status", key))
        wish = f"{url}/mesh/links?probes={_NUM_PROBES}&bulk_bytes={_BULK_BYTES}&ports=1"
        links = ask_head(wish, key, method="POST", timeout_s=_PATIENCE_S)
        models = ask_head(f"{url}/v1/models", key)
        found = ask_head(f"{url}/mesh/examine", key, method="POST", timeout_s=_PATIENCE_S)
    except MeshError as error:
        return [
            fail("mesh", "answer", error.message, "start it, name where it is with --url, or wait for it")
        ]
    return [*mesh_checks(status, links, found["hosts"]), *format_checks(models)]


def _print(checks: Sequence[Check]) -> None:
    where = None
    for check in checks:
        if check.where != where:
            where = check.where
            say(where)
        say(f"  {_MARKS[check.outcome]} {check.what}: {check.detail}")
        if check.fix:
            say(f"       to do: {check.fix}")
    counts = {outcome: sum(check.outcome == outcome for check in checks) for outcome in _MARKS}
    say(f"{counts['ok']} passed, {counts['warn']} warnings, {counts['fail']} failed")
