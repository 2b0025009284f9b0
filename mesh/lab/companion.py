"""A process of ours at the other end of a socket: it lives until we let go of the socket."""

from __future__ import annotations

import socket
import subprocess
from typing import TYPE_CHECKING

from spanmesh_proto.errors import MeshError

if TYPE_CHECKING:
    from collections.abc import Sequence


class Companion:
    """A child that reads lines from standard input, answers by lines, and ends at end of file.

    Because the kernel closes our end of the socket when we die, however we die, the child never outlives us.

    Args:
        argv: Program and arguments.
        name: What a failure is reported as.
    """

    def __init__(self, argv: Sequence[str], name: str) -> None:
        self._name = name
        ours, theirs = socket.socketpair()
        with theirs:
            # A session of its own: Ctrl-C on the terminal is for us to handle, in our order.
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
        """Send one line."""
        self._socket.sendall(line.encode() + b"\n")

    def ask(self, line: str) -> str:
        """Send one line and wait for the answer to it; raises MeshError like `answer`."""
        self.tell(line)
        return self.answer()

    def let_go(self) -> None:
        """Have the child end; `wait` sees to it that it did."""
        self._answers.close()
        self._socket.close()

    def wait(self) -> None:
        """Return once the child ended."""
        self._process.wait()
