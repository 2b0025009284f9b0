"""Jobs of the processes that parse and check large request bodies; see `mesh.util.worker_main`."""

from __future__ import annotations

import importlib
import sys
from functools import cache
from typing import TYPE_CHECKING, Any, Final

import msgpack

from mesh.api.bodies.encoding import encode
from mesh.api.request_parsing import parse_body
from spanmesh_proto.errors import InvalidRequest

if TYPE_CHECKING:
    from pydantic import BaseModel

PARSED: Final = b"p"
REFUSED: Final = b"r"
# A body may be nested as deep as the interpreter's usual limit lets a parser go; encoding it takes a few
# calls for each level.
_MAX_CALLS: Final = 10_000


def job_header(kind: type[BaseModel], most_values: int) -> bytes:
    """Header of a job; its payload is the body.

    Args:
        kind: Model of the body.
        most_values: Most values that it may hold.
    """
    data: bytes = msgpack.packb([kind.__module__, kind.__qualname__, most_values])
    return data


def handle(header: bytes, payload: bytes) -> bytes:
    """The encoded body after `PARSED`, or message and field of the error after `REFUSED`."""
    module, name, most_values = msgpack.unpackb(header)
    try:
        body = parse_body(payload, _kind(module, name), most_values)
    except InvalidRequest as error:
        refusal: bytes = msgpack.packb([error.message, error.param], unicode_errors="surrogatepass")
        return REFUSED + refusal
    limit = sys.getrecursionlimit()
    sys.setrecursionlimit(_MAX_CALLS)
    try:
        return PARSED + encode(body)
    finally:
        sys.setrecursionlimit(limit)


@cache
def _kind(module: str, name: str) -> Any:
    return getattr(importlib.import_module(module), name)
