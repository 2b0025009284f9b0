"""`mesh serve`."""

from __future__ import annotations

import socket
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

from mesh.cli.library_options import LIBRARY_FLAGS, library_from, library_model, library_options
from mesh.cli.main import SectionedCommand
from mesh.cli.option_types import MemorySize, int_option
from mesh.cli.shared_options import (
    SESSION_FLAGS,
    SPECULATION_FLAGS,
    check_stage_options,
    gpu_options,
    local_model,
    one_model_options,
    port_range_option,
    speculation_from,
    weights_from,
    weights_options,
)

if TYPE_CHECKING:
    from mesh.serve.options import ServeOptions
    from mesh.util.tasks import Interruption
    from spanmesh_proto.addresses import PortRange

_FILE = click.Path(path_type=Path, dir_okay=False)
# Long enough for a person or systemd to start it again; hosts and their stages end after that.
_LINGER_S: Final = 120.0
_SECTIONS: Final = {
    "API": ("--host", "--port", "--api-key-file", "--insecure", "--cors-origin", "--max-waiting"),
    "Placement": (
        *("--wait-for", "--head-only", "--stages", "--split", "--topology", "--threads", "--memory"),
        *("--gpu-layers", "--cpu-moe", "--n-cpu-moe", "--no-repack"),
    ),
    "Sessions": (*SESSION_FLAGS, "--groups", "--kv-disk"),
    "Models on demand": LIBRARY_FLAGS,
    "Speculation": SPECULATION_FLAGS,
    "Joining hosts": (
        *("--advertise", "--name", "--port-range", "--join-port", "--token-file", "--token-hours"),
        *("--identity", "--discoverable"),
    ),
    "Weights": ("--models", "--cache-size", "--transfer-rate", "--hub-first"),
    "After a crash": ("--linger", "--state"),
}


