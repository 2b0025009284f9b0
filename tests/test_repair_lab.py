"""A mesh that loses hosts, in the lab: real processes, real Ray nodes, streams that must not notice.

Also a head that is killed and started again: the stages that outlived it go on; nothing is loaded or sent.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import psutil
import pytest

from mesh.bench.chaos.bounds import WARM_PAUSE_S
from mesh.bench.mesh_system import COMMAND, MeshSystem
from mesh.bench.server_process import get_json, last_lines
from mesh.bench.stress.processes import role_of
from mesh.lab import Lab
from tests.chat_prompts import CHAT_PROMPTS
from tests.lab_fixtures import require_lab

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

pytestmark = [pytest.mark.lab, pytest.mark.timeout(1200)]

NUM_HOSTS = 4  # the head, two stages, one spare
PATIENCE_S = 200.0
# From the loss of a stage until the head knows, as README says.
NOTICED_S = 2.0
OPTIONS = ["--exact", "--speculate", "ngram", "--parallel", "4", "--ctx-size", "1024", "--stages", "2"]


@dataclass
class Running:
    """A mesh in the lab."""

    lab: Lab
    system: MeshSystem
    state: Path

    def status(self) -> dict[str, Any]:
        found: dict[str, Any] = get_json(self.lab, 0, self.system.port, "/mesh/status")
        return found

    def until(self, is_so: Callable[[dict[str, Any]], bool], what: str) -> dict[str, Any]:
        deadline_s = time.monotonic() + PATIENCE_S
        while not is_so(status := self.status()):
            assert time.monotonic() < deadline_s, f"{what}: {json.dumps(status, indent=1)}"
            time.sleep(0.5)
        return status

    def stage_hosts(self) -> list[int]:
        return [int(stage["host"].removeprefix("host")) for stage in self.status()["stages"]]

    def until_spares_are_warm(self, num_hosts: int = NUM_HOSTS - 1) -> None:
        def is_warm(status: dict[str, Any]) -> bool:
            ready = [host for host in status["hosts"] if host["ready"]]
            copies = {layers for host in ready for layers in host["copies"]}
            return status["ready"] and len(ready) == num_hosts and len(copies) == len(status["stages"])

        self.until(is_warm, "no warm spare")

    def stage_processes(self) -> list[int]:
        """Of stages and copies, on all hosts."""
        return [pid for host in range(NUM_HOSTS) for pid in self.stage_processes_of(host)]

    def stage_processes_of(self, host: int) -> list[int]:
        return [
            pid for pid in sorted(self.lab.pids(host)) if role_of(psutil.Process(pid).cmdline()) == "stage"
        ]

    def kill_stage(self, host: int) -> None:
        """End the processes of a host's stage and copies, not its Ray node."""
        for pid in self.stage_processes_of(host):
            psutil.Process(pid).kill()

    def until_repaired(self, num_repairs: int) -> dict[str, Any]:
        return self.until(
            lambda status: status["ready"] and status["repairs"]["count"] == num_repairs, "not repaired"
        )

    def order(self, *arguments: str) -> None:
        done = self.lab.exec(0, [COMMAND, *arguments], timeout_s=PATIENCE_S)
        assert done.returncode == 0, done.stderr

    @contextmanager
    def streams(self, wanted: list[dict[str, Any]]) -> Iterator[None]:
        """While in the block four questions are answered; afterwards the answers must be those wanted."""
        client = self.ask()
        self.until(lambda status: status["sessions"]["running"] == 4, "the client does not ask")
        # Some of the way, so that there is something to replay.
        time.sleep(0.5)
        yield
        assert self.answers(client) == wanted

    def ask(self) -> subprocess.Popen[bytes]:
        job = {
            "base_url": f"http://127.0.0.1:{self.system.port}/v1",
            "prompts": CHAT_PROMPTS[:4],
            "max_tokens": 160,
            "concurrency": 4,
        }
        client = self.lab.run(
            0,
            [sys.executable, "-m", "tests.chat_client"],
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


@pytest.fixture(scope="module")
def mesh(smollm2_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    require_lab()
    logs = tmp_path_factory.mktemp("logs")
    with Lab(NUM_HOSTS, 2.0, shared=[tmp_path_factory.getbasetemp()]) as lab:
        state = tmp_path_factory.mktemp("state") / "state.json"
        system = MeshSystem(lab, smollm2_path, logs, options=[*OPTIONS, "--state", str(state)])
        try:
            system.start(timeout_s=PATIENCE_S)
            yield Running(lab, system, state)
        except BaseException:
            for host in range(NUM_HOSTS):
                print(f"--- host{host}\n{last_lines(system.log(host), 80)}")
            raise
        finally:
            for host in range(NUM_HOSTS):
                lab.kill(host)


@pytest.fixture(scope="module")
def undisturbed(mesh: Running) -> list[dict[str, Any]]:
    """What four questions are answered while nothing happens."""
    answers = mesh.answers(mesh.ask())
    assert len({answer["text"] for answer in answers}) == 4
    return answers


def test_a_head_that_was_killed_takes_its_stages_over(
    mesh: Running, undisturbed: list[dict[str, Any]]
) -> None:
    mesh.until_spares_are_warm()
    stages = mesh.stage_processes()
    log = mesh.system.log(0)
    before = log.read_text()
    mesh.until(
        lambda status: len(json.loads(mesh.state.read_text())["copies"]) == len(status["stages"]),
        "copies are not written down",
    )

    mesh.system.process(0).send_signal(signal.SIGKILL)
    mesh.system.process(0).wait()
    mesh.system.start_head()
    mesh.system.wait_healthy(timeout_s=PATIENCE_S)

    assert mesh.answers(mesh.ask()) == undisturbed
    assert mesh.stage_processes() == stages, last_lines(log, 60)
    since = log.read_text().removeprefix(before)
    assert "stages_taken_over" in since, last_lines(log, 40)
    assert '"stage_loaded"' not in since
    assert '"stage_sent"' not in since


def test_a_killed_stage_is_noticed_at_once_and_its_copy_takes_over(
    mesh: Running, undisturbed: list[dict[str, Any]]
) -> None:
    mesh.until_spares_are_warm()
    num_repairs = mesh.status()["repairs"]["count"]
    victim = mesh.stage_hosts()[0]
    with mesh.streams(undisturbed):
        killed_s = time.time()
        mesh.kill_stage(victim)
    status = mesh.until_repaired(num_repairs + 1)
    failure = status["failures"][-1]
    assert failure["host"] == f"host{victim}"
    assert 0.0 < failure["at_s"] - killed_s <= NOTICED_S
    assert status["repairs"]["last_s"] <= WARM_PAUSE_S


def test_a_silent_stage_is_noticed_within_two_seconds(
    mesh: Running, undisturbed: list[dict[str, Any]]
) -> None:
    mesh.until_spares_are_warm()
    num_repairs = mesh.status()["repairs"]["count"]
    victim = mesh.stage_hosts()[-1]
    with mesh.streams(undisturbed):
        silent_s = time.time()
        mesh.lab.lose_packets(victim)
        status = mesh.until_repaired(num_repairs + 1)
        mesh.lab.deliver_packets(victim)
    failure = status["failures"][-1]
    assert failure["host"] == f"host{victim}"
    assert 0.0 < failure["at_s"] - silent_s <= NOTICED_S


@pytest.mark.sweep
def test_streams_go_on_whatever_happens_to_hosts(mesh: Running, undisturbed: list[dict[str, Any]]) -> None:
    mesh.until_spares_are_warm()
    before = mesh.status()
    num_failures, num_repairs = len(before["failures"]), before["repairs"]["count"]

    with mesh.streams(undisturbed):
        mesh.kill_stage(mesh.stage_hosts()[0])
    mesh.until_spares_are_warm()

    victim = mesh.stage_hosts()[-1]
    with mesh.streams(undisturbed):
        mesh.lab.lose_packets(victim)
        mesh.until_repaired(num_repairs + 2)
        mesh.lab.deliver_packets(victim)
    # It finds its way back by itself.
    mesh.until_spares_are_warm()

    drained = mesh.stage_hosts()[0]
    with mesh.streams(undisturbed):
        mesh.order("drain", f"host{drained}")
    status = mesh.status()
    assert f"host{drained}" not in {host["name"] for host in status["hosts"]}
    assert (status["repairs"]["count"], status["repairs"]["moves"]) == (num_repairs + 2, 1)
    assert len(status["failures"]) == num_failures + 2

    evicted = mesh.stage_hosts()[-1]
    with mesh.streams(undisturbed):
        mesh.order("evict", f"host{evicted}")
    assert mesh.stage_hosts() == [host for host in range(1, NUM_HOSTS) if host not in {drained, evicted}] * 2
    # The token in the file is the new one; the evicted host's name is not let in with it.
    done = mesh.lab.exec(evicted, [COMMAND, *mesh.system.join_argv(evicted)], timeout_s=120)
    assert done.returncode == 1
    assert "evicted" in done.stderr
    # All that are left go when the head does.
    assert mesh.system.stop(hosts=[0])[0] == 128 + signal.SIGINT
