"""Where the requests go."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal
from urllib.parse import urlsplit

from spanmesh_proto.addresses import join_address
from spanmesh_proto.errors import InvalidRequest

EndpointName = Literal["chat", "completions"]


@dataclass(frozen=True)
class Server:
    """An OpenAI server's address.

    Attributes:
        url: As it is shown.
        host: Name or address.
        port: TCP port.
        is_tls: Whether it is spoken to over TLS.
        prefix: Path before `/v1`, often empty.
    """

    url: str
    host: str
    port: int
    is_tls: bool
    prefix: str

    @property
    def host_header(self) -> str:
        """What the `Host` header says."""
        return join_address(self.host, self.port)


def parse_url(url: str) -> Server:
    """From `http://HOST:PORT`, with or without the `/v1` that clients of OpenAI put behind it.

    Raises:
        InvalidRequest: If it is no such address.
    """
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError as error:
        raise InvalidRequest(
            f"{url!r} is no address ({error}); write http://HOST:PORT", param="--url"
        ) from None
    if parts.scheme not in {"http", "https"} or not parts.hostname:
        raise InvalidRequest(f"{url!r} is no address; write http://HOST:PORT", param="--url")
    is_tls = parts.scheme == "https"
    return Server(
        url=url,
        host=parts.hostname,
        port=port if port is not None else (443 if is_tls else 80),
        is_tls=is_tls,
        prefix=parts.path.rstrip("/").removesuffix("/v1"),
    )
