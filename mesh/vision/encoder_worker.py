"""Process that holds a projector, for `mesh.vision.encoder`: pixels to rows.

libmtmd ends its process on what it does not expect; here that costs the picture at hand, and loading the
projector once more.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from functools import lru_cache

import numpy as np

from mesh.util.worker_answers import packed_answer, packed_error
from spanmesh_proto.errors import InvalidModel, MeshError
from stages.vision.picture import Picture
from stages.vision.projector import Projector, ProjectorOptions


def handle(header: bytes, payload: bytes) -> bytes:
    """Answer a job: kind, the projector's settings, a picture's size, and its pixels if they are wanted."""
    job = json.loads(header)
    try:
        projector = _projector(ProjectorOptions(**job["options"]))
        match job["kind"]:
            case "facts":
                return packed_answer(asdict(projector.facts))
            case "memory":
                return packed_answer(asdict(projector.measured()))
            case "parts":
                return packed_answer({"parts": projector.parts(job["width"], job["height"]).told()})
            case "encode":
                if projector.facts.identity != job["identity"]:
                    raise InvalidModel("the projector's file is another one than it was: load the model anew")
                rows = projector.encode(Picture(job["width"], job["height"], payload))
                return packed_answer({}, [each.astype(np.float32, copy=False).tobytes() for each in rows])
        raise ValueError(job["kind"])
    except MeshError as error:
        return packed_error(error)


@lru_cache(maxsize=1)
def _projector(options: ProjectorOptions) -> Projector:
    return Projector(options)
