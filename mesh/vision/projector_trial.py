"""Trial of a projector on this host: its memory, measured with a blank picture, and what stages need for it.

It takes as long as loading the projector and encoding the longest picture, so results are kept in the cache,
by all that they depend on.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from mesh.vision.encoder import EncoderProcess
from spanmesh_proto.errors import MeshError
from stages.files import write_atomically
from stages.gguf import part_paths
from stages.vision.library import mtmd_build
from stages.vision.projector import ProjectorMemory
from stages.weights.disk_cache import default_root
from stages.weights.hashing import stamps_of

if TYPE_CHECKING:
    from stages.vision.projector import ProjectorOptions

# Raised when a trial tells something else.
_VERSION: Final = 1


@dataclass(frozen=True)
class ProjectorTrial:
    """What was measured of a projector on this host."""

    memory: ProjectorMemory
    """Its memory."""
    most_at_once: int
    """See `ProjectorFacts.most_at_once`."""


def known_trial(options: ProjectorOptions, root: Path | None = None) -> ProjectorTrial | None:
    """The trial of a projector, if there was one with the same files, settings and libmtmd.

    Args:
        options: Settings of the projector; the number of threads does not matter.
        root: Folder of the cache; the default one unless given.
    """
    try:
        told = json.loads(_path_of(options, root).read_bytes())
        return ProjectorTrial(ProjectorMemory(**told["memory"]), int(told["most_at_once"]))
    except (OSError, MeshError, ValueError, KeyError, TypeError):
        return None


async def tried_out(options: ProjectorOptions, root: Path | None = None) -> ProjectorTrial:
    """The trial of a projector, as it is known or made now.

    Args:
        options: Settings of the projector.
        root: Folder of the cache; the default one unless given.

    Raises:
        InvalidModel: If the projector does not belong to the model, or ends the process.
        ClusterError: If libmtmd or the device is missing.
        StageFailed: If it does not compute.
        ModelError: If the cache cannot be written.
    """
    if (known := known_trial(options, root)) is not None:
        return known
    encoder = EncoderProcess(options)
    try:
        facts = await encoder.facts()
        found = ProjectorTrial(await encoder.memory(), facts.most_at_once)
    finally:
        encoder.close()
    write_atomically(_path_of(options, root), json.dumps(asdict(found)))
    return found


def _path_of(options: ProjectorOptions, root: Path | None) -> Path:
    """File with the trial of a projector.

    Raises:
        MeshError: If one of its files is gone, or libmtmd is missing.
    """
    files = (Path(options.path), *part_paths(options.model_path))
    parts = (_VERSION, mtmd_build().hex(), options.device, options.most_tokens, stamps_of(files))
    key = hashlib.sha256(repr(parts).encode()).hexdigest()
    return (root or default_root()) / "projectors" / f"{key}.json"
