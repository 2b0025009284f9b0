"""Hosts whose firewalls let nothing in but a range of ports: what works, and what a wrong range is told."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest

from meshbench.lab.network import Lab
from meshbench.lab.systems import COMMAND
from tests.support.lab_fixtures import require_lab
from tests.support.lab_mesh import Running, running_mesh

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = [pytest.mark.lab, pytest.mark.timeout(600)]

FIRST, LAST = 20_000, 20_099
RANGE = f"{FIRST}-{LAST}"
NUM_HOSTS = 3  # the head and two others, each of which can hold all
STRANGER = 3  # a host of the lab that no mesh waits for
OPTIONS = ["--exact", "--speculate", "ngram", "--parallel", "4", "--ctx-size", "512", "--stages", "2"]
LISTENING = "0A"


def started_join(lab: Lab, host: int, token: str, *options: str) -> subprocess.Popen[bytes]:
    argv = [COMMAND, "join", token, "--advertise", lab.address(host), "--memory", "1G", "--threads", "1"]
    return lab.run(host, [*argv, *options], stdout=subprocess.PIPE, stderr=subprocess.PIPE)


def refused(join: subprocess.Popen[bytes]) -> str:
    """What a `mesh join` that failed has said."""
    _, errors = join.communicate(timeout=60)
    assert join.returncode == 1, errors.decode()
    return errors.decode()


def test_a_host_with_the_wrong_range_is_told_why() -> None:
    require_lab()
    with Lab(4, 1.0) as lab:
        for host in range(4):
            lab.filter_ports(host, [(FIRST, LAST)])
        # Not all of what it names is let through.
        lab.filter_ports(2, [(FIRST, FIRST + 49)])
        argv = [sys.executable, "-m", "tests.support.lone_head", lab.address(0), RANGE]
        head = lab.run(0, argv, stdout=subprocess.PIPE)
        assert head.stdout is not None
        token = head.stdout.readline().decode().strip()
        joins = [
            started_join(lab, 1, token, "--port-range", "30000-30099"),
            started_join(lab, 2, token, "--port-range", RANGE),
            started_join(lab, 3, token),
        ]
        elsewhere, partly, anywhere = map(refused, joins)
    for host, said in ((1, elsewhere), (2, partly)):
        assert f"the head cannot reach this host back at {lab.address(host)}:" in said
        assert "no answer within 2 s" in said
    assert "30000" in elsewhere
    assert "let all TCP to 30000-30099 through the firewall of 10.77.0.2" in elsewhere
    assert f"of --port-range {RANGE} it reached {FIRST}, " in partly
    assert f", {LAST}: let all TCP to {RANGE} through" in partly
    assert "where only some ports are let through, name them with --port-range" in anywhere


@pytest.fixture(
    scope="module",
    params=[pytest.param(False, id="ipv4"), pytest.param(True, id="ipv6")],
)
def mesh(
    request: pytest.FixtureRequest, smollm2_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Running]:
    require_lab(is_ipv6=request.param)
    logs = tmp_path_factory.mktemp("logs")
    ranged = ["--port-range", RANGE]
    with Lab(NUM_HOSTS + 1, 1.0, shared=[tmp_path_factory.getbasetemp()], is_ipv6=request.param) as lab:
        for host in range(NUM_HOSTS + 1):
            lab.filter_ports(host, [(FIRST, LAST)])
        with running_mesh(
            lab,
            smollm2_path,
            logs,
            num_hosts=NUM_HOSTS,
            options=[*OPTIONS, *ranged],
            join_options=ranged,
        ) as running:
            yield running


@pytest.fixture(scope="module")
def undisturbed(mesh: Running) -> list[dict[str, Any]]:
    """What four questions are answered while nothing happens."""
    return mesh.answers(mesh.ask(max_tokens=96))


def open_ports(lab: Lab, host: int) -> set[int]:
    """TCP ports on which a host listens for others."""
    found = set()
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        for row in lab.exec(host, ["cat", table]).stdout.splitlines()[1:]:
            # Second column: local address and port in hexadecimal; fourth: state.
            address, _, port = row.split()[1].partition(":")
            if row.split()[3] == LISTENING and not is_loopback(address):
                found.add(int(port, 16))
    return found


def is_loopback(address: str) -> bool:
    """Whether an address of the kernel's table, words in the machine's byte order, means the host itself."""
    words = [
        int(address[start : start + 8], 16).to_bytes(4, sys.byteorder) for start in range(0, len(address), 8)
    ]
    packed = b"".join(words)
    if len(packed) == 4:
        return packed[0] == 127
    mapped = socket.inet_pton(socket.AF_INET6, "::ffff:127.0.0.1")
    return packed in {socket.inet_pton(socket.AF_INET6, "::1"), mapped}


@pytest.mark.sweep
class TestMesh:
    def test_all_that_hosts_open_is_in_the_range(
        self, mesh: Running, undisturbed: list[dict[str, Any]]
    ) -> None:
        assert len({answer["text"] for answer in undisturbed}) == 4
        assert sorted(mesh.stage_hosts()) == [1, 2]
        for host in range(NUM_HOSTS):
            ports = open_ports(mesh.lab, host)
            assert {port for port in ports if not FIRST <= port <= LAST} == set()
            # Node manager, object manager, a worker, link probes.
            assert len(ports) >= 4
        assert [host.port_range for host in mesh.status().hosts] == [RANGE] * (NUM_HOSTS - 1)

    def test_the_doctor_tries_the_ranges(self, mesh: Running) -> None:
        argv = [COMMAND, "doctor", "--url", f"http://127.0.0.1:{mesh.system.port}", "--json"]
        argv += ["--advertise", mesh.lab.address(0), "--port-range", RANGE]
        checks = json.loads(mesh.lab.exec(0, argv, timeout_s=120).stdout)
        assert [check for check in checks if check["outcome"] == "fail"] == []
        assert sum(check["what"] == "ports" for check in checks) == NUM_HOSTS * (NUM_HOSTS - 1)
        mesh.lab.filter_ports(2, [(FIRST, LAST - 1)])
        try:
            done = mesh.lab.exec(0, argv, timeout_s=120)
        finally:
            mesh.lab.filter_ports(2, [(FIRST, LAST)])
        assert done.returncode == 1
        failed = [check for check in json.loads(done.stdout) if check["outcome"] == "fail"]
        assert {(check["where"], check["what"]) for check in failed} == {
            ("host0 to host2", "ports"),
            ("host1 to host2", "ports"),
        }
        assert all(str(LAST) in check["detail"] for check in failed)

    def test_a_stranger_with_another_range_is_told_why(self, mesh: Running) -> None:
        token = mesh.system.token_path.read_text().strip()
        said = refused(started_join(mesh.lab, STRANGER, token, "--port-range", "30000-30099"))
        assert "let all TCP to 30000-30099 through the firewall" in said
        assert mesh.lab.pids(STRANGER) == []

    def test_a_lost_stage_is_repaired(self, mesh: Running, undisturbed: list[dict[str, Any]]) -> None:
        num_repairs = mesh.status().repairs.count
        with mesh.streams(undisturbed, max_tokens=96):
            mesh.kill_stage(mesh.stage_hosts()[0])
        mesh.until_repaired(num_repairs + 1)

    def test_a_drained_host_leaves_and_comes_back(
        self, mesh: Running, undisturbed: list[dict[str, Any]]
    ) -> None:
        drained = mesh.stage_hosts()[0]
        with mesh.streams(undisturbed, max_tokens=96):
            mesh.order("drain", f"host{drained}")
        status = mesh.status()
        assert f"host{drained}" not in {host.name for host in status.hosts}
        assert {stage.host for stage in status.stages} == {f"host{3 - drained}"}
        # The ports that it had are free for it again.
        mesh.system.start_join(drained)
        mesh.until(
            lambda status: len([host for host in status.hosts if host.ready]) == NUM_HOSTS - 1,
            "it does not come back",
        )
