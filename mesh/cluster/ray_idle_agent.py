"""Child process in place of an agent of Ray.

Ray's own agents serve its dashboard, metrics and runtime environments, none of which a mesh uses, and import
all of Ray: 50 MB each, on every host. The raylet only requires that they run as long as it does, and that
they write their ports into its session's folder.

The program imports next to nothing: it runs without the packages of its environment.
"""

import os
import sys
from collections.abc import Mapping, Sequence

# What Ray's own agents write for a service that does not exist.
_NO_PORT = "-1"
# By the end of the path of the replaced program.
_PORTS = {
    "dashboard/agent.py": ("metrics_agent_port", "metrics_export_port", "dashboard_agent_listen_port"),
    "runtime_env/agent/main.py": ("runtime_env_agent_port",),
}


def port_names(program: str) -> tuple[str, ...]:
    """Names of the ports that the raylet waits for.

    Args:
        program: Path of the replaced program.

    Raises:
        ValueError: If it is not an agent of a Ray node.
    """
    for ending, names in _PORTS.items():
        if program.endswith(ending):
            return names
    raise ValueError(f"{program} is not an agent of a Ray node")


def options_of(arguments: Sequence[str]) -> dict[str, str]:
    """Options written as `--name=value`, by name."""
    pairs = (argument[2:].partition("=") for argument in arguments if argument.startswith("--"))
    return {name: value for name, equals, value in pairs if equals}


def report_ports(program: str, options: Mapping[str, str]) -> None:
    """Write that the agent has no ports.

    Args:
        program: Path of the replaced program.
        options: Options that Ray passes to it.
    """
    for name in port_names(program):
        path = f"{options['session-dir']}/{name}_{options['node-id']}"
        # The raylet reads the file as soon as it exists.
        with open(f"{path}.partial", "w", encoding="ascii") as file:  # noqa: PTH123 - pathlib would double it all
            file.write(_NO_PORT)
        os.replace(f"{path}.partial", path)  # noqa: PTH105


def main() -> None:
    """`idle_agent.py PROGRAM --name=value…`: write the ports, then wait for the raylet's end."""
    report_ports(sys.argv[1], options_of(sys.argv[2:]))
    # The raylet holds the other end of this pipe.
    while os.read(sys.stdin.fileno(), 1):
        pass


if __name__ == "__main__":
    main()
