"""A host's port range: how it is written, divided, given to Ray, and what is said when it does not do."""

from __future__ import annotations

import socket
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING

import click
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from mesh.cli.main import run
from mesh.cli.shared_options import Ports
from mesh.cluster.addresses import is_free_everywhere
from mesh.cluster.port_plan import (
    LEAST_PORTS,
    checked_ports,
    own_part,
    own_ports,
    plan_ports,
    ray_part,
)
from mesh.cluster.ray_node import RayNodeConfig, start_arguments
from mesh.cluster.ray_start_hook import name_no_ports
from spanmesh_proto.addresses import PortRange, join_address, parse_port_range
from spanmesh_proto.errors import ClusterError, PortInUse
from stages.transport.channels import listen_within
from tests.support.ipv6 import needs_ipv6
from tests.support.port_ranges import free_range

if TYPE_CHECKING:
    from collections.abc import Iterator

HUNDRED = PortRange(20_000, 20_099)
# Seven for Ray's services, four for its workers, two for ours, and one each for four stages.
NEEDED_OF_RAY, NEEDED_OF_OURS = 15, 6

ranges = st.builds(
    lambda first, size: PortRange(first, first + size - 1),
    st.integers(1024, 60_000),
    st.integers(LEAST_PORTS, 2000),
)


@given(ranges)
def test_a_range_is_read_as_it_is_written(port_range: PortRange) -> None:
    assert parse_port_range(f" {port_range}\n") == port_range
    assert [*port_range.ports] == [*range(port_range.first, port_range.last + 1)]
    assert len(port_range) == len(port_range.ports)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("20000", "'20000' is not a range of ports: write it like 20000-20099"),
        ("20000:20099", "is not a range"),
        ("", "is not a range"),
        ("20000-20099-20100", "is not a range"),
        ("20099-20000", "the lower one first"),
        ("80-200", "ports from 1024 to 65535"),
        ("65000-66000", "ports from 1024 to 65535"),
        ("-5-10", "is not a range"),
        ("٢٠٠٠٠-20099", "is not a range"),
    ],
)
def test_what_is_no_range_is_refused(text: str, says: str) -> None:
    with pytest.raises(ClusterError, match=says) as refused:
        parse_port_range(text)
    assert refused.value.param == "--port-range"


@given(ranges)
def test_a_range_is_divided_without_rest_and_ray_can_start_a_worker_for_each_of_our_ports(
    port_range: PortRange,
) -> None:
    ray, own = ray_part(port_range), own_part(port_range)
    assert [*ray, *own] == [*port_range.ports]
    num_stages = len(own) - 2
    assert num_stages >= 4
    # Beside its services, the driver, a warm worker and two that inspect the host.
    assert len(ray) - 7 - 4 - num_stages in {0, 1}
    assert own_ports(port_range) == own
    assert own_ports(None) == ()


@given(ranges, st.data())
def test_ray_is_given_free_ports_of_its_part_and_none_twice(
    port_range: PortRange, data: st.DataObject
) -> None:
    taken = data.draw(st.sets(st.sampled_from(port_range.ports), max_size=60))
    free_of_ray = [port for port in ray_part(port_range) if port not in taken]
    assume(len(free_of_ray) >= NEEDED_OF_RAY)
    assume(len([port for port in own_part(port_range) if port not in taken]) >= NEEDED_OF_OURS)
    ports = plan_ports(port_range, lambda port: port not in taken)
    given_ports = [ports.control, ports.node_manager, ports.object_manager, *ports.agents, *ports.workers]
    assert given_ports == free_of_ray[: 7 + 256]


@given(ranges, st.data())
def test_too_few_free_ports_are_named_with_the_number_that_is_needed(
    port_range: PortRange, data: st.DataObject
) -> None:
    part, needed = data.draw(
        st.sampled_from([(ray_part(port_range), NEEDED_OF_RAY), (own_part(port_range), NEEDED_OF_OURS)])
    )
    free = data.draw(st.sets(st.sampled_from(part), max_size=needed - 1))
    with pytest.raises(PortInUse) as refused:
        plan_ports(port_range, lambda port: port in free or port not in part)
    said = refused.value.message
    assert f"of {part[0]}-{part[-1]} {len(free)} ports are free and {needed} are needed" in said
    listed, _, _ = said.partition("listen on ")[2].partition(", so that")
    ends = [[int(end) for end in run.split("-")] for run in listed.split(", ")]
    named = {port for run in ends for port in range(run[0], run[-1] + 1)}
    assert named == set(part) - free
    assert refused.value.param == "--port-range"


def test_a_range_that_is_too_small_says_what_for() -> None:
    with pytest.raises(
        ClusterError, match=rf"20000-20009 has 10 ports, and a host needs {LEAST_PORTS}: 7 for Ray"
    ):
        plan_ports(PortRange(20_000, 20_009))
    assert plan_ports(PortRange(20_000, 20_000 + LEAST_PORTS - 1), lambda _: True).workers


