"""Messages of an encoder of pictures on another host."""

from __future__ import annotations

from dataclasses import fields

from spanmesh_proto import pictures_pb2 as wire
from spanmesh_proto.errors import ProtocolError
from spanmesh_proto.image_chunk import ImageChunk
from stages.sampling.session_spec import chunk_from_wire, chunk_to_wire
from stages.vision.chunks import PictureParts
from stages.vision.projector import MOST_ROWS, ProjectorFacts


def facts_to_wire(facts: ProjectorFacts) -> wire.Facts:
    """The message of a projector's facts."""
    return wire.Facts(**{each.name: getattr(facts, each.name) for each in fields(ProjectorFacts)})


def facts_of(message: wire.Facts) -> ProjectorFacts:
    """The facts of a message.

    Raises:
        ProtocolError: If the identity is no digest.
    """
    try:
        bytes.fromhex(message.identity)
    except ValueError:
        raise ProtocolError("an encoder of pictures told an identity that is no digest") from None
    return ProjectorFacts(**{each.name: getattr(message, each.name) for each in fields(ProjectorFacts)})


def parts_to_wire(parts: PictureParts) -> wire.Parts:
    """The message of a picture's parts."""
    return wire.Parts(
        parts=[
            wire.Part(tokens=part) if isinstance(part, tuple) else wire.Part(chunk=chunk_to_wire(part))
            for part in parts.parts
        ]
    )


def parts_of(message: wire.Parts) -> PictureParts:
    """The parts of a message.

    Raises:
        ProtocolError: If they are not those of one picture: numbers of rows decide what is allocated.
    """
    found = PictureParts(
        tuple(
            chunk_from_wire(part.chunk) if part.HasField("chunk") else tuple(part.tokens)
            for part in message.parts
        )
    )
    if not 1 <= found.num_rows <= MOST_ROWS or not _are_in_order(found):
        raise ProtocolError(
            f"an encoder of pictures told {len(found.parts)} parts with {found.num_rows} rows, which are not"
            f" those of a picture; 1 to {MOST_ROWS} rows work"
        )
    return found


def _are_in_order(parts: PictureParts) -> bool:
    """Whether each chunk is whole and begins where the parts before it end."""
    at = 0
    for part in parts.parts:
        if isinstance(part, ImageChunk):
            if part.first_row != at or part.num_rows < 1 or part.num_rows % (part.columns or 1):
                return False
            at += part.num_rows
        elif min(part, default=0) < 0:
            return False
        else:
            at += len(part)
    return True
