"""The OpenAI-compatible HTTP API, in front of any `mesh.engine.Engine`.

A name is imported when it is asked for: who only reads API keys does without FastAPI.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from mesh.api.api_keys import ApiKeys
    from mesh.api.app import create_app
    from mesh.api.backend import Backend
    from mesh.api.backends import Backends, backend_beside
    from mesh.api.exposure import check_origins, require_key_beyond_loopback
    from mesh.api.server import serve_api

__all__ = [
    "ApiKeys",
    "Backend",
    "Backends",
    "backend_beside",
    "check_origins",
    "create_app",
    "require_key_beyond_loopback",
    "serve_api",
]

_MODULES: Final = {
    "ApiKeys": "api_keys",
    "Backend": "backend",
    "Backends": "backends",
    "backend_beside": "backends",
    "check_origins": "exposure",
    "create_app": "app",
    "require_key_beyond_loopback": "exposure",
    "serve_api": "server",
}


def __getattr__(name: str) -> Any:
    """See PEP 562."""
    module = _MODULES.get(name)
    if module is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{module}"), name)
