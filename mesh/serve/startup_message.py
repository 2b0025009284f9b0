"""Messages of `mesh serve` for the operator: how a host joins, and where the model is served."""

from __future__ import annotations

import contextlib
import ipaddress
from typing import TYPE_CHECKING, Final

import structlog

from mesh.cluster.join_token import decode
from mesh.util.printable import say
from spanmesh_proto.addresses import join_address, split_address
from stages.gguf import model_name

if TYPE_CHECKING:
    from mesh.options.host import HeadOptions
    from mesh.serve.head import Head
    from mesh.serve.status import MeshState
    from spanmesh_proto.addresses import PortRange

_QUESTION: Final = (
    '{"model": "default", "messages": [{"role": "user", "content": "Who are you?"}],'
    ' "temperature": 0, "max_tokens": 64}'
)

log = structlog.get_logger()


def print_join_line(head: Head) -> None:
    """Print the command by which a host joins, and the ports that it needs."""
    _say(join_line(head.token, head.own.port_range))


def join_line(token: str, port_range: PortRange | None) -> str:
    """The command by which a host joins, and the ports that it needs.

    Args:
        token: Join token.
        port_range: Ports of the head; None for any free ones.
    """
    addresses = decode(token).addresses
    first = f"The first connection is TCP to {' or '.join(addresses)}."
    if len(addresses) > 1:
        first += " A host takes the address that it reaches first;\n--advertise lets all take one."
    if port_range is None:
        command = f"mesh join {token}"
        ports = (
            f"{first} Ray and the stages use free ports of every host:\n"
            "allow all TCP between the hosts, and none from elsewhere."
        )
    else:
        command = f"mesh join {token} --port-range {port_range}"
        ports = (
            f"{first} For the mesh this host listens on {port_range} only:\n"
            "allow TCP to the range of each host from the others, and none from elsewhere."
        )
    return f"\nOn every other host:\n\n  {command}\n\n{ports}\n"


def print_served(options: HeadOptions, state: MeshState, url: str, head: Head) -> None:
    """Print the URL of the API and a request to try, for any host that reaches it."""
    num_stages = 0 if state.plan is None else len(state.plan.stages)
    log.info("serving", url=url, model=model_name(options.model), stages=num_stages)
    url = reachable(url, head.own.address)
    auth = ' -H "Authorization: Bearer $MESH_API_KEY"' if options.api_key_path is not None else ""
    if state.context is not None:
        _say(f"\n{state.context}.")
    stages = "one stage" if num_stages == 1 else f"{num_stages} stages"
    where = f"{url}/v1 in {stages} ({state.plan_reason or ''})"
    _say(f"\n{model_name(options.model)} is served at {where}. Try:\n")
    _say(
        f"  curl {url}/v1/chat/completions -H 'Content-Type: application/json'{auth} \\\n"
        f"    -d '{_QUESTION}'\n"
    )
    if options.num_hosts == 0:
        print_join_line(head)
    if options.record_path is not None:
        of = "keys that may be recorded" if options.api_key_path is not None else "all requests from here"
        _say(f"Answers to {of} are recorded in {options.record_path}.")
    if options.tune_group is not None:
        _say(f"In pauses a drafter for the keys of group {options.tune_group} is tuned on them.")
    _say("Ctrl-C stops it.")


def reachable(url: str, address: str) -> str:
    """A URL for clients: a server that listens at 0.0.0.0 has its host's address.

    Args:
        url: URL with the address on which it listens.
        address: Address of its host for other hosts.
    """
    listens_at, port = split_address(url.removeprefix("http://"))
    if not ipaddress.ip_address(listens_at).is_unspecified:
        return url
    return f"http://{join_address(address, port)}"


def _say(text: str) -> None:
    # Serving continues without a reader of the output, as in `mesh serve | head`.
    with contextlib.suppress(OSError):
        say(text)
