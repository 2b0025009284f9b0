"""Start hook of Ray: leaves out its agents and dashboard.

Ray's command line has no option against them. Its agents take 100 MB on every host; the dashboard and the
server for Ray Client, which also takes a fixed port, 150 MB more on the head.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any, Final

from mesh.cluster import ray_idle_agent

if TYPE_CHECKING:
    from types import ModuleType

# How Ray starts its processes is its own affair: with another release it starts all, until that was tried.
_TRIED_RELEASE: Final = "2.60."
_AGENTS: Final = ("dashboard_agent", "runtime_env_agent")


def leave_out(ray_params: Any, head: bool) -> None:  # noqa: FBT001 - Ray's signature
    """Ray's start hook.

    Args:
        ray_params: What the node is started with.
        head: Whether the cluster starts with it.
    """
    if head:
        ray_params.ray_client_server_port = None
    import ray  # noqa: PLC0415 - this runs in `ray start`, which has it
    from ray._private import services  # noqa: PLC0415

    if ray.__version__.startswith(_TRIED_RELEASE) and sys.platform == "linux":
        start_less(services)


def start_less(services: ModuleType) -> None:
    """Have Ray start idle agents, see `ray_idle_agent`, and no dashboard.

    Args:
        services: Ray's module that starts processes.
    """
    command_of = services._build_python_executable_command_memory_profileable  # noqa: SLF001

    def idle_command_of(component: str, *arguments: Any, **options: Any) -> list[str]:
        if component in _AGENTS:
            return [sys.executable, "-I", "-S", ray_idle_agent.__file__]
        command: list[str] = command_of(component, *arguments, **options)
        return command

    def no_dashboard(*_arguments: Any, **_options: Any) -> tuple[str, None]:
        """No URL, and no process."""
        return "", None

    for name, function in (
        ("_build_python_executable_command_memory_profileable", idle_command_of),
        ("start_api_server", no_dashboard),
    ):
        setattr(services, name, function)
