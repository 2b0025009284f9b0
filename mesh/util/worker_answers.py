"""Answers of worker processes that have values, bytes or an error of the mesh."""

from __future__ import annotations

import json
import struct
from typing import TYPE_CHECKING, Any, Final

from spanmesh_proto.errors import WIRE

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from spanmesh_proto.errors import MeshError

# Size of the values, which are ahead of the bytes.
_HEAD_BYTES: Final = struct.Struct("<I")
_KINDS: Final = {kind.__name__: kind for kind in WIRE}


def packed_answer(values: Mapping[str, Any], data: Sequence[bytes] = ()) -> bytes:
    """An answer: values, JSON-serialisable, and bytes."""
    head = json.dumps(values).encode()
    return b"".join((_HEAD_BYTES.pack(len(head)), head, *data))


def packed_error(error: MeshError) -> bytes:
    """An answer that is an error."""
    told = {"kind": type(error).__name__, "message": error.message, "param": error.param}
    return packed_answer({"error": told})


def unpacked_answer(answer: bytes) -> tuple[dict[str, Any], memoryview]:
    """Values and bytes of an answer.

    Raises:
        MeshError: If it is one.
    """
    (num_bytes,) = _HEAD_BYTES.unpack_from(answer)
    start = _HEAD_BYTES.size + num_bytes
    values: dict[str, Any] = json.loads(answer[_HEAD_BYTES.size : start])
    if (told := values.get("error")) is not None:
        raise _KINDS[told["kind"]](told["message"], param=told["param"])
    return values, memoryview(answer)[start:]