@given(ranges)
def test_a_check_tries_both_ends_and_both_parts(port_range: PortRange) -> None:
    ports = checked_ports(port_range)
    assert (ports[0], ports[-1]) == (port_range.first, port_range.last)
    assert ports == sorted(set(ports))
    assert len(ports) == 8
    gaps = [after - before for before, after in pairwise(ports)]
    assert max(gaps) - min(gaps) <= 1


def test_ray_is_started_with_its_ports() -> None:
    ports = plan_ports(HUNDRED, lambda _: True)
    words = start_arguments(RayNodeConfig("10.0.0.1", "head.1", "token", ports=ports), Path("/tmp/ray"))
    said = dict(word.removeprefix("--").partition("=")[::2] for word in words)
    assert said["port"] == "20000"
    assert said["node-manager-port"] == "20001"
    assert said["object-manager-port"] == "20002"
    agents = ("dashboard-agent-grpc-port", "metrics-export-port", "dashboard-agent-listen-port")
    assert [said[name] for name in (*agents, "runtime-env-agent-port")] == [
        "20003",
        "20004",
        "20005",
        "20006",
    ]
    assert said["worker-port-list"].split(",") == [
        str(port) for port in range(20_007, ray_part(HUNDRED).stop)
    ]
    assert "min-worker-port" not in said
    joined = RayNodeConfig("10.0.0.2", "worker.1", "token", "10.0.0.1:20000", ports=ports)
    assert not [word for word in start_arguments(joined, Path("/tmp/ray")) if word.startswith("--port=")]


def test_without_a_range_ray_takes_any_ports() -> None:
    words = start_arguments(RayNodeConfig("10.0.0.1", "head.1", "token"), Path("/tmp/ray"))
    assert [word for word in words if "port" in word] == [
        *("--port=0", "--min-worker-port=0", "--max-worker-port=0", "--dashboard-agent-listen-port=0")
    ]


def test_ray_has_the_options_for_ports() -> None:
    told = subprocess.run(
        [sys.executable, "-m", "ray.scripts.scripts", "start", "--help"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    config = RayNodeConfig("10.0.0.1", "head.1", "token", ports=plan_ports(HUNDRED, lambda _: True))
    words = start_arguments(config, Path("/tmp/ray"))
    options = {word.partition("=")[0] for word in words if "port" in word}
    assert len(options) == 8
    assert {option for option in options if f"{option} " not in told} == set()


def test_agents_that_are_left_out_have_no_ports() -> None:
    params = SimpleNamespace(metrics_agent_port=20_003, metrics_export_port=20_004, node_manager_port=20_001)
    name_no_ports(params)
    assert vars(params) == {
        "metrics_agent_port": 0,
        "metrics_export_port": 0,
        "dashboard_agent_listen_port": 0,
        "runtime_env_agent_port": 0,
        "node_manager_port": 20_001,
    }


class Server:
    """Binds as gRPC's servers do, and keeps the port."""

    def __init__(self, family: socket.AddressFamily = socket.AF_INET) -> None:
        self.family = family
        self.listening: list[socket.socket] = []

    def listen(self, place: str) -> int:
        host, _, port = place.rpartition(":")
        try:
            self.listening.append(
                socket.create_server((host.strip("[]"), int(port)), family=self.family, reuse_port=False)
            )
        except OSError as error:
            raise RuntimeError(str(error)) from error
        return int(self.listening[-1].getsockname()[1])


@pytest.fixture
def server() -> Iterator[Server]:
    made = Server()
    yield made
    for each in made.listening:
        each.close()


def test_servers_take_the_first_free_port_of_those_named(server: Server) -> None:
    ports = [*free_range(3).ports]
    assert [listen_within("127.0.0.1", ports, server.listen) for _ in ports] == ports
    assert [is_free_everywhere(port) for port in ports] == [False] * 3
    with pytest.raises(RuntimeError, match=f"listen on all of the 3 ports {ports[0]} to {ports[-1]}"):
        listen_within("127.0.0.1", ports, server.listen)
    assert listen_within("127.0.0.1", (), server.listen) not in ports


def test_an_address_of_no_interface_is_not_taken_for_a_taken_port(server: Server) -> None:
    with pytest.raises(RuntimeError, match=r"(?i)assign"):
        listen_within("203.0.113.9", free_range(2).ports, server.listen)
    assert server.listening == []


@needs_ipv6
def test_ports_of_ipv6_count_as_well() -> None:
    server = Server(socket.AF_INET6)
    (port,) = free_range(1).ports
    assert listen_within("::1", (port,), server.listen) == port
    assert not is_free_everywhere(port)
    assert join_address("::1", port) == f"[::1]:{port}"
    server.listening[0].close()
    assert is_free_everywhere(port)


def test_the_option_reads_a_range_and_refuses_a_small_one(capsys: pytest.CaptureFixture[str]) -> None:
    option = click.Option(["--port-range"], type=Ports())
    with click.Context(click.Command(None)) as context:
        assert option.type_cast_value(context, "20000-20099") == HUNDRED
        assert option.type_cast_value(context, HUNDRED) == HUNDRED
    for command in (["serve"], ["join", "x"], ["doctor"]):
        assert run([*command, "--port-range", "20000-20009"]) == 2
        assert "a host needs 32" in " ".join(capsys.readouterr().err.split())
