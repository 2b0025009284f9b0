"""API keys, and the one gate that every request but `/health` must pass."""

from __future__ import annotations

import hashlib
import hmac
from typing import TYPE_CHECKING, Final

from mesh.api.errors import error_response
from spanmesh_proto.errors import MeshError, Unauthorized

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from starlette.types import ASGIApp, Receive, Scope, Send

OPEN_PATHS: Final = frozenset({"/health"})
KEY_NAME: Final = "spanmesh.key_name"


class ApiKeys:
    """The keys that may use the API, each with a name for the log. Only their hashes are kept.

    Args:
        keys: Name to key.

    Raises:
        MeshError: If there is no key: a server that nobody can use is a mistake.
    """

    def __init__(self, keys: Mapping[str, str]) -> None:
        if not keys:
            raise MeshError("there is no API key: give at least one")
        self._hashes = {name: _hash(key) for name, key in keys.items()}

    @classmethod
    def from_file(cls, path: Path) -> ApiKeys:
        """Read one key per line, `KEY` or `NAME KEY`; `#` begins a comment line. Unnamed keys are `key-LINE`.

        Raises:
            MeshError: If the file cannot be read, holds no key, or has a line with more than two words.
        """
        try:
            lines = path.read_text().splitlines()
        except (OSError, UnicodeDecodeError) as error:
            reason = error.strerror if isinstance(error, OSError) else "not a text file"
            raise MeshError(f"the API key file {path} cannot be read: {reason}") from error
        keys: dict[str, str] = {}
        for number, line in enumerate(lines, start=1):
            words = line.split()
            if not words or words[0].startswith("#"):
                continue
            if len(words) > 2:
                raise MeshError(f"line {number} of the API key file {path} is neither `KEY` nor `NAME KEY`")
            name = words[0] if len(words) == 2 else f"key-{number}"
            if name in keys:
                raise MeshError(f"line {number} of the API key file {path} names {name} a second time")
            keys[name] = words[-1]
        if not keys:
            raise MeshError(f"the API key file {path} holds no key: put one on each line")
        return cls(keys)

    def name_of(self, key: str) -> str | None:
        """The name of a key, or None if it is not one of ours. Takes equally long whatever the key."""
        presented = _hash(key)
        found = None
        for name, known in self._hashes.items():
            if hmac.compare_digest(presented, known):
                found = name
        return found


def key_name_of(scope: Scope) -> str | None:
    """The name of the key that a request came with; None where the API is open."""
    name: str | None = scope.get(KEY_NAME)
    return name


class KeyGate:
    """Middleware that lets a request through with a valid key only, whether its route exists or not.

    Args:
        app: What lies behind it.
        keys: None opens the gate.
    """

    def __init__(self, app: ASGIApp, keys: ApiKeys | None) -> None:
        self._app = app
        self._keys = keys

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Check, then pass on or answer 401."""
        if self._keys is None or scope["type"] == "lifespan" or scope["path"] in OPEN_PATHS:
            await self._app(scope, receive, send)
            return
        try:
            scope[KEY_NAME] = _authorize(scope, self._keys)
        except Unauthorized as error:
            await error_response(error)(scope, receive, send)
            return
        await self._app(scope, receive, send)


def _authorize(scope: Scope, keys: ApiKeys) -> str:
    headers = [value for name, value in scope["headers"] if name == b"authorization"]
    scheme, _, key = headers[0].decode("latin-1").partition(" ") if headers else ("", "", "")
    if scheme.lower() != "bearer" or not key.strip():
        raise Unauthorized("this server needs an API key: send the header `Authorization: Bearer <key>`")
    name = keys.name_of(key.strip())
    if name is None:
        raise Unauthorized("the API key is not one of this server's: ask whoever runs it for one")
    return name


def _hash(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()
