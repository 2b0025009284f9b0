"""Child process, on a lab host or here, that exchanges JSON objects over its pipes, one a line."""

from __future__ import annotations

import json
import subprocess
import sys
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Self

from mesh.util.child_environment import inherited_environment, module_command
from spanmesh_proto.errors import MeshError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from types import TracebackType

    from meshbench.lab.network import Lab


class LineProcess:
    """A Python module, run as a program on a lab host or on this machine; a context manager.

    Args:
        lab: The lab; None runs it on this machine, outside of any lab.
        host: Index of the lab's host.
        module: Dotted name of the module.
        arguments: Of its command line.
        command: Makes the command line of the module; another one for a module that is not installed.
    """

    def __init__(
        self,
        lab: Lab | None,
        host: int,
        module: str,
        *arguments: str,
        command: Callable[..., list[str]] = module_command,
    ) -> None:
        self._lab = lab
        self._host = host
        self._module = module
        self._argv = command(module, *arguments)
        self._process: subprocess.Popen[bytes]

    def __enter__(self) -> Self:
        """Start the process."""
        if self._lab is None:
            # A session of its own, as on a lab host: Ctrl-C is for the run, which ends it.
            self._process = subprocess.Popen(
                self._argv,
                env=inherited_environment(),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                start_new_session=True,
            )
        else:
            self._process = self._lab.run(
                self._host, self._argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE
            )
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Kill it; its connections break."""
        self._process.kill()
        self._process.wait()
        if self._lab is None:
            # A lab's host closes those of its processes.
            for stream in (self._process.stdin, self._process.stdout):
                # What it has not read is lost with it.
                with suppress(BrokenPipeError):
                    if stream is not None:
                        stream.close()

    @property
    def pid(self) -> int:
        """Process id in the outer namespace."""
        return self._process.pid

    def send(self, fields: Mapping[str, Any]) -> None:
        """Write one object.

        Raises:
            MeshError: If the process has ended.
        """
        stdin = self._process.stdin
        assert stdin is not None  # noqa: S101 - a pipe, see above
        try:
            stdin.write(json.dumps(fields).encode() + b"\n")
            stdin.flush()
        except BrokenPipeError:
            raise self.ended() from None

    def received(self) -> Iterator[dict[str, Any]]:
        """Objects that it writes, to the end of its output."""
        stdout = self._process.stdout
        assert stdout is not None  # noqa: S101 - a pipe, see above
        for line in stdout:
            if not line.endswith(b"\n"):  # its end came in the middle of a line
                return
            yield json.loads(line)

    def ended(self) -> MeshError:
        """The error of a process that has ended; waits for its end."""
        return MeshError(f"the process {self._module} exited with code {self._process.wait()}")


def write_line(fields: Mapping[str, Any]) -> None:
    """Write one object to standard output."""
    sys.stdout.write(json.dumps(fields) + "\n")
    sys.stdout.flush()
