"""The asking side of a measurement: one process on the servers' own host, kept for the whole run."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Self

from mesh.bench.stream_client import Answer, Batch
from spanmesh_proto.errors import MeshError

if TYPE_CHECKING:
    from types import TracebackType

    from mesh.lab.network import Lab


@dataclass(frozen=True)
class Reply:
    """A batch, answered.

    Attributes:
        answers: In the order asked.
        wall_ms: From the first request to the last answer's end.
    """

    answers: tuple[Answer, ...]
    wall_ms: float


class Client:
    """Asks from a lab host; a context manager.

    Args:
        lab: Where.
        host: Its number; servers are asked over this host's loopback.
    """

    def __init__(self, lab: Lab, host: int = 0) -> None:
        self._lab = lab
        self._host = host
        self._process: subprocess.Popen[bytes]

    def __enter__(self) -> Self:
        """Start the process."""
        self._process = self._lab.run(
            self._host,
            [sys.executable, "-m", "mesh.bench.stream_client"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End it: its input ends."""
        self._process.kill()
        self._process.wait()

    def ask(self, batch: Batch) -> Reply:
        """Have a batch answered.

        Raises:
            MeshError: If a server refuses or breaks off.
        """
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None  # noqa: S101 - both are pipes, see above
        assert stdout is not None  # noqa: S101
        stdin.write(json.dumps(asdict(batch)).encode() + b"\n")
        stdin.flush()
        line = stdout.readline()
        if not line:
            raise MeshError(f"the measuring client ended with code {self._process.wait()}")
        reply = json.loads(line)
        if "error" in reply:
            raise MeshError(reply["error"])
        return Reply(tuple(map(_answer, reply["answers"])), reply["wall_ms"])


def _answer(fields: dict[str, Any]) -> Answer:
    """JSON knows no tuples."""
    sequences = {name: tuple(fields[name]) for name in ("arrivals_ms", "token_ids")}
    return Answer(**{**fields, **sequences})
