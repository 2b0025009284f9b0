"""Environment variables and TLS files of Ray."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Final

from mesh.util.child_environment import inherited_environment
from stages.runtime.process_memory import ALLOCATOR

if TYPE_CHECKING:
    from pathlib import Path

    from stages.transport.channels import Identity

# Ray's processes read them from files only. The node's folder is readable by this user only and removed with
# the node.
_MODE: Final = 0o600
PARENT_PID: Final = "SPANMESH_PARENT_PID"
# For a node that may outlive its starter: the file that its owner locks, and the longest time without an
# owner.
OWNER_PATH: Final = "SPANMESH_OWNER_PATH"
LINGER_S: Final = "SPANMESH_LINGER_S"
_SETTINGS: Final = {
    "RAY_AUTH_MODE": "token",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "1",
    # Weights are mapped files: a full memory is normal, not a reason to end a stage.
    "RAY_memory_monitor_refresh_ms": "0",
    # A stage requests no GPU from Ray, llama.cpp finds it by itself: keep it visible.
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    # Stages serve interactive requests: their priority is normal.
    "RAY_worker_niceness": "0",
    # Serialised objects are compatible among Python's patch releases.
    "RAY_DEFAULT_PYTHON_VERSION_MATCH_LEVEL": "minor",
    # The only workers are those of stages: one that starts ahead would be idle for ever.
    "RAY_prestart_worker_first_driver": "0",
    # What Ray counts of itself is read nowhere.
    "RAY_enable_metrics_collection": "0",
    "RAY_task_events_report_interval_ms": "0",
    "RAY_event_stats": "0",
    "RAY_debug_dump_period_milliseconds": "0",
    # Of which there are ten a second: looks at the room on disks, and at transfers of objects. Stages use
    # neither.
    "RAY_local_fs_monitor_interval_ms": "5000",
    "RAY_object_manager_timer_freq_ms": "5000",
}


class RayTlsFiles:
    """Key, certificate and authority of a Ray node, as files.

    Args:
        folder: Private folder of the node.
    """

    def __init__(self, folder: Path) -> None:
        self._certificate = folder / "certificate.pem"
        self._key = folder / "key.pem"
        self._authority = folder / "authority.pem"

    @property
    def exist(self) -> bool:
        """Whether this node uses TLS."""
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
        """Environment variables for Ray."""
        return {
            "RAY_USE_TLS": "1",
            "RAY_TLS_SERVER_CERT": str(self._certificate),
            "RAY_TLS_SERVER_KEY": str(self._key),
            "RAY_TLS_CA_CERT": str(self._authority),
        }


def ray_environment(token_path: Path) -> dict[str, str]:
    """Environment variables of processes that connect to the mesh's Ray.

    Args:
        token_path: File with Ray's token, readable by this user only. If this host's key and certificates are
            beside it, Ray's processes use TLS.
    """
    settings = {**_SETTINGS, "RAY_AUTH_TOKEN_PATH": str(token_path)}
    files = RayTlsFiles(token_path.parent)
    return settings | files.environment() if files.exist else settings


def become_driver(token_path: Path) -> None:
    """Set up this process to connect to the mesh's Ray, before Ray is imported."""
    for name in [name for name in os.environ if name.startswith("RAY_")]:
        del os.environ[name]
    os.environ.update(ray_environment(token_path))


def child_environment(token_path: Path, owner_path: Path, linger_s: float) -> dict[str, str]:
    """Environment of a Ray node's first process, our child.

    Without the operator's settings for another Ray, and without API keys. Stages inherit settings of the
    memory allocator from it, unless the operator set others.

    Args:
        token_path: File with Ray's token, readable by this user only.
        owner_path: File that the owner of the node keeps locked.
        linger_s: Time for which the node runs without an owner; 0: it ends with this process.
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
