"""Answers of worker processes that have values, bytes or an error of the mesh; `worker_pool` reads them."""

from __future__ import annotations

import json
import struct
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from spanmesh_proto.errors import MeshError

HEAD_BYTES: Final = struct.Struct("<I")
"""Size of the values, which are ahead of the bytes."""


def packed_answer(values: Mapping[str, Any], data: Sequence[bytes] = ()) -> bytes:
    """An answer: values, JSON-serialisable, and bytes."""
    head = json.dumps(values).encode()
    return b"".join((HEAD_BYTES.pack(len(head)), head, *data))


def packed_error(error: MeshError) -> bytes:
    """An answer that is an error."""
    told = {"kind": type(error).__name__, "message": error.message, "param": error.param}
    return packed_answer({"error": told})
