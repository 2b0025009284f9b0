"""What the processes of a mesh are, by their command lines. Pure."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING, Final, Literal

if TYPE_CHECKING:
    from collections.abc import Sequence

Role = Literal["stage", "coordinator", "join", "ray", "other"]
# Of the mesh.
ROLES: Final[tuple[Role, ...]] = ("stage", "coordinator", "join", "ray")

# Ray renames a worker to what it runs.
_STAGE_TITLE: Final = "ray::StageActor"
_RAY_MARKS: Final = ("ray::", "raylet", "gcs_server", "ray/_private", "ray_child", "/ray/")


def role_of(argv: Sequence[str]) -> Role:
    """What a process does in the mesh.

    Returns:
        `stage` for an actor that holds one, `coordinator` for `mesh serve`, `join` for `mesh join`, `ray` for
        Ray's own processes, `other` for what is no part of the mesh.
    """
    line = " ".join(argv)
    if line.startswith(_STAGE_TITLE):
        return "stage"
    if any(mark in line for mark in _RAY_MARKS):
        return "ray"
    words = [word.rpartition("/")[2] for word in argv]
    commands = set(pairwise(words))
    if ("mesh", "serve") in commands:
        return "coordinator"
    return "join" if ("mesh", "join") in commands else "other"
