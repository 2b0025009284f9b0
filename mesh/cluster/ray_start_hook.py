"""Start hook of Ray: leaves out its agents and dashboard.

Ray's command line has no option for that. Its agents take 100 MB on every host; the dashboard and the server
for Ray Client, which also takes a fixed port, 150 MB more on the head.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any, Final

from mesh.cluster import ray_idle_agent

if TYPE_CHECKING:
    from types import ModuleType

# The hook depends on Ray's internals: with an untested release it has no effect.
_TRIED_RELEASE: Final = "2.60."
_AGENTS: Final = ("dashboard_agent", "runtime_env_agent")
_AGENT_PORTS: Final = (
    *("metrics_agent_port", "metrics_export_port", "dashboard_agent_listen_port"),
    "runtime_env_agent_port",
)


def leave_out(ray_params: Any, head: bool) -> None:  # noqa: FBT001 - Ray's signature
    """Ray's start hook.

    Args:
        ray_params: Parameters of the node.
        head: Whether it is the head of the cluster.
    """
    if head:
        ray_params.ray_client_server_port = None
    import ray  # noqa: PLC0415 - this runs in `ray start`, which has it
    from ray._private import services  # noqa: PLC0415

    if ray.__version__.startswith(_TRIED_RELEASE) and sys.platform == "linux":
        start_less(services)
        name_no_ports(ray_params)


def name_no_ports(ray_params: Any) -> None:
    """Let the raylet read from its session's folder that the idle agents have no ports.

    With a port on the command line it would pass that to its workers, which then look for an agent there.

    Args:
        ray_params: Parameters of the node.
    """
    for name in _AGENT_PORTS:
        setattr(ray_params, name, 0)


def start_less(services: ModuleType) -> None:
    """Make Ray start idle agents, see `ray_idle_agent`, and no dashboard.

    Args:
        services: Module of Ray that starts processes.
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
