"""TLS of HTTP clients."""

from __future__ import annotations

import ssl


def authorities_for(url: str) -> ssl.SSLContext:
    """Authorities of this system for https; reading them takes time, and plain HTTP needs none."""
    if url.startswith("https:"):
        return ssl.create_default_context()
    return ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
