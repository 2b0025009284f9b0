"""The stand-in for Ray's agents, as Ray starts it: it tells of no ports, and ends with the raylet."""

from __future__ import annotations

import subprocess
import time
from types import SimpleNamespace
from typing import TYPE_CHECKING, cast

import pytest

from mesh.cluster.ray_idle_agent import options_of, port_names
from mesh.cluster.ray_start_hook import start_less

if TYPE_CHECKING:
    from pathlib import Path
    from types import ModuleType

DASHBOARD = "/somewhere/ray/dashboard/agent.py"
RUNTIME_ENV = "/somewhere/ray/_private/runtime_env/agent/main.py"


def hooked() -> SimpleNamespace:
    """A stand-in for Ray's module after the hook was at it."""
    services = SimpleNamespace(
        _build_python_executable_command_memory_profileable=lambda *arguments: ["own", *arguments],
        start_api_server=lambda: ("127.0.0.1:8265", object()),
    )
    start_less(cast("ModuleType", services))
    return services


def command_of(component: str) -> list[str]:
    services = hooked()
    command: list[str] = services._build_python_executable_command_memory_profileable(component, "folder")
    return command


@pytest.mark.parametrize(
    ("component", "program", "names"),
    [
        (
            "dashboard_agent",
            DASHBOARD,
            {"metrics_agent_port", "metrics_export_port", "dashboard_agent_listen_port"},
        ),
        ("runtime_env_agent", RUNTIME_ENV, {"runtime_env_agent_port"}),
    ],
)
def test_it_tells_its_ports_and_ends_with_the_raylet(
    component: str, program: str, names: set[str], tmp_path: Path
) -> None:
    arguments = [program, "--node-id=ab12", f"--session-dir={tmp_path}", "--log-dir=a=b", "--minimal"]
    with subprocess.Popen([*command_of(component), *arguments], stdin=subprocess.PIPE) as agent:
        expected = {f"{name}_ab12" for name in names}
        while {path.name for path in tmp_path.iterdir()} != expected:
            assert agent.poll() is None
            time.sleep(0.01)
        assert {path.read_text() for path in tmp_path.iterdir()} == {"-1"}
        assert agent.poll() is None
        assert agent.stdin is not None
        agent.stdin.close()
        assert agent.wait(120) == 0


def test_nothing_but_an_agent_is_stood_in_for() -> None:
    assert command_of("raylet") == ["own", "raylet", "folder"]
    assert hooked().start_api_server("anything", is_head=True) == ("", None)
    with pytest.raises(ValueError, match=r"monitor\.py is not an agent"):
        port_names("/somewhere/ray/autoscaler/monitor.py")


def test_values_may_hold_what_separates_them() -> None:
    assert options_of(["main.py", "--a=b=c", "--head", "-d=e", "--f="]) == {"a": "b=c", "f": ""}
