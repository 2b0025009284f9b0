"""This host's GPUs, without keeping any of them busy.

A process that looks at GPUs takes memory of them until it ends, so `mesh join`, which stays, has it done by
another.
"""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Final

from mesh.placement.host_capacity import Gpu
from mesh.util.child_environment import inherited_environment
from spanmesh_proto.errors import ClusterError
from stages.runtime.llama_libraries import may_have_layer_devices

# A GPU's driver may take its time to start.
_TIMEOUT_S: Final = 120.0


def find_gpus() -> tuple[Gpu, ...]:
    """What GPUs llama.cpp finds here; at once where it was built without any.

    Raises:
        ClusterError: If the process that looks fails, with its last words.
    """
    if not may_have_layer_devices():
        return ()
    argv = [sys.executable, "-m", "mesh.cluster.device_probe"]
    try:
        done = subprocess.run(
            argv,
            env=inherited_environment(),
            capture_output=True,
            text=True,
            check=True,
            timeout=_TIMEOUT_S,
        )
        return tuple(Gpu(**fields) for fields in json.loads(done.stdout))
    except (OSError, ValueError, TypeError, subprocess.SubprocessError) as error:
        said = error.stderr if isinstance(error, subprocess.CalledProcessError) else None
        reason = next((line for line in reversed((said or "").splitlines()) if line.strip()), str(error))
        raise ClusterError(
            f"cannot look at this host's GPUs: {reason}; --gpu-layers none does without them",
            param="--gpu-layers",
        ) from error
