import contextlib
import json
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from meshbench.lab.link import LinkConditions
from meshbench.lab.network import Lab
from spanmesh_proto.errors import MeshError
from tests.support.lab_fixtures import require_lab

pytestmark = pytest.mark.lab

BULK_BYTES = 90_000_000

# Every line but the last two is a host's process; a daemon leaves its parent's session, as Ray's do.
OWNER = """
import json, sys, time
from meshbench.lab.network import Lab
lab = Lab(2, 1.0)
lab.__enter__()
lab.run(0, ["sh", "-c", "setsid sleep 1000 & exec sleep 1000"])
lab.run(1, ["sleep", "1000"])
while len(lab.pids(0)) < 2 or len(lab.pids(1)) < 1:
    time.sleep(0.01)
print(json.dumps(lab.pids(0) + lab.pids(1)), flush=True)
if sys.argv[1] == "exception":
    raise SystemExit("enough")
time.sleep(1000)
"""

SENDER = """
import hashlib, os, socket, sys
digest = hashlib.sha256()
with socket.create_connection((sys.argv[1], 5000)) as link:
    for _ in range(int(sys.argv[2]) // 1_000_000):
        block = os.urandom(1_000_000)
        digest.update(block)
        link.sendall(block)
print(digest.hexdigest())
"""

RECEIVER = """
import hashlib, socket
digest = hashlib.sha256()
with socket.create_server(("", 5000)) as server:
    print("listening", flush=True)
    link, _ = server.accept()
    with link:
        while block := link.recv(1 << 20):
            digest.update(block)
print(digest.hexdigest())
"""


# Tells each client its address and port.
GREETER = """
import socket, sys, threading
def greet(server):
    while True:
        link, (address, port, *_) = server.accept()
        with link:
            link.sendall(f"{address} {port}".encode())
address, *ports = sys.argv[1:]
family = socket.AF_INET6 if ":" in address else socket.AF_INET
servers = [socket.create_server((address, int(port)), family=family) for port in ports]
print("listening", flush=True)
for server in servers[1:]:
    threading.Thread(target=greet, args=[server], daemon=True).start()
greet(servers[0])
"""

# What becomes of a connection to each place, in order.
CALLER = """
import socket, sys
for place in sys.argv[1:]:
    address, _, port = place.rpartition(":")
    try:
        with socket.create_connection((address, int(port)), 0.7) as link:
            print("open", link.recv(100).decode(), link.getsockname()[1])
    except TimeoutError:
        print("silent")
    except OSError as error:
        print(type(error).__name__)
"""


@contextlib.contextmanager
def greeter(lab: Lab, host: int, *ports: int) -> Iterator[None]:
    """In the block a host greets clients at some ports."""
    argv = [sys.executable, "-S", "-c", GREETER, lab.address(host), *map(str, ports)]
    process = lab.run(host, argv, stdout=subprocess.PIPE)
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == b"listening\n"
        yield
    finally:
        process.kill()
        process.wait()


def called(lab: Lab, host: int, *places: tuple[str, int]) -> list[str]:
    """What becomes of connections from a host, one after the other."""
    told = [f"{address}:{port}" for address, port in places]
    done = lab.exec(host, [sys.executable, "-S", "-c", CALLER, *told])
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def outcomes(lab: Lab, source: int, destination: int, *ports: int) -> list[str]:
    """The same, without what was said."""
    found = called(lab, source, *((lab.address(destination), port) for port in ports))
    return [line.split()[0] for line in found]


@pytest.fixture(scope="module", autouse=True)
def _lab_is_possible() -> None:
    require_lab()


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    with Lab(3, 5.0, shared=[tmp_path_factory.getbasetemp()]) as running:
        yield running


