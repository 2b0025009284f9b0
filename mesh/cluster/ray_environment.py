"""Environment variables and TLS files of Ray."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Final

from mesh.util.child_environment import inherited_environment
from stages.runtime.memory import ALLOCATOR

if TYPE_CHECKING:
    from pathlib import Path

    from stages.transport.channels import Identity


# Ray's processes take them from files only. They lie in the node's folder, which is this user's alone and
# goes with the node.
_MODE: Final = 0o600


class RayTlsFiles:
    """Three files.

    Args:
        folder: Of the node; nobody else can enter it.
    """

    def __init__(self, folder: Path) -> None:
        self._certificate = folder / "certificate.pem"
        self._key = folder / "key.pem"
        self._authority = folder / "authority.pem"

    @property
    def exist(self) -> bool:
        """Whether this node speaks TLS."""
        return self._key.exists()

    def write(self, identity: Identity) -> None:
        """Write them, readable by this user only."""
        for path, content in (
            (self._certificate, identity.certificate_pem),
            (self._authority, identity.authority_pem),
            (self._key, identity.private_key_pem),
        ):
            with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, _MODE), "wb") as file:
                file.write(content)

    def environment(self) -> dict[str, str]:
        """What tells Ray of them."""
        return {
            "RAY_USE_TLS": "1",
            "RAY_TLS_SERVER_CERT": str(self._certificate),
            "RAY_TLS_SERVER_KEY": str(self._key),
            "RAY_TLS_CA_CERT": str(self._authority),
        }


PARENT_PID: Final = "SPANMESH_PARENT_PID"
# For a node that may outlive its starter: the file that its owner locks, and for how long nobody may.
OWNER_PATH: Final = "SPANMESH_OWNER_PATH"
LINGER_S: Final = "SPANMESH_LINGER_S"

_SETTINGS: Final = {
    "RAY_AUTH_MODE": "token",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "1",
    # Weights are mapped files: a full memory is normal, not a reason to kill a stage.
    "RAY_memory_monitor_refresh_ms": "0",
    # A stage asks Ray for no GPU, llama.cpp finds it by itself: leave it visible.
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    # Stages answer people: they do not stand back behind every other process of their host.
    "RAY_worker_niceness": "0",
    # Objects that cross Python patch releases do so unharmed.
    "RAY_DEFAULT_PYTHON_VERSION_MATCH_LEVEL": "minor",
}


def ray_environment(token_path: Path) -> dict[str, str]:
    """Variables for every process that is to talk to the mesh's Ray.

    Args:
        token_path: File with Ray's token, readable by this user only. If this host's key and certificates lie
            beside it, Ray's processes speak TLS with each other and nothing else.
    """
    settings = {**_SETTINGS, "RAY_AUTH_TOKEN_PATH": str(token_path)}
    files = RayTlsFiles(token_path.parent)
    return settings | files.environment() if files.exist else settings


def become_driver(token_path: Path) -> None:
    """Set up this process to connect to the mesh's Ray; to be called before Ray is imported."""
    for name in [name for name in os.environ if name.startswith("RAY_")]:
        del os.environ[name]
    os.environ.update(ray_environment(token_path))


def child_environment(token_path: Path, owner_path: Path, linger_s: float) -> dict[str, str]:
    """The whole environment of a Ray node's first process, our child.

    What the user has set up for another Ray does not reach ours, nor does a key that opens an API. Stages
    inherit from it how they allocate, unless the user knows better.

    Args:
        token_path: File with Ray's token, readable by this user only.
        owner_path: File that the owner of the node holds a lock on.
        linger_s: How long the node lives without an owner; 0: no longer than this process.
    """
    inherited = {
        name: value for name, value in inherited_environment().items() if not name.startswith("RAY_")
    }
    return {
        **ALLOCATOR,
        **inherited,
        **ray_environment(token_path),
        PARENT_PID: str(os.getpid()),
        OWNER_PATH: str(owner_path),
        LINGER_S: str(linger_s),
        "RAY_START_HOOK": "mesh.cluster.ray_start_hook.leave_out",
        "PYTHONUNBUFFERED": "1",
    }
