"""Child process that runs `ray start` and ends with its parent."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from mesh.cluster.ray_environment import LINGER_S, OWNER_PATH, PARENT_PID
from mesh.cluster.ray_reaper import Ownership, keep
from mesh.util.child_environment import module_command
from mesh.util.dependent_child import die_with_parent


def main() -> None:
    """Start a Ray node with the arguments of `ray start`, and stay until it ends."""
    linger_s = float(os.environ[LINGER_S])
    if not linger_s:
        die_with_parent(int(os.environ[PARENT_PID]))
    arguments = sys.argv[1:]
    if sys.platform == "linux":
        ownership = Ownership(Path(os.environ[OWNER_PATH]), linger_s)
        sys.exit(keep(module_command("ray.scripts.scripts", *arguments), "raylet", ownership))
    from ray.scripts.scripts import main as ray_main  # noqa: PLC0415 - the parent may die while Ray is imported

    sys.argv[1:] = [*arguments, "--block"]
    ray_main()


if __name__ == "__main__":
    main()
