"""Watch over the address of the head's host: the command begins anew when it has another one."""

from __future__ import annotations

import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final

import structlog

from mesh.cluster.addresses import AddressWatch, own_addresses
from mesh.util.fresh_start import start_command_anew
from spanmesh_proto.addresses import is_loopback

if TYPE_CHECKING:
    from collections.abc import Iterator

    from mesh.options.host import HeadOptions
    from mesh.serve.head import Head

# Time for which the address may be away, as while a wireless network is lost.
_ADDRESS_PATIENCE_S: Final = 4.0
_WATCH_S: Final = 1.0

log = structlog.get_logger()


@contextmanager
def address_watched(head: Head, options: HeadOptions) -> Iterator[None]:
    """Context in which the command begins anew when this host has another address.

    In a thread: Ray's calls wait for its processes, which connect by the former address, and the event loop
    with them.
    """
    ended = threading.Event()
    watch = threading.Thread(target=_watch_address, args=(head, options, ended), daemon=True)
    watch.start()
    try:
        yield
    finally:
        ended.set()
        watch.join()


def _watch_address(head: Head, options: HeadOptions, ended: threading.Event) -> None:
    address = head.own.address
    watch = AddressWatch(address, _ADDRESS_PATIENCE_S)
    is_known = False
    while not ended.wait(_WATCH_S):
        if is_known is not watch.has_lost:
            is_known = not is_known
            log.error("own_address_gone", address=address) if is_known else log.info(
                "own_address_back", address=address
            )
        if not is_known or options.is_address_given:
            continue
        now, *_ = own_addresses(must_be_clear=False)
        # Hosts that were waited for do not come by loopback: a network has to be there first.
        if not (options.num_hosts and is_loopback(now)):
            log.warning("begins_anew", reason=f"this host was {address} and is {now} now")
            head.node.stop()
            start_command_anew()
