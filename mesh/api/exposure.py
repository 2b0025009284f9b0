"""Who could use the API: refused, where that is more than the user can want, before there is a server."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final

from mesh.cluster.addresses import is_loopback
from spanmesh_proto.errors import MeshError

if TYPE_CHECKING:
    from collections.abc import Sequence

ANY_ORIGIN: Final = "*"
_ORIGIN: Final = re.compile(r"https?://(\[[0-9a-f:]+\]|[a-z0-9.-]+)(:\d{1,5})?")


def require_key_beyond_loopback(host: str, *, has_keys: bool, is_insecure: bool = False) -> None:
    """Refuse an API that other machines can reach and that asks for no key.

    Args:
        host: Where it is to listen.
        has_keys: Whether it asks for one.
        is_insecure: Whether the user wants it all the same.

    Raises:
        MeshError: Naming the remedies.
    """
    if not has_keys and not is_insecure and not is_loopback(host):
        raise MeshError(
            f"--host {host} lets other machines use the model: give --api-key-file (`mesh keys add` makes"
            " one), listen on 127.0.0.1, or let everybody in with --insecure"
        )


def check_origins(origins: Sequence[str], *, has_keys: bool) -> None:
    """Check what the user says of web pages.

    Raises:
        MeshError: If one is no origin, or all pages are let in and no key is asked for.
    """
    for origin in origins:
        if origin == ANY_ORIGIN and not has_keys:
            raise MeshError(
                "--cors-origin '*' lets every web page that is visited here use the model: name those that"
                " may, or give --api-key-file",
                param="--cors-origin",
            )
        if origin != ANY_ORIGIN and not _ORIGIN.fullmatch(origin):
            raise MeshError(
                f"--cors-origin {origin!r} is no origin: write it as a browser does, in small letters and"
                " without a path, such as https://chat.example.org",
                param="--cors-origin",
            )
