"""TLS of HTTP clients."""

from __future__ import annotations

import functools
import ssl


@functools.cache
def system_authorities() -> ssl.SSLContext:
    """Authorities of this system; reading them takes time."""
    return ssl.create_default_context()


def authorities_for(url: str) -> ssl.SSLContext:
    """Those of this system for https, and none for plain HTTP, of which no redirection is followed."""
    if url.startswith("https:"):
        return system_authorities()
    return ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
