"""The OpenAI-compatible HTTP API, in front of any `mesh.engine.Engine`."""

from mesh.api.api_keys import ApiKeys
from mesh.api.app import create_app
from mesh.api.backend import Backend
from mesh.api.backends import Backends, backend_beside
from mesh.api.cors import check_origins
from mesh.api.server import require_key_beyond_loopback, serve_api

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
