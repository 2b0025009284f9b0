"""Installation of the agents by npm, in a folder and in fixed versions."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING, Final

from spanmesh_proto.errors import MeshError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from tests.qualification.coding_agents.agents import AgentProgram

# One a line: the package, `@` and its version.
VERSIONS: Final = Path(__file__).with_name("npm_versions.txt")
_TOOLS: Final = ("node", "npm")
_LAST_LINES: Final = 10


def pinned_versions() -> dict[str, str]:
    """Version of each package."""
    found = {}
    for line in VERSIONS.read_text(encoding="utf-8").split():
        package, _, version = line.rpartition("@")
        found[package] = version
    return found


def require_tools() -> None:
    """Check that Node.js and npm are there.

    Raises:
        MeshError: Naming what is missing.
    """
    missing = [tool for tool in _TOOLS if shutil.which(tool) is None]
    if missing:
        raise MeshError(f"coding agents need {' and '.join(missing)}; on Debian: apt-get install nodejs npm")


def install(folder: Path) -> None:
    """Install all agents from npm's registry, as npm is configured.

    Args:
        folder: Made if it is not there.

    Raises:
        MeshError: If a tool is missing, or npm fails; with the end of its output.
    """
    require_tools()
    folder.mkdir(parents=True, exist_ok=True)
    wanted = [f"{package}@{version}" for package, version in pinned_versions().items()]
    options = ["--prefix", str(folder), "--no-audit", "--no-fund", "--no-update-notifier"]
    done = subprocess.run(
        ["npm", "install", *options, *wanted],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    if done.returncode != 0:
        words = "\n".join(done.stdout.splitlines()[-_LAST_LINES:])
        raise MeshError(f"npm cannot install {', '.join(wanted)}:\n{words}")


def programs_folder(folder: Path) -> Path:
    """Where npm puts the programs of what it installs in a folder."""
    return folder / "node_modules" / ".bin"


def require_installed(folder: Path, programs: Iterable[AgentProgram]) -> None:
    """Check that agents are installed in a folder.

    Raises:
        MeshError: Naming those that are missing.
    """
    there = programs_folder(folder)
    missing = [program.title for program in programs if not (there / program.name).exists()]
    if missing:
        raise MeshError(f"{', '.join(missing)} not found in {there}: install them there with --install")


def installed_version(folder: Path, package: str) -> str:
    """Version of a package in a folder; empty if it is not there."""
    path = folder / "node_modules" / package / "package.json"
    if not path.exists():
        return ""
    return str(json.loads(path.read_text(encoding="utf-8")).get("version", ""))
