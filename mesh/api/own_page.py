"""Whether a request comes from the page that this very server sent."""

from __future__ import annotations

import ipaddress
import socket


def is_own_origin(origin: str, host_header: str) -> bool:
    """Whether a browser's Origin is where its request goes, by a name that nobody else can lead here.

    The two agree for a page of `evil.example`, too, once its owner lets that name lead to this machine (DNS
    rebinding). So the name must be an address, `localhost`, or what this machine calls itself.

    Args:
        origin: Such as `http://127.0.0.1:8000`.
        host_header: Such as `127.0.0.1:8000`.
    """
    scheme, _, place = origin.partition("://")
    if scheme not in {"http", "https"} or not place or place.lower() != host_header.strip().lower():
        return False
    name = place[1:].partition("]")[0] if place.startswith("[") else place.partition(":")[0]
    try:
        ipaddress.ip_address(name)
    except ValueError:
        own = socket.gethostname().lower()
        return name.lower() in {"localhost", own, f"{own}.local"}
    return True
