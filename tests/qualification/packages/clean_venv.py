"""Installation of a folder of wheels in a clean environment, and the demo there.

No compiler and no package index is within reach: each program of this machine is, except those that compile.
Prints what each step took, and the demo's answer.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

from mesh.cluster.addresses import LOOPBACK, free_port
from mesh.util.child_environment import module_command
from mesh.util.completion_stream import CHAT_PATH, stream_completion
from spanmesh_proto.errors import ClusterError, MeshError
from tests.qualification.packages.wheels_folder import DEMO, PROJECT, Wheel

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

# With prefixes of a target and suffixes of a version, such as x86_64-linux-gnu-gcc-12.
_COMPILER: Final = re.compile(
    r"(.*-)?(cc|c\+\+|c89|c99|cpp|gcc|g\+\+|clang|clang\+\+|tcc|nvcc|rustc|cargo|ld|ld\.\w+|as|make|gmake|cmake|ninja)"
    r"(-[\d.]+)?"
)
_COMPILERS: Final = ("cc", "c++", "gcc", "g++", "clang", "clang++", "cmake", "ninja", "make")
# Variables that would lead to what is installed beside the clean environment, or to a compiler.
_DROPPED: Final = frozenset({"PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV", "CC", "CXX", "CMAKE_ARGS"})
_DROPPED_PREFIXES: Final = ("MESH_", "SPANMESH_", "XDG_", "PIP_")
_SERVED: Final = "Ctrl-C stops it"
_QUESTION: Final = "Who are you?"
_NUM_TOKENS: Final = 32
_PATIENCE_S: Final = 300.0
_POLL_S: Final = 0.2


class CleanVenv:
    """A virtual environment in a folder of its own.

    Args:
        folder: An empty folder.
        wheels: Folder of `make wheels`.
    """

    def __init__(self, folder: Path, wheels: Path) -> None:
        self._folder = folder
        self._wheels = wheels
        self._bin = folder / "venv" / "bin"
        tools = folder / "tools"
        tools.mkdir()
        link_tools(tools, os.environ.get("PATH", os.defpath))
        self._environment = clean_environment(folder, tools, os.environ)

    def make(self) -> None:
        """Make the environment, with Python's own pip alone."""
        self._do(module_command("venv", str(self._folder / "venv")))

    def install(self, wheel: Wheel, *options: str) -> None:
        """Install a wheel and what it needs from the folder, and from nowhere else; nothing is built.

        Raises:
            ClusterError: If pip fails, as where the folder lacks a wheel.
        """
        pip = [
            str(self._bin / "python"),
            "-P",
            "-m",
            "pip",
            "install",
            "--no-index",
            "--only-binary",
            ":all:",
        ]
        self._do([*pip, "--find-links", str(self._wheels), *options, str(wheel.path)])

    def checks(self) -> list[dict[str, Any]]:
        """Checks of `mesh doctor` there.

        Raises:
            ClusterError: If one of them failed.
        """
        port = str(free_port(LOOPBACK))
        found: list[dict[str, Any]] = json.loads(
            self._do([str(self._bin / "mesh"), "doctor", "--json", "--advertise", LOOPBACK, "--port", port])
        )
        return found

    @contextmanager
    def demo(self) -> Iterator[str]:
        """The demo, served for the block; yields its URL.

        Raises:
            ClusterError: If it does not come up, or does not end when it is told to.
        """
        port = free_port(LOOPBACK)
        log = self._folder / "serve.log"
        with log.open("wb") as output:
            process = subprocess.Popen(
                [str(self._bin / "mesh"), "serve", "--port", str(port), "--advertise", LOOPBACK],
                env=self._environment,
                cwd=self._folder,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
            )
        try:
            deadline_s = time.monotonic() + _PATIENCE_S
            while _SERVED not in log.read_text(errors="replace"):
                if process.poll() is not None or time.monotonic() > deadline_s:
                    raise ClusterError(f"the demo does not come up:\n{log.read_text(errors='replace')}")
                time.sleep(_POLL_S)
            yield f"http://{LOOPBACK}:{port}"
        finally:
            process.send_signal(signal.SIGINT)
            try:
                process.wait(_PATIENCE_S)
            except subprocess.TimeoutExpired:
                process.kill()
                raise ClusterError("the demo does not end after Ctrl-C") from None

    def _do(self, command: Sequence[str]) -> str:
        done = subprocess.run(
            command,
            env=self._environment,
            cwd=self._folder,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
            timeout=_PATIENCE_S,
        )
        if done.returncode != 0:
            raise ClusterError(f"{' '.join(command)} failed:\n{done.stdout}{done.stderr}")
        return done.stdout


