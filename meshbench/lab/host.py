"""Emulated host of the lab: its namespaces and processes."""

from __future__ import annotations

import ctypes
import os
import socket
import subprocess
import sys
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, TYPE_CHECKING, Final

from meshbench.lab import namespace_init
from spanmesh_proto.errors import MeshError

if TYPE_CHECKING:
    import signal
    from collections.abc import Iterator, Mapping, Sequence

_UNSHARE: Final = ("unshare", "--net", "--mount", "--pid", "--uts", "--ipc", "--fork", "--kill-child")
_CLONE_NEWPID: Final = 0x20000000
_libc = ctypes.CDLL(None, use_errno=True)


class Companion:
    """Child process that answers lines of standard input by lines, and ends at end of file.

    The kernel closes our end of the socket when this process ends in any way, so the child never outlives it.

    Args:
        argv: Program and arguments.
        name: Name for errors.
    """

    def __init__(self, argv: Sequence[str], name: str) -> None:
        self._name = name
        ours, theirs = socket.socketpair()
        with theirs:
            # A session of its own: Ctrl-C on the terminal is handled by this process.
            self._process = subprocess.Popen(
                argv, stdin=theirs.fileno(), stdout=theirs.fileno(), start_new_session=True
            )
        self._socket = ours
        self._answers = ours.makefile("r", encoding="utf-8")

    def answer(self) -> str:
        """Wait for the child's next line.

        Raises:
            MeshError: If the child ended instead.
        """
        line = self._answers.readline()
        if not line:
            raise MeshError(f"{self._name} ended with code {self._process.wait()}")
        return line.rstrip("\n")

    def tell(self, line: str) -> None:
        """Send a line."""
        self._socket.sendall(line.encode() + b"\n")

    def ask(self, line: str) -> str:
        """Send a line and wait for its answer; raises MeshError like `answer`."""
        self.tell(line)
        return self.answer()

    def let_go(self) -> None:
        """Close the child's input; `wait` waits for its end."""
        self._answers.close()
        self._socket.close()

    def wait(self) -> None:
        """Return once the child ended."""
        self._process.wait()


class Host:
    """A network, process table, host name, /dev/shm, /tmp and home of its own.

    The rest of the file system is the machine's. A process started here ends at the latest with `close`, or
    with this process.

    Args:
        name: Host name for its processes.
        shared: Directories under /tmp that are the machine's here as well, like the working directory and the
            Python installation.
        processors: Ids of the processors that its processes may use; None for all.

    Raises:
        MeshError: If the system refuses the namespaces, or the working directory is /tmp itself.
    """

    def __init__(
        self, name: str, shared: Sequence[Path] = (), processors: Sequence[int] | None = None
    ) -> None:
        self.name = name
        self._pin = [] if processors is None else ["taskset", "--cpu-list", ",".join(map(str, processors))]
        self._processes: list[subprocess.Popen[bytes]] = []
        program = [sys.executable, "-I", "-S", str(Path(namespace_init.__file__))]
        under_tmp = [str(path) for path in _needed(shared) if path.is_relative_to(namespace_init.TMP)]
        if str(namespace_init.TMP) in under_tmp:
            raise MeshError(
                f"hosts of the lab have a {namespace_init.TMP} of their own and cannot work in the machine's:"
                " start this from another directory"
            )
        self._keeper = Companion([*_UNSHARE, *program, *under_tmp], f"keeper of the lab's {name}")
        try:
            self.keeper_pid = int(self._keeper.answer())
            self.configure(["hostname", name])
        except BaseException:
            self.close()
            raise

    def configure(self, argv: Sequence[str], stdin: str = "") -> None:
        """Run a system tool in this host's network and host-name namespaces.

        Raises:
            MeshError: If the tool fails, with its output.
        """
        done = subprocess.run(
            ["nsenter", "--target", str(self.keeper_pid), "--net", "--uts", *argv],
            input=stdin,
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode != 0:
            raise MeshError(f"the lab's {self.name}: {' '.join(argv)}: {done.stderr.strip()}")

    def run(
        self,
        argv: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        cwd: Path | None = None,
        stdin: int | IO[bytes] | None = subprocess.DEVNULL,
        stdout: int | IO[bytes] | None = None,
        stderr: int | IO[bytes] | None = None,
    ) -> subprocess.Popen[bytes]:
        """Start a process on the host, in a session of its own: `os.killpg(process.pid, …)` acts like Ctrl-C.

        Args:
            argv: Program and arguments.
            env: Variables besides the inherited ones; HOME is the host's own; TMPDIR and XDG paths are unset.
            cwd: Working directory, by default this process's.
            stdin: As for `subprocess.Popen`, and so are the next two.
            stdout: See above.
            stderr: See above.
        """
        inherited = {
            key: value for key, value in os.environ.items() if not key.startswith(("XDG_", "TMPDIR"))
        }
        enter = ["nsenter", "--target", str(self.keeper_pid), "--net", "--mount", "--uts", "--ipc"]
        with _children_in_process_namespace_of(self.keeper_pid):
            process = subprocess.Popen(
                [*enter, *self._pin, "env", f"--chdir={cwd or Path.cwd()}", *argv],
                env={**inherited, "HOME": str(namespace_init.HOME), **(env or {})},
                stdin=stdin,
                stdout=stdout,
                stderr=stderr,
                start_new_session=True,
            )
        self._processes.append(process)
        return process

    def pids(self) -> list[int]:
        """Process ids, in the outer namespace, of the host's processes except its init."""
        here = _process_namespace(self.keeper_pid)
        all_pids = (int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit())
        return [pid for pid in all_pids if pid != self.keeper_pid and _process_namespace(pid) == here]

    def signal_all(self, number: signal.Signals) -> None:
        """Send a signal to every process of this host at once, so that none can escape by forking."""
        # kill -1 spares the shell that sends it; the shell is born in this namespace, so -1 means this host
        # only.
        self.run(["sh", "-c", f"kill -{int(number)} -1"], stderr=subprocess.DEVNULL).wait()

    def close(self) -> None:
        """End every process of the host and release the namespaces."""
        self._keeper.let_go()
        # The kernel keeps a process namespace, and its first process, until all its processes are reaped:
        # those started from here are reaped here.
        for process in self._processes:
            process.wait()
            for stream in (process.stdin, process.stdout, process.stderr):
                if stream is not None:
                    stream.close()
        self._processes.clear()
        self._keeper.wait()


def _needed(shared: Sequence[Path]) -> list[Path]:
    package_root = Path(__file__).parents[2]
    return [Path.cwd(), package_root, Path(sys.prefix), Path(sys.base_prefix), *shared]


def _process_namespace(pid: int) -> Path | None:
    """Name of the namespace; None once the process is gone or a zombie."""
    with suppress(OSError):
        return Path(f"/proc/{pid}/ns/pid").readlink()
    return None


@contextmanager
def _children_in_process_namespace_of(pid: int) -> Iterator[None]:
    """Let processes that this thread starts be born in the namespace of another process.

    `nsenter --pid` would do it with an intermediate process that forwards no signals.
    """
    with Path("/proc/self/ns/pid").open("rb") as ours, Path(f"/proc/{pid}/ns/pid").open("rb") as theirs:
        _set_process_namespace(theirs)
        try:
            yield
        finally:
            _set_process_namespace(ours)


def _set_process_namespace(namespace: IO[bytes]) -> None:
    if _libc.setns(namespace.fileno(), _CLONE_NEWPID) != 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
