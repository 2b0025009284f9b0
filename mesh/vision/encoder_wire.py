"""Messages of an encoder of pictures on another host."""

from __future__ import annotations

from dataclasses import fields

from spanmesh_proto import pictures_pb2 as wire
from stages.sampling.session_spec import chunk_from_wire, chunk_to_wire
from stages.vision.chunks import PictureParts
from stages.vision.projector import ProjectorFacts


def facts_to_wire(facts: ProjectorFacts) -> wire.Facts:
    """The message of a projector's facts."""
    return wire.Facts(**{each.name: getattr(facts, each.name) for each in fields(ProjectorFacts)})


def facts_of(message: wire.Facts) -> ProjectorFacts:
    """The facts of a message."""
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
    """The parts of a message."""
    return PictureParts(
        tuple(
            chunk_from_wire(part.chunk) if part.HasField("chunk") else tuple(part.tokens)
            for part in message.parts
        )
    )
