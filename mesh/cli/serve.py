"""`mesh serve`."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

from mesh.cli.options import OptionsCommand, made
from mesh.cli.shared_options import local_model, projector_for, served_model, use_storage
from mesh.options.host import AFTER_CRASH, JOINING, ON_DEMAND, WEIGHTS, HeadOptions
from mesh.options.model import API, PLACEMENT, SESSIONS, SPECULATION
from spanmesh_proto.errors import ClusterError

if TYPE_CHECKING:
    from mesh.util.tasks import Interruption


_SECTIONS: Final[dict[str, tuple[str, ...]]] = dict.fromkeys(
    (API, PLACEMENT, SESSIONS, ON_DEMAND, SPECULATION, JOINING, WEIGHTS, AFTER_CRASH), ()
)


@click.command(cls=OptionsCommand, options=HeadOptions, sections=_SECTIONS)
@click.argument("model", required=False, type=click.Path(path_type=Path))
def serve(model: Path | None, **values: Any) -> int:
    """Serve MODEL on this host and the joined ones; without MODEL, a small demo.

    MODEL is a GGUF file, the first one if there are several, or hf:org/repo:QUANT. With --library and without
    MODEL it is the smallest model of the library.
    """
    options = made(HeadOptions, {**values, "model": model or Path()})
    from mesh.cluster.host_facts import check_llama_cpp  # noqa: PLC0415 - keeps --help quick

    # The imports below load it.
    check_llama_cpp()
    from mesh.util.tasks import run_interruptible  # noqa: PLC0415

    found = _on_this_host(options, model)
    use_storage(found)
    return run_interruptible(lambda interruption: _serve(found, interruption))


def _on_this_host(options: HeadOptions, model: Path | None) -> HeadOptions:
    """The options with what they mean here: model, addresses, placement.

    Raises:
        MeshError: If there is no such model, address or placement.
    """
    from mesh.cluster.addresses import advertised, own_addresses  # noqa: PLC0415 - keeps --help quick
    from mesh.placement.topology import read_topology  # noqa: PLC0415
    from mesh.serve.options import demo_model, demo_num_stages  # noqa: PLC0415

    name = options.name or socket.gethostname()
    topology = None if options.topology_path is None else read_topology(options.topology_path)
    num_hosts, stages = options.num_hosts, options.stages
    if topology is not None:
        num_hosts = len(topology.missing(() if options.head_only else (name,)))
    folders = tuple(folder.absolute() for folder in options.library)
    if model is None and not folders and options.split is None and topology is None:
        stages = stages or demo_num_stages(num_hosts)
    if options.advertise is None:
        address, *others = own_addresses(must_be_clear=num_hosts > 0)
    else:
        address, others = advertised(options.advertise), []
    named = model or (_library_model(folders) if folders else demo_model())
    pulled = served_model(named)
    drafter = options.draft_path
    return options.changed(
        model=pulled.path,
        draft_path=None if drafter is None else local_model(drafter).path,
        mmproj=projector_for(options.mmproj, named, pulled.path),
        hub=pulled.hub,
        name=name,
        address=address,
        other_addresses=tuple(others),
        is_address_given=options.advertise is not None,
        topology=topology,
        num_hosts=num_hosts,
        stages=stages,
        library=folders,
    )


def _library_model(folders: tuple[Path, ...]) -> Path:
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


async def _serve(options: HeadOptions, interruption: Interruption) -> None:
    from mesh.serve.preflight import check  # noqa: PLC0415 - keeps --help quick

    known = check(options)
    from mesh.serve.main import serve_mesh  # noqa: PLC0415 - the server's libraries, which a refusal needs not

    await serve_mesh(options, known, interruption)