def is_compiler(name: str) -> bool:
    """Whether a program of this name compiles, links or builds."""
    return _COMPILER.fullmatch(name) is not None


def link_tools(folder: Path, search_path: str) -> None:
    """Fill a folder with links to the programs of a search path, without compilers.

    Args:
        folder: An empty folder.
        search_path: As in PATH; the folder of this Python, which may be that of an environment, is left out.
    """
    own = Path(sys.executable).parent
    for place in map(Path, search_path.split(os.pathsep)):
        try:
            programs = sorted(place.iterdir()) if place != own else []
        except OSError:
            continue
        for program in programs:
            link = folder / program.name
            if not is_compiler(program.name) and not link.is_symlink() and os.access(program, os.X_OK):
                link.symlink_to(program.absolute())


def clean_environment(home: Path, tools: Path, variables: Mapping[str, str]) -> dict[str, str]:
    """Environment in which no compiler is found, and no package but those of its own.

    Args:
        home: Home folder.
        tools: Folder of `link_tools`.
        variables: Environment of this process.

    Raises:
        ClusterError: If a compiler is found all the same.
    """
    kept = {
        name: value
        for name, value in variables.items()
        if name not in _DROPPED and not name.startswith(_DROPPED_PREFIXES)
    }
    found = {name: path for name in _COMPILERS if (path := shutil.which(name, path=str(tools))) is not None}
    if found:
        raise ClusterError(f"compilers are within reach: {', '.join(found.values())}")
    return kept | {"PATH": str(tools), "HOME": str(home), "PIP_DISABLE_PIP_VERSION_CHECK": "1"}


def answer_of(url: str) -> str:
    """The demo's answer to a question.

    Raises:
        MeshError: If the server refuses or breaks off.
    """
    body = {
        "model": "default",
        "messages": [{"role": "user", "content": _QUESTION}],
        "temperature": 0,
        "max_tokens": _NUM_TOKENS,
    }
    return "".join(chunk.text for chunk in stream_completion(url + CHAT_PATH, body))


@click.command()
@click.argument("wheels", type=click.Path(path_type=Path, exists=True, file_okay=False))
def main(wheels: Path) -> None:
    """Install WHEELS, a folder of `make wheels`, in a clean environment, and ask the demo there."""
    by_name = {wheel.name: wheel for wheel in map(Wheel.of, sorted(wheels.resolve().glob("*.whl")))}
    absent = {PROJECT, DEMO} - by_name.keys()
    if absent:
        raise click.ClickException(f"{wheels} has no wheel of {', '.join(sorted(absent))}")
    begun_s = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="spanmesh-clean-") as name:
        try:
            venv = CleanVenv(Path(name), wheels.resolve())
            with _timed("the environment"):
                venv.make()
            with _timed("the wheels, with no index and no compiler"):
                venv.install(by_name[PROJECT])
            with _timed("the demo's model"):
                venv.install(by_name[DEMO], "--no-deps")
            with _timed("mesh doctor"):
                checks = venv.checks()
            with _timed("mesh serve, from start to end"), venv.demo() as url:
                answer = answer_of(url)
        except MeshError as error:
            raise click.ClickException(error.message) from error
    for check in checks:
        click.echo(f"{check['outcome']:4} {check['what']}: {check['detail']}")
    if not answer.strip():
        raise click.ClickException("the demo's answer is empty")
    click.echo(f"{_QUESTION}\n{answer}")
    click.echo(f"all of it: {time.monotonic() - begun_s:.0f} s")


@contextmanager
def _timed(what: str) -> Iterator[None]:
    begun_s = time.monotonic()
    yield
    click.echo(f"{what}: {time.monotonic() - begun_s:.1f} s")


if __name__ == "__main__":
    main()
