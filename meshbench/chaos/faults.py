"""Faults: their schedule and injection."""

from __future__ import annotations

import os
import signal
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Final

import structlog

from meshbench.chaos.fault_kinds import FaultKind
from meshbench.lab.memory_watch import role_of
from spanmesh_proto.errors import MeshError

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from meshbench.lab.network import Lab
    from meshbench.lab.systems import MeshSystem
    from meshbench.load_client.client import MeshSnapshot

# Long enough for streams to flow again, short enough for a hundred; and the same in a hurry.
_WAIT_S: Final = (0.5, 4.0)
_SHORT_WAIT_S: Final = (0.3, 1.0)
# Beyond the time after which a silent stage is given up.
_HOLD_S: Final = (3.0, 8.0)
_SHORT_HOLD_S: Final = (2.5, 3.5)
_LISTENS = "0A"

log = structlog.get_logger()


@dataclass(frozen=True)
class Fault:
    """A fault to inject."""

    number: int
    """From 0."""
    kind: FaultKind
    """What is done."""
    wait_s: float
    """How long all is well before it, in seconds."""
    hold_s: float
    """Time for which a host stays cut off, or a process stopped."""
    pick: float
    """In [0, 1): which one of several that it may hit."""


@dataclass(frozen=True)
class InjectedFault:
    """A fault that was done."""

    fault: Fault
    """Which."""
    at_s: float
    """When, of `time.perf_counter`."""
    host: int
    """Number of the lab host that it hit."""
    pid: int | None = None
    """Of the process that it hit, out here; None if it hit the whole host."""


class FaultInjector:
    """Kills by process id only, and only what runs in the lab.

    Args:
        lab: Its host 0 is the head; hosts are called `host0`, `host1`…
        mesh: On it.
    """

    def __init__(self, lab: Lab, mesh: MeshSystem) -> None:
        self._lab = lab
        self._mesh = mesh

    def inject(self, fault: Fault, snapshot: MeshSnapshot) -> InjectedFault:
        """Do it now.

        Args:
            fault: What.
            snapshot: State of the mesh a moment ago, with all its stages.

        Raises:
            MeshError: If there is no target.
        """
        if not snapshot.stage_hosts:
            raise MeshError(f"no target for a fault: {snapshot.status and snapshot.status.phase}")
        index = victim(fault.kind, fault.pick, len(snapshot.stage_hosts))
        host = self._number(snapshot.stage_hosts[index])
        match fault.kind:
            case FaultKind.CUT_OFF:
                at_s = time.perf_counter()
                self._lab.lose_packets(host)
                return InjectedFault(fault, at_s, host)
            case FaultKind.LEAVE:
                return self.leave(host, fault)
            case FaultKind.RAYLET:
                pid, number = self._raylet(host), signal.SIGKILL
            case FaultKind.STOP:
                pid, number = self.stage_process(snapshot, index), signal.SIGSTOP
            case _:
                pid, number = self.stage_process(snapshot, index), signal.SIGKILL
        at_s = time.perf_counter()
        os.kill(pid, number)
        return InjectedFault(fault, at_s, host, pid)

    def leave(self, host: int, fault: Fault) -> InjectedFault:
        """Ask a host's `mesh join` to leave."""
        pid = self._mesh.process(host).pid
        at_s = time.perf_counter()
        os.kill(pid, signal.SIGTERM)
        return InjectedFault(fault, at_s, host, pid)

    def revert(self, injected: InjectedFault) -> None:
        """Reconnect a host that was cut off, or continue a stopped process."""
        if injected.fault.kind is FaultKind.CUT_OFF:
            self._lab.deliver_packets(injected.host)
        # It may have been ended in the meantime.
        elif (
            injected.fault.kind is FaultKind.STOP
            and injected.pid is not None
            and injected.pid in self._lab.pids(injected.host)
        ):
            with suppress(ProcessLookupError):
                os.kill(injected.pid, signal.SIGCONT)

    def restart_hosts(self) -> list[int]:
        """Start `mesh join` again on each host where it has ended; returns their numbers."""
        ended = [
            host for host in range(1, self._lab.num_hosts) if self._mesh.process(host).poll() is not None
        ]
        for host in ended:
            log.info("joins_again", host=host, exit_code=self._mesh.process(host).returncode)
            self._mesh.start_join(host)
        return ended

    def stage_process(self, snapshot: MeshSnapshot, index: int) -> int:
        """Process of a stage of the ring; its host may have others, of replicas.

        Raises:
            MeshError: If no process listens at the stage's address.
        """
        if snapshot.status is None:
            raise MeshError("the head does not answer")
        stage = snapshot.status.stages[index]
        port = int(stage.address.rpartition(":")[2])
        pids = [pid for pid in self._lab.pids(self._number(stage.host)) if self._role(pid) == "stage"]
        pid = listener(pids, port)
        if pid is None:
            raise MeshError(f"none of {len(pids)} stage processes on {stage.host} listens on port {port}")
        return pid

    def leftover_pids(self) -> list[str]:
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


def draw_faults(
    count: int, kinds: Sequence[FaultKind], seed: int, *, is_short: bool = False
) -> tuple[Fault, ...]:
    """Every kind as often as the others, within one, in random order, at random moments.

    Args:
        count: How many.
        kinds: Among which, at least one.
        seed: Seed of the faults.
        is_short: Whether they follow and pass quickly.
    """
    waits_s = _SHORT_WAIT_S if is_short else _WAIT_S
    holds_s = _SHORT_HOLD_S if is_short else _HOLD_S
    random = Random(seed)  # noqa: S311 - an experiment, not a secret
    deck: list[FaultKind] = []
    faults = []
    for number in range(count):
        if not deck:
            deck = random.sample(list(kinds), len(kinds))
        faults.append(
            Fault(number, deck.pop(), random.uniform(*waits_s), random.uniform(*holds_s), random.random())
        )
    return tuple(faults)


def victim(kind: FaultKind, pick: float, num_stages: int) -> int:
    """Index of the stage that is hit, or whose host is.

    Args:
        kind: Of fault.
        pick: In [0, 1).
        num_stages: At least one.
    """
    if kind is FaultKind.FIRST:
        return 0
    if kind is FaultKind.TAIL:
        return num_stages - 1
    if kind is FaultKind.MIDDLE and num_stages > 2:
        return 1 + int(pick * (num_stages - 2))
    # A ring of two has no middle; then either is hit.
    return int(pick * num_stages)


def listener(pids: Iterable[int], port: int) -> int | None:
    """The process that listens on a TCP port of its network, among these; None if none does."""
    for pid in pids:
        with suppress(OSError):
            if _inodes_listening(pid, port) & _sockets(pid):
                return pid
    return None


def _inodes_listening(pid: int, port: int) -> set[str]:
    """Sockets that listen there, in this process's network; see proc(5), /proc/net/tcp."""
    found = set()
    for table in ("tcp", "tcp6"):
        for row in Path(f"/proc/{pid}/net/{table}").read_text(encoding="ascii").splitlines()[1:]:
            cells = row.split()
            if cells[1].endswith(f":{port:04X}") and cells[3] == _LISTENS:
                found.add(cells[9])
    return found


def _sockets(pid: int) -> set[str]:
    found = set()
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(OSError):
            target = str(entry.readlink())
            if target.startswith("socket:["):
                found.add(target.removeprefix("socket:[").removesuffix("]"))
    return found