@click.command(cls=SectionedCommand, sections=_SECTIONS)
@click.argument("model", required=False, type=click.Path(path_type=Path))
@click.option("--host", default="127.0.0.1", show_default=True, help="Address at which the API listens.")
@int_option("--port", least=0, most=65535, default=8000, help="Port of the API.")
@click.option(
    "--api-key-file",
    type=_FILE,
    help="Key file from `mesh keys add`; needed if --host is not loopback.",
)
@click.option("--insecure", is_flag=True, help="Allow access from other machines without a key.")
@click.option(
    "--cors-origin",
    "cors_origins",
    multiple=True,
    metavar="ORIGIN",
    help="Allow web pages of this origin, or a program of it, such as app://notes.example; may be given "
    "several times.",
)
@click.option(
    "--linger",
    "linger_s",
    type=click.FloatRange(0),
    metavar="SECONDS",
    help="Time that stages wait for a restart of the head after a crash; Linux only. Without --wait-for they "
    "do so only if this is given.  [default: 120]",
)
@click.option(
    "--state",
    "state_path",
    type=_FILE,
    help="File for the state that a restart needs.  [default: in ~/.local/state/spanmesh]",
)
@click.option(
    "--wait-for", default=0, metavar="N", type=click.IntRange(0), help="Wait until N hosts have joined."
)
@click.option("--head-only", is_flag=True, help="Place no layers on this host.")
@click.option(
    "--topology",
    "topology_path",
    type=_FILE,
    help="Fix the placement by this TOML file, tables [[stage]] with host and layers: no layer is ever "
    "placed elsewhere, and missing hosts are waited for.",
)
@int_option("--threads", metavar="N", help="Threads of this host for computing.  [default: one a core]")
@click.option(
    "--memory",
    type=MemorySize(),
    metavar="SIZE",
    help="Memory for stages, draft model and texts on this host, such as 8G.  [default: all that is free]",
)
@gpu_options
@click.option(
    "--no-repack",
    "repacks",
    is_flag=True,
    flag_value=False,
    default=True,
    help="Compute with weights as the file has them, as llama.cpp's RPC server does; slower.",
)
@int_option(
    "--groups",
    "num_groups",
    metavar="N",
    help="Divide decoding sessions into N groups, whose windows share batches.  [default: the best by "
    "measurement]",
)
@one_model_options
@library_options
@weights_options
@click.option(
    "--advertise",
    metavar="IP",
    help="Address at which joined hosts reach this one.  [default: all that it has, that of the default "
    "route first]",
)
@click.option("--name", help="Name of this host in the mesh; its host name unless given.")
@port_range_option
@click.option(
    "--join-port",
    default=0,
    metavar="PORT",
    type=click.IntRange(0, 65535),
    help="Port for joining hosts, which the token names.  [default: as in the identity, or any free one]",
)
@click.option(
    "--discoverable",
    is_flag=True,
    help="Announce this head by mDNS, for `mesh join --discover` in the local network.",
)
@click.option("--token-file", type=_FILE, help="Write the join token to this file.")
@click.option(
    "--token-hours",
    default=24.0,
    show_default=True,
    type=click.FloatRange(0, min_open=True),
    help="Validity of the join token, from when it was made.",
)
@click.option(
    "--identity",
    "identity_path",
    type=_FILE,
    help="Keep certificate, join token and admitted hosts in this private file, which is made if it is "
    "missing: tokens and hosts stay valid at the next start.  [default: a new mesh at each start]",
)
def serve(
    *,
    model: Path | None,
    host: str,
    port: int,
    api_key_file: Path | None,
    insecure: bool,
    linger_s: float | None,
    state_path: Path | None,
    cors_origins: tuple[str, ...],
    wait_for: int,
    head_only: bool,
    stages: int | None,
    split: tuple[int, ...] | None,
    topology_path: Path | None,
    ctx_size: int | None,
    parallel: int,
    kv_type: str,
    checkpoints: int,
    wire: str,
    max_waiting: int,
    threads: int | None,
    memory: int | None,
    gpu_layers: int | None,
    cpu_moe: bool,
    n_cpu_moe: int | None,
    repacks: bool,
    num_groups: int | None,
    exact: bool,
    advertise: str | None,
    name: str | None,
    port_range: PortRange | None,
    join_port: int,
    discoverable: bool,
    token_file: Path | None,
    token_hours: float,
    identity_path: Path | None,
    models_dir: Path | None,
    cache_bytes: int | None,
    kv_disk_bytes: int | None,
    transfer_rate: int | None,
    hub_first: bool,
    folders: tuple[Path, ...],
    idle_unload_min: float | None,
    min_stay_s: float,
    load_wait_s: float,
    library_threads: int | None,
    **speculation: Any,
) -> int:
    """Serve MODEL on this host and the joined ones; without MODEL, a small demo.

    MODEL is a GGUF file, the first one if there are several, or hf:org/repo:QUANT. With --library and without
    MODEL it is the smallest model of the library.
    """
    check_stage_options(stages, split)
    library = library_from(folders, idle_unload_min, min_stay_s, load_wait_s, library_threads)
    if topology_path is not None and (stages is not None or split is not None or wait_for):
        raise click.UsageError(
            "--topology fixes which hosts hold which layers: leave out --stages, --split and --wait-for"
        )
    from mesh.cluster.addresses import advertised, own_addresses  # noqa: PLC0415 - keeps --help quick
    from mesh.cluster.host_facts import check_llama_cpp  # noqa: PLC0415
    from mesh.placement.gpu_layers import parse_cpu_moe  # noqa: PLC0415

    # The imports below load it.
    check_llama_cpp()
    from mesh.placement.topology import read_topology  # noqa: PLC0415
    from mesh.serve.options import ServeOptions, demo_model, demo_num_stages  # noqa: PLC0415
    from mesh.util.tasks import run_interruptible  # noqa: PLC0415
    from stages.transport.hidden_codec import HiddenType  # noqa: PLC0415

    name = name or socket.gethostname()
    topology = None if topology_path is None else read_topology(topology_path)
    if topology is not None:
        own = () if head_only else (name,)
        wait_for = len(topology.missing(own))
    if model is None and not folders and split is None and topology is None:
        stages = stages or demo_num_stages(wait_for)
    address, *others = (
        own_addresses(must_be_clear=wait_for > 0) if advertise is None else (advertised(advertise),)
    )
    pulled = local_model(model or (library_model(folders) if folders else demo_model()))
    options = ServeOptions(
        model=pulled.path,
        host=host,
        port=port,
        name=name,
        advertise=address,
        other_addresses=tuple(others),
        is_address_given=advertise is not None,
        join_port=join_port,
        token_hours=token_hours,
        token_path=token_file,
        num_hosts=wait_for,
        is_head_only=head_only,
        num_stages=stages,
        split=split,
        ctx_size=ctx_size,
        num_slots=parallel,
        kv_type=kv_type,
        num_checkpoints=checkpoints,
        max_waiting=max_waiting,
        memory_bytes=memory,
        num_threads=threads,
        speculation=speculation_from(**speculation),
        is_exact=exact,
        api_key_path=api_key_file,
        is_insecure=insecure,
        cors_origins=cors_origins,
        linger_s=_linger_s(linger_s, wait_for),
        state_path=state_path,
        topology=topology,
        is_discoverable=discoverable,
        wire=None if wire == "auto" else HiddenType(wire),
        gpu_layers=gpu_layers,
        cpu_moe_layers=parse_cpu_moe(n_cpu_moe, is_all=cpu_moe),
        repacks=repacks,
        num_groups=num_groups,
        port_range=port_range,
        library=library,
        kv_disk_bytes=kv_disk_bytes or 0,
        identity_path=identity_path,
        weights=weights_from(
            pulled,
            models_dir=models_dir,
            cache_bytes=cache_bytes,
            kv_disk_bytes=kv_disk_bytes,
            transfer_rate=transfer_rate,
            hub_first=hub_first,
        ),
    )
    return run_interruptible(lambda interruption: _serve(options, interruption))


async def _serve(options: ServeOptions, interruption: Interruption) -> None:
    from mesh.serve.preflight import check  # noqa: PLC0415 - keeps --help quick

    known = check(options)
    from mesh.serve.main import serve_mesh  # noqa: PLC0415 - the server's libraries, which a refusal needs not

    await serve_mesh(options, known, interruption)


def _linger_s(wanted_s: float | None, num_hosts: int) -> float:
    """Elsewhere than on Linux nothing outlives its head.

    Raises:
        click.UsageError: If it is requested there.
    """
    if sys.platform != "linux":
        if wanted_s:
            raise click.UsageError("--linger needs Linux: elsewhere stages end with their head; leave it out")
        return 0.0
    return wanted_s if wanted_s is not None else _LINGER_S if num_hosts else 0.0