@pytest.fixture(scope="module")
def lab_over_ipv6(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    require_lab(is_ipv6=True)
    with Lab(3, 5.0, shared=[tmp_path_factory.getbasetemp()], is_ipv6=True) as running:
        yield running


def least_round_trip_ms(lab: Lab, source: int, destination: int, wanted_ms: float) -> float:
    """Tries until it is as short as wanted: another test's processes may hold both cores for a while."""
    measured_ms: list[float] = []
    while len(measured_ms) < 40 and min(measured_ms, default=math.inf) > wanted_ms:
        measured_ms.append(lab.round_trip_ms(source, destination))
    return min(measured_ms)


@pytest.mark.parametrize("delay_ms", [0.0, 5.0, 20.0])
def test_round_trip_is_twice_the_delay(lab: Lab, delay_ms: float) -> None:
    lab.set_delay_ms(delay_ms)
    for source, destination in ((0, 1), (2, 0)):
        wanted_ms = 2 * delay_ms + 1.5
        assert 2 * delay_ms <= least_round_trip_ms(lab, source, destination, wanted_ms) <= wanted_ms


def test_a_host_reaches_itself_without_the_wire(lab: Lab) -> None:
    lab.set_delay_ms(20.0)
    assert least_round_trip_ms(lab, 1, 1, 5.0) < 5.0


def test_bulk_transfer_arrives_intact_and_costs_the_router_little(lab: Lab) -> None:
    lab.set_delay_ms(5.0)
    before = lab.traffic()
    receiver = lab.run(0, [sys.executable, "-c", RECEIVER], stdout=subprocess.PIPE)
    assert receiver.stdout is not None
    assert receiver.stdout.readline() == b"listening\n"
    sender = lab.exec(1, [sys.executable, "-c", SENDER, lab.address(0), str(BULK_BYTES)])
    received = receiver.communicate(timeout=120)[0].decode()
    assert sender.returncode == 0, sender.stderr
    assert received == sender.stdout
    after = lab.traffic()
    assert after.num_bytes - before.num_bytes >= BULK_BYTES
    assert after.cpu_s - before.cpu_s < 10.0


def test_lost_packets_are_sent_again_by_the_hosts(lab: Lab) -> None:
    lab.set_link(LinkConditions(1.0, 1.0, loss=0.05, mbit_per_s=400.0), between=(0, 1))
    before = lab.traffic()
    try:
        receiver = lab.run(0, [sys.executable, "-c", RECEIVER], stdout=subprocess.PIPE)
        assert receiver.stdout is not None
        assert receiver.stdout.readline() == b"listening\n"
        start_s = time.monotonic()
        sender = lab.exec(1, [sys.executable, "-c", SENDER, lab.address(0), "10000000"])
        received = receiver.communicate(timeout=120)[0].decode()
        # The sender may end while its last bytes are in buffers.
        took_s = time.monotonic() - start_s
    finally:
        lab.set_link(LinkConditions(5.0))
    assert sender.returncode == 0, sender.stderr
    assert received == sender.stdout
    assert lab.traffic().num_dropped > before.num_dropped
    # 80 Mbit over 400 Mbit/s.
    assert took_s > 0.2


def test_hosts_have_processors_of_their_own_if_told() -> None:
    with Lab(2, is_pinned=True) as lab:
        assert lab.processors is not None
        seen = [
            lab.exec(host, [sys.executable, "-c", "import os; print(*sorted(os.sched_getaffinity(0)))"])
            for host in range(2)
        ]
        assert [tuple(map(int, done.stdout.split())) for done in seen] == lab.processors


def test_hosts_have_their_own_names_homes_and_shared_memory(lab: Lab) -> None:
    for host in (0, 1):
        lab.exec(host, ["sh", "-c", "for place in $HOME /tmp /dev/shm; do hostname > $place/lab-name; done"])
    for host, name in ((0, "host0"), (1, "host1")):
        seen = lab.exec(host, ["sh", "-c", "cat $HOME/lab-name /tmp/lab-name /dev/shm/lab-name"])
        assert seen.stdout.split() == [name] * 3
    assert not Path("/tmp/lab-name").exists()
    assert not Path("/dev/shm/lab-name").exists()


def test_a_shared_directory_is_the_machine_s(tmp_path: Path) -> None:
    (tmp_path / "deep").mkdir()
    # The code and its Python are there, too, wherever they lie.
    kept = (tmp_path, Path.cwd(), Path(__file__).parents[3], Path(sys.prefix), Path(sys.base_prefix))
    with Lab(1, shared=[tmp_path / "deep", tmp_path]) as lab:
        lab.exec(0, ["sh", "-c", f"echo hello > {tmp_path}/deep/written"])
        assert (tmp_path / "deep" / "written").read_text() == "hello\n"
        under_tmp = {path.relative_to("/tmp").parts[0] for path in kept if path.is_relative_to("/tmp")}
        assert set(lab.exec(0, ["ls", "/tmp"]).stdout.split()) == {"home", *under_tmp}


def test_a_process_gets_its_arguments_environment_directory_and_exit_code(lab: Lab, tmp_path: Path) -> None:
    done = lab.exec(
        1, ["sh", "-c", 'echo "$1|$COLOUR|$PWD" >&2; exit 7', "sh", "two words"], env={"COLOUR": "red"}
    )
    assert (done.returncode, done.stdout) == (7, "")
    assert done.stderr == f"two words|red|{Path.cwd()}\n"
    log = tmp_path / "log"
    with log.open("wb") as out:
        assert lab.run(1, ["pwd"], cwd=tmp_path, stdout=out).wait(120) == 0
    assert log.read_text() == f"{tmp_path}\n"


def test_ctrl_c_reaches_a_process_and_its_children(lab: Lab) -> None:
    process = lab.run(2, ["sh", "-c", "sleep 1000; true"])
    # Between fork and exec dash's child ignores the signal, and dash then waits for it.
    _wait_until(lambda: sorted(_program(pid) for pid in lab.pids(2)) == ["sh", "sleep"])
    os.killpg(process.pid, signal.SIGINT)
    assert process.wait(120) == -signal.SIGINT
    assert lab.pids(2) == []


def test_a_killed_host_loses_its_processes_and_can_start_others(lab: Lab) -> None:
    victim = lab.run(2, ["sh", "-c", "setsid sleep 1000 & exec sleep 1000"])
    bystander = lab.run(1, ["sleep", "1000"])
    _wait_until(lambda: len(lab.pids(2)) == 2)
    lab.kill(2)
    assert victim.wait(120) == -signal.SIGKILL
    _wait_until(lambda: lab.pids(2) == [])
    assert bystander.poll() is None
    assert lab.exec(2, ["echo", "back"]).stdout == "back\n"
    lab.kill(1)


def test_a_frozen_host_stands_still_until_it_thaws(lab: Lab) -> None:
    ticking = lab.run(2, ["sh", "-c", "while :; do echo; sleep 0.02; done"], stdout=subprocess.PIPE)
    assert ticking.stdout is not None
    output = ticking.stdout
    output.readline()
    lab.freeze(2)
    os.set_blocking(output.fileno(), False)
    with contextlib.suppress(BlockingIOError):
        while os.read(output.fileno(), 1000):
            pass
    time.sleep(0.2)
    with pytest.raises(BlockingIOError):
        os.read(output.fileno(), 1000)
    lab.thaw(2)
    _wait_until(lambda: output.read(1))
    lab.kill(2)


def test_a_host_that_is_cut_off_is_out_of_reach_until_reconnected(lab: Lab) -> None:
    lab.set_delay_ms(1.0)
    lab.cut_off(2)
    with pytest.raises(MeshError, match="host1 to host2"):
        lab.round_trip_ms(1, 2, num_samples=1)
    lab.reconnect(2)
    assert least_round_trip_ms(lab, 1, 2, 4.0) < 4.0


def test_a_host_whose_packets_get_lost_hears_nothing_and_keeps_its_wire(lab: Lab) -> None:
    lab.set_delay_ms(1.0)
    lab.lose_packets(2)
    with pytest.raises(MeshError, match="host2 to host0"):
        lab.round_trip_ms(2, 0, num_samples=1)
    assert least_round_trip_ms(lab, 0, 1, 4.0) < 4.0
    assert "LOWER_UP" in lab.exec(2, ["ip", "link", "show", "mesh"]).stdout
    lab.deliver_packets(2)
    assert least_round_trip_ms(lab, 1, 2, 4.0) < 4.0


def test_wires_may_carry_ipv6(lab_over_ipv6: Lab) -> None:
    lab = lab_over_ipv6
    assert lab.address(0) == "fd77::1"
    assert 10.0 <= least_round_trip_ms(lab, 2, 0, 12.0) <= 12.0
    lab.set_delay_ms(1.0)
    lab.set_delay_ms(5.0, between=(0, 1))
    assert 10.0 <= least_round_trip_ms(lab, 1, 0, 12.0) <= 12.0
    assert 2.0 <= least_round_trip_ms(lab, 1, 2, 4.0) <= 4.0
    lab.set_delay_ms(1.0)
    assert lab.traffic().num_dropped == 0


@pytest.mark.parametrize("is_by_its_wire", [True, False])
def test_a_host_out_of_reach_by_ipv6_comes_back(lab_over_ipv6: Lab, *, is_by_its_wire: bool) -> None:
    lab = lab_over_ipv6
    lab.set_delay_ms(1.0)
    (lab.cut_off if is_by_its_wire else lab.lose_packets)(2)
    with pytest.raises(MeshError, match="host1 to host2"):
        lab.round_trip_ms(1, 2, num_samples=1)
    (lab.reconnect if is_by_its_wire else lab.deliver_packets)(2)
    # Its address went with its wire, and is there again.
    assert least_round_trip_ms(lab, 2, 1, 4.0) < 4.0


@pytest.mark.parametrize("version", ["lab", "lab_over_ipv6"])
def test_a_filter_lets_others_reach_some_ports_and_the_host_reach_all(
    version: str, request: pytest.FixtureRequest
) -> None:
    lab: Lab = request.getfixturevalue(version)
    lab.set_delay_ms(1.0)
    with greeter(lab, 0, 20_000, 30_000), greeter(lab, 1, 30_000):
        assert outcomes(lab, 1, 0, 20_000, 30_000) == ["open", "open"]
        before = lab.traffic().num_dropped
        try:
            lab.filter_ports(0, [(20_000, 20_099)])
            assert outcomes(lab, 1, 0, 20_000, 30_000) == ["open", "silent"]
            assert lab.traffic().num_dropped > before
            lab.filter_ports(0, [(20_000, 20_099)], rejects=True)
            assert outcomes(lab, 1, 0, 20_000, 30_000) == ["open", "ConnectionRefusedError"]
            assert outcomes(lab, 0, 1, 30_000) == ["open"]
        finally:
            lab.filter_ports(0, None)
        assert outcomes(lab, 1, 0, 30_000) == ["open"]


def test_hosts_behind_a_translation_come_out_and_are_let_in_by_forwarded_ports(tmp_path: Path) -> None:
    with Lab(3, 1.0, shared=[tmp_path], networks=[[1], [2]]) as lab:
        assert (lab.address(1), lab.outside_address(0)) == ("192.168.1.2", "10.77.0.201")
        with greeter(lab, 0, 20_000), greeter(lab, 1, 8080):
            (seen,) = called(lab, 1, (lab.address(0), 20_000))
            # As most do it keeps the port.
            _, address, port, own_port = seen.split()
            assert (address, port) == (lab.outside_address(0), own_port)
            outside = (lab.outside_address(0), 80)
            assert called(lab, 0, (lab.address(1), 8080), outside) == ["OSError", "silent"]
            lab.forward(1, 80, host_port=8080)
            assert called(lab, 0, outside)[0].startswith(f"open {lab.address(0)} ")
            assert called(lab, 2, outside)[0].startswith(f"open {lab.outside_address(1)} ")
        receiver = lab.run(0, [sys.executable, "-c", RECEIVER], stdout=subprocess.PIPE)
        assert receiver.stdout is not None
        assert receiver.stdout.readline() == b"listening\n"
        sender = lab.exec(2, [sys.executable, "-c", SENDER, lab.address(0), "10000000"])
        assert sender.returncode == 0, sender.stderr
        assert receiver.communicate(timeout=120)[0].decode() == sender.stdout


def test_an_exception_inside_the_context_leaves_nothing_behind() -> None:
    others = set(_descendants(os.getpid()))
    pids: set[int] = set()

    def fail_inside() -> None:
        with Lab(2, 1.0) as lab:
            lab.run(0, ["sleep", "1000"])
            pids.update({*lab.pids(0), *_descendants(os.getpid())} - others)
            raise RuntimeError("on purpose")

    with pytest.raises(RuntimeError, match="on purpose"):
        fail_inside()
    assert len(pids) >= 6  # the process, two keepers with their guards, the router
    assert [pid for pid in pids if _alive(pid)] == []


@pytest.mark.parametrize("end", ["exception", "SIGINT", "SIGTERM", "SIGKILL"])
def test_whatever_ends_the_owner_ends_the_lab(end: str) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", OWNER, end], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    ) as owner:
        assert owner.stdout is not None
        inside: list[int] = json.loads(owner.stdout.readline())
        everybody = {*inside, *_descendants(owner.pid)} if end != "exception" else set(inside)
        namespaces = {Path(f"/proc/{pid}/ns/net").readlink() for pid in inside if _alive(pid)}
        if end != "exception":
            assert len(namespaces) == 2
            owner.send_signal(signal.Signals[end])
        owner.wait(120)
    _wait_until(lambda: not any(map(_alive, everybody)))
    _wait_until(lambda: not namespaces & _all_networks())


def _alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def _descendants(pid: int) -> list[int]:
    try:
        tasks = list(Path(f"/proc/{pid}/task").iterdir())
        children = [int(child) for task in tasks for child in (task / "children").read_text().split()]
    except OSError:
        return []
    return [*children, *(pid for child in children for pid in _descendants(child))]


def _all_networks() -> set[Path]:
    found = set()
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            found.add((entry / "ns/net").readlink())
    return found


def _program(pid: int) -> str:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/comm").read_text().strip()
    return ""


def _wait_until(condition: Callable[[], object], timeout_s: float = 10.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.02)
