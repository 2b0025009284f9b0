"""`mesh join`."""

from __future__ import annotations

import asyncio
import socket
from pathlib import Path
from typing import TYPE_CHECKING

import click

from mesh.cli.option_types import MemorySize, int_option
from mesh.cli.shared_options import gpu_options, port_range_option, storage_from, storage_options
from mesh.util.printable import say

if TYPE_CHECKING:
    from spanmesh_proto.addresses import PortRange


@click.command()
@click.argument("token", required=False)
@click.option(
    "--token-file",
    type=click.Path(path_type=Path, dir_okay=False, allow_dash=True),
    help="Read the token from this file, or - for standard input; process lists then do not show it.",
)
@click.option(
    "--discover",
    is_flag=True,
    help="Also find the token's head in the local network by mDNS; without a token, list all heads there.",
)
@click.option("--advertise", metavar="IP", help="Address at which the other hosts reach this one.")
@port_range_option
@click.option(
    "--memory", "memory_bytes", type=MemorySize(), metavar="SIZE", help="Memory for the mesh, such as 8G."
)
@int_option("--threads", help="Threads for computing; one per core unless given.")
@gpu_options
@click.option("--name", help="Name of this host in the mesh; its host name unless given.")
@storage_options
@click.option(
    "--give-up-after",
    default=600.0,
    show_default=True,
    metavar="SECONDS",
    type=click.FloatRange(0),
    help="Time to wait for a lost head to return.",
)
def join(
    *,
    token: str | None,
    token_file: Path | None,
    discover: bool,
    advertise: str | None,
    port_range: PortRange | None,
    memory_bytes: int | None,
    threads: int | None,
    gpu_layers: int | None,
    cpu_moe: bool,
    n_cpu_moe: int | None,
    name: str | None,
    give_up_after: float,
    models_dir: Path | None,
    cache_bytes: int | None,
    kv_disk_bytes: int | None,
) -> int:
    """Join the mesh that printed TOKEN with this host.

    Ctrl-C leaves it once its layers have moved to another host; a second Ctrl-C leaves at once.
    """
    from mesh.cluster.join_token import decode, read_token  # noqa: PLC0415 - keeps --help quick

    if discover and token is None and token_file is None:
        return _list_heads()
    match token, token_file:
        case str(text), None:
            pass
        case None, Path() as path:
            text = read_token(path)
        case _:
            raise click.UsageError("give the join token, or --token-file, and not both")
    decode(text)
    from mesh.cluster.addresses import advertised  # noqa: PLC0415
    from mesh.cluster.join import JoinOptions, join_mesh  # noqa: PLC0415
    from mesh.placement.gpu_layers import parse_cpu_moe  # noqa: PLC0415
    from mesh.util.tasks import run_interruptible  # noqa: PLC0415 - brings grpc, which a refusal needs not

    storage_from(models_dir=models_dir, cache_bytes=cache_bytes, kv_disk_bytes=kv_disk_bytes)
    options = JoinOptions(
        token=text,
        name=name or socket.gethostname(),
        advertise=advertised(advertise) if advertise else None,
        memory_bytes=memory_bytes,
        num_threads=threads,
        give_up_after_s=give_up_after,
        gpu_layers=gpu_layers,
        port_range=port_range,
        cpu_moe_layers=parse_cpu_moe(n_cpu_moe, is_all=cpu_moe),
        is_discovering=discover,
    )
    return run_interruptible(lambda interruption: join_mesh(options, interruption))


def _list_heads() -> int:
    """Print the heads found; exit code 1 if there are none."""
    from mesh.cluster.discovery import discover_heads  # noqa: PLC0415 - keeps --help quick

    heads = asyncio.run(discover_heads())
    for head in heads:
        say(f"{head.name} at {head.address}, spanmesh {head.software}, certificate {head.fingerprint}")
    if not heads:
        say("no head was found: `mesh serve --discoverable` must run in this network", err=True)
        return 1
    say("to join one, give the token that it printed: mesh join --discover TOKEN", err=True)
    return 0
