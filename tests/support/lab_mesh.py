"""A mesh on hosts of a lab, and what tests look at and break there."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import psutil

from mesh.status import as_json
from meshbench.lab.memory_watch import role_of
from meshbench.lab.systems import COMMAND, MeshSystem, get_status, last_lines
from tests.support.chat_prompts import CHAT_PROMPTS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

    from mesh.status import MeshStatus
    from meshbench.lab.network import Lab

PATIENCE_S = 200.0


@dataclass
class Running:
    """A mesh in the lab."""

    lab: Lab
    """Its hosts; the mesh may leave the last ones alone."""
    system: MeshSystem
    """The processes of the mesh."""
    num_hosts: int
    """That take part in it."""
    state: Path
    """The head's state file."""

    def status(self) -> MeshStatus:
        return get_status(self.lab, self.system.port)

    def until(self, is_so: Callable[[MeshStatus], bool], what: str) -> MeshStatus:
        deadline_s = time.monotonic() + PATIENCE_S
        while not is_so(status := self.status()):
            assert time.monotonic() < deadline_s, f"{what}: {json.dumps(as_json(status), indent=1)}"
            time.sleep(0.5)
        return status

    def stage_hosts(self) -> list[int]:
        return [int(stage.host.removeprefix("host")) for stage in self.status().stages]

    def until_replicas_are_loaded(self) -> None:
        def is_warm(status: MeshStatus) -> bool:
            ready = [host for host in status.hosts if host.ready]
            copies = {layers for host in ready for layers in host.copies}
            is_whole = bool(status.ready) and len(ready) == self.num_hosts - 1
            return is_whole and len(copies) == len(status.stages)

        self.until(is_warm, "no warm spare")

    def stage_processes(self) -> list[int]:
        """Of stages and copies, on all hosts."""
        return [pid for host in range(self.num_hosts) for pid in self.stage_processes_of(host)]

    def stage_processes_of(self, host: int) -> list[int]:
        return [
            pid for pid in sorted(self.lab.pids(host)) if role_of(psutil.Process(pid).cmdline()) == "stage"
        ]

    def kill_stage(self, host: int) -> None:
        """End the processes of a host's stage and copies, not its Ray node."""
        for pid in self.stage_processes_of(host):
            psutil.Process(pid).kill()

    def until_repaired(self, num_repairs: int) -> MeshStatus:
        return self.until(
            lambda status: bool(status.ready) and status.repairs.count == num_repairs, "not repaired"
        )

    def order(self, *arguments: str) -> None:
        done = self.lab.exec(0, [COMMAND, *arguments], timeout_s=PATIENCE_S)
        assert done.returncode == 0, done.stderr

    @contextmanager
    def streams(self, wanted: list[dict[str, Any]], *, max_tokens: int = 160) -> Iterator[None]:
        """While in the block four questions are answered; afterwards the answers must be those wanted."""
        client = self.ask(max_tokens=max_tokens)
        self.until(
            lambda status: status.sessions is not None and status.sessions.running == 4,
            "the client does not ask",
        )
        # Some of the way, so that there is something to replay.
        time.sleep(0.5)
        yield
        assert self.answers(client) == wanted

    def ask(
        self, prompts: Sequence[str] = CHAT_PROMPTS[:4], max_tokens: int = 160, **fields: object
    ) -> subprocess.Popen[bytes]:
        """Start a client that asks four questions at once; `answers` waits for it."""
        job = {
            "base_url": f"http://127.0.0.1:{self.system.port}/v1",
            "prompts": list(prompts),
            "max_tokens": max_tokens,
            "concurrency": 4,
            "fields": fields,
        }
        client = self.lab.run(
            0,
            [sys.executable, "-m", "tests.support.chat_client"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        assert client.stdin is not None
        client.stdin.write(json.dumps(job).encode())
        client.stdin.close()
        client.stdin = None
        return client

    def answers(self, client: subprocess.Popen[bytes]) -> list[dict[str, Any]]:
        output, errors = client.communicate(timeout=PATIENCE_S)
        assert client.returncode == 0, errors.decode()
        found: list[dict[str, Any]] = json.loads(output)
        return found


@contextmanager
def running_mesh(
    lab: Lab,
    model: Path,
    logs: Path,
    *,
    num_hosts: int,
    options: Sequence[str],
    join_options: Sequence[str] = (),
    addresses: Sequence[str] | None = None,
) -> Iterator[Running]:
    """A mesh of the first hosts of a lab, with what it wrote printed if the block fails."""
    state = logs / "state.json"
    system = MeshSystem(
        lab,
        model,
        logs,
        num_hosts=num_hosts,
        options=[*options, "--state", str(state)],
        join_options=join_options,
        addresses=addresses,
    )
    try:
        system.start(timeout_s=PATIENCE_S)
        yield Running(lab, system, num_hosts, state)
    except BaseException:
        for host in range(num_hosts):
            if system.log(host).exists():
                print(f"--- host{host}\n{last_lines(system.log(host), 80)}")
        raise
    finally:
        for host in range(lab.num_hosts):
            lab.kill(host)
