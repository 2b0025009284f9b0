"""Does harm to a mesh on a lab, and takes back what can be taken back."""

from __future__ import annotations

import os
import signal
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import structlog

from mesh.bench.chaos.harm import victim
from mesh.bench.chaos.listener import listener
from mesh.lab.memory_watch import role_of
from spanmesh_proto.errors import MeshError

if TYPE_CHECKING:
    from mesh.bench.chaos.harm import Harm
    from mesh.bench.chaos.look import Look
    from mesh.lab.network import Lab
    from mesh.lab.systems import MeshSystem

log = structlog.get_logger()


@dataclass(frozen=True)
class Done:
    """A harm that was done.

    Attributes:
        harm: Which.
        at_s: When, of `time.perf_counter`.
        host: Number of the lab host that it hit.
        pid: Of the process that it hit, out here; None if it hit the whole host.
    """

    harm: Harm
    at_s: float
    host: int
    pid: int | None = None


class Harming:
    """Kills by process id only, and only what runs in the lab.

    Args:
        lab: Its host 0 is the head; hosts are called `host0`, `host1`…
        mesh: On it.
    """

    def __init__(self, lab: Lab, mesh: MeshSystem) -> None:
        self._lab = lab
        self._mesh = mesh

    def do(self, harm: Harm, look: Look) -> Done:
        """Do it now.

        Args:
            harm: What.
            look: At the mesh a moment ago, with all its stages.

        Raises:
            MeshError: If there is nobody to hit.
        """
        if not look.stage_hosts:
            raise MeshError(f"nothing to harm: {look.status and look.status['phase']}")
        index = victim(harm.kind, harm.pick, len(look.stage_hosts))
        host = self._number(look.stage_hosts[index])
        match harm.kind:
            case "cut-off":
                at_s = time.perf_counter()
                self._lab.lose_packets(host)
                return Done(harm, at_s, host)
            case "leave":
                return self.leave(host, harm)
            case "raylet":
                pid, number = self._raylet(host), signal.SIGKILL
            case "stop":
                pid, number = self.stage_process(look, index), signal.SIGSTOP
            case _:
                pid, number = self.stage_process(look, index), signal.SIGKILL
        at_s = time.perf_counter()
        os.kill(pid, number)
        return Done(harm, at_s, host, pid)

    def leave(self, host: int, harm: Harm) -> Done:
        """Tell a host's `mesh join` to go."""
        pid = self._mesh.process(host).pid
        at_s = time.perf_counter()
        os.kill(pid, signal.SIGTERM)
        return Done(harm, at_s, host, pid)

    def take_back(self, done: Done) -> None:
        """Let a host that was cut off be reached again, a process that was stopped go on."""
        if done.harm.kind == "cut-off":
            self._lab.deliver_packets(done.host)
        # It may have been ended in the meantime.
        elif done.harm.kind == "stop" and done.pid is not None and done.pid in self._lab.pids(done.host):
            with suppress(ProcessLookupError):
                os.kill(done.pid, signal.SIGCONT)

    def start_who_left(self) -> list[int]:
        """Have each host whose `mesh join` has ended join again; returns their numbers."""
        ended = [
            host for host in range(1, self._lab.num_hosts) if self._mesh.process(host).poll() is not None
        ]
        for host in ended:
            log.info("joins_again", host=host, exit_code=self._mesh.process(host).returncode)
            self._mesh.start_join(host)
        return ended

    def stage_process(self, look: Look, index: int) -> int:
        """The process of a stage of the ring; its host may have others, of copies kept warm.

        Raises:
            MeshError: If nobody listens where the stage should.
        """
        stage = (look.status or {})["stages"][index]
        port = int(stage["address"].rpartition(":")[2])
        pids = [pid for pid in self._lab.pids(self._number(stage["host"])) if self._role(pid) == "stage"]
        pid = listener(pids, port)
        if pid is None:
            raise MeshError(f"none of {len(pids)} stage processes on {stage['host']} listens on port {port}")
        return pid

    def left_over(self) -> list[str]:
        """Processes of the mesh that are on the lab's hosts."""
        roles = [
            (host, pid, self._role(pid))
            for host in range(self._lab.num_hosts)
            for pid in self._lab.pids(host)
        ]
        return [f"{role} {pid} on host{host}" for host, pid, role in roles if role != "other"]

    def _raylet(self, host: int) -> int:
        for pid in self._lab.pids(host):
            with suppress(OSError):
                if Path(f"/proc/{pid}/comm").read_text(encoding="utf-8").strip() == "raylet":
                    return pid
        raise MeshError(f"host{host} has no raylet")

    def _role(self, pid: int) -> str:
        try:
            argv = Path(f"/proc/{pid}/cmdline").read_bytes().rstrip(b"\0").split(b"\0")
        except OSError:
            return "other"
        return role_of([word.decode(errors="replace") for word in argv])

    @staticmethod
    def _number(name: str) -> int:
        return int(name.removeprefix("host"))
