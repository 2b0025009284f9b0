"""Real Ray nodes: they start, carry an actor each, and leave no process behind, however they end."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import grpc
import psutil
import pytest

from mesh.cluster.ray_node import (
    PrivateFolder,
    RayNode,
    RayNodeConfig,
    RayNodeRecord,
    _NodeFolder,
    new_ray_token,
    started_s,
)
from spanmesh_proto.errors import ClusterError

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.cluster

# Connecting sets up Ray for a whole process, so it is done in one of its own.
DRIVER = """
import asyncio, json, sys
from pathlib import Path
from types import SimpleNamespace
from mesh.cluster.ray_driver import RayDriver, result_of
from spanmesh_proto.errors import InvalidModel, StageFailed

class Greeter:
    def where(self):
        import ray
        return ray.get_runtime_context().get_node_id()
    def path(self):
        import sys
        return sys.path
    def refuse(self):
        raise InvalidModel("not a model", param="model")
    def crash(self):
        raise KeyError("oops")
    def die(self):
        import os
        os._exit(1)

async def main(ray_dir, token, address, *nodes):
    kept = RayDriver(SimpleNamespace(ray_dir=Path(ray_dir), token_path=Path(token)), address, are_kept=True)
    await result_of((await kept.create(Greeter, ray_node_name=nodes[0], name="kept")).where.remote(), "kept")
    kept.close()
    driver = RayDriver(SimpleNamespace(ray_dir=Path(ray_dir), token_path=Path(token)), address)
    greeters = [await driver.create(Greeter, ray_node_name=node) for node in nodes]
    places = [await result_of(greeter.where.remote(), "greeter") for greeter in greeters]
    said = {"places": len(set(places))}
    said["path"] = await result_of(greeters[1].path.remote(), "greeter 1")
    for method in ("refuse", "crash", "die"):
        try:
            await result_of(getattr(greeters[0], method).remote(), "greeter 0")
        except (InvalidModel, StageFailed) as error:
            said[method] = f"{type(error).__name__} {error.message} {error.param}"
    found = driver.find("kept")
    said["kept"] = await result_of(found.where.remote(), "kept") in places
    driver.kill(found)
    try:
        driver.find("never there")
    except StageFailed as error:
        said["missing"] = error.message
    driver.close()
    # Until it is closed Ray prints words of its own, perhaps within a line.
    print("\\n" + json.dumps(said))

asyncio.run(main(*sys.argv[1:]))
"""


# Of Ray, and what it calls some of them once they run.
OWN_PROGRAMS = ("dashboard.py", "/agent.py", "agent/main.py", "ray::DashboardAgent", "ray::RuntimeEnvAgent")


@pytest.fixture
def strangers() -> set[psutil.Process]:
    """Children of this process that were there before."""
    return descendants(os.getpid())


@pytest.fixture
def head(strangers: set[psutil.Process]) -> Iterator[RayNode]:
    node = RayNode.start(RayNodeConfig("127.0.0.1", "head.1", new_ray_token()))
    yield node
    node.stop()


def descendants(pid: int) -> set[psutil.Process]:
    with contextlib.suppress(psutil.NoSuchProcess):
        return set(psutil.Process(pid).children(recursive=True))
    return set()


def is_heavy(process: psutil.Process) -> bool:
    """Whether it is one of those that import all of Ray and do nothing for a mesh."""
    with contextlib.suppress(psutil.NoSuchProcess):
        words = process.cmdline()
        is_own = any(word.endswith(OWN_PROGRAMS) for word in words)
        return is_own and not any(word.endswith("idle_agent.py") for word in words)
    return False


def alive(processes: set[psutil.Process], within_s: float) -> list[str]:
    """Command lines of those that still run when the time is over."""
    deadline_s = time.monotonic() + within_s
    while True:
        left = [process for process in processes if process.is_running() and process.status() != "zombie"]
        if not left or time.monotonic() > deadline_s:
            return [" ".join(process.cmdline())[:100] for process in left]
        time.sleep(0.1)


def test_two_nodes_carry_actors_and_end_without_a_trace(
    head: RayNode, strangers: set[psutil.Process], tmp_path: Path
) -> None:
    address = asyncio.run(head.wait_ready())
    token = head.token_path.read_text()
    assert head.token_path.stat().st_mode & 0o777 == 0o600
    worker = RayNode.start(RayNodeConfig("127.0.0.1", "worker.1", token, address))
    try:
        asyncio.run(worker.wait_ready())
        processes = descendants(os.getpid())
        heavy = [" ".join(process.cmdline()) for process in processes - strangers if is_heavy(process)]
        answer = subprocess.run(
            [sys.executable, "-c", DRIVER, head.ray_dir, head.token_path, address, "head.1", "worker.1"],
            capture_output=True,
            text=True,
            check=True,
            timeout=60,
            cwd=tmp_path,
        )
        processes |= descendants(os.getpid())
    finally:
        worker.stop()
    assert head.is_running
    head.stop()
    said = json.loads(answer.stdout.splitlines()[-1])
    assert said["places"] == 2
    assert not {str(tmp_path), str(Path.cwd()), ""} & set(said["path"])
    assert said["refuse"] == "InvalidModel not a model model"
    assert said["crash"] == "StageFailed greeter 0 failed: KeyError: 'oops' None"
    assert said["kept"] is True
    assert said["missing"] == "the process never there has ended"
    assert said["die"].startswith("StageFailed greeter 0 went away: ")
    assert len(processes - strangers) > 4
    assert heavy == []
    assert alive(processes - strangers, within_s=0) == []
    assert not head.ray_dir.parent.exists()
    assert not worker.ray_dir.parent.exists()


def test_whoever_does_not_know_the_token_is_refused_at_once_and_that_is_logged(head: RayNode) -> None:
    address = asyncio.run(head.wait_ready())
    with grpc.insecure_channel(address) as channel:
        # Bytes go and come as they are; the stubs ask for serializers.
        nodes = channel.unary_unary(  # type: ignore[call-arg]
            "/ray.rpc.NodeInfoGcsService/GetAllNodeInfo"
        )
        for header in ((), (("authorization", "Bearer guess"),)):
            with pytest.raises(grpc.RpcError) as refusal:
                nodes(b"", metadata=header, timeout=5)
            assert refusal.value.code() is grpc.StatusCode.UNAUTHENTICATED
        (log,) = head.ray_dir.glob("session_2*/logs/gcs_server.out")
        deadline_s = time.monotonic() + 5
        while "Missing authorization header in request" not in log.read_text():
            assert time.monotonic() < deadline_s, log.read_text()
            time.sleep(0.1)
        token = head.token_path.read_text()
        assert b"head.1" in nodes(b"", metadata=(("authorization", f"Bearer {token}"),), timeout=5)


def test_a_first_process_that_does_not_listen_is_killed_and_reaped() -> None:
    code = "import signal, time; signal.signal(signal.SIGTERM, 1); print(flush=True); time.sleep(600)"
    first = psutil.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, start_new_session=True)
    with first.stdout:
        first.stdout.readline()
        RayNode("127.0.0.1", "deaf.1", _NodeFolder(PrivateFolder("mesh-ray-")), first).stop()
    assert first.returncode == -signal.SIGKILL


def test_a_node_whose_starter_is_killed_dies_with_it() -> None:
    if sys.platform != "linux":
        pytest.skip("only Linux tells a child that its parent died")
    code = """
import asyncio
from mesh.cluster.ray_node import RayNode, RayNodeConfig
async def main():
    node = RayNode.start(RayNodeConfig("127.0.0.1", "head.1", "token" * 8))
    await node.wait_ready()
    print("ready", node.ray_dir, flush=True)
    await node.ended()
asyncio.run(main())
"""
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as starter:
        assert starter.stdout is not None
        while not (line := starter.stdout.readline()).startswith("ready "):
            assert starter.poll() is None
        processes = descendants(starter.pid)
        starter.send_signal(signal.SIGKILL)
    assert len(processes) > 2
    assert alive(processes, within_s=15) == []
    # Its folder is removed by whoever comes next.
    folder = Path(line.split()[1]).parent
    assert folder.exists()
    RayNode.start(RayNodeConfig("127.0.0.1", "next.1", new_ray_token())).stop()
    assert not folder.exists()


def test_a_node_whose_raylet_is_killed_ends_and_says_so(strangers: set[psutil.Process]) -> None:
    node = RayNode.start(RayNodeConfig("127.0.0.1", "head.1", new_ray_token()))
    try:
        asyncio.run(node.wait_ready())
        processes = descendants(os.getpid()) - strangers
        (raylet,) = (process for process in processes if process.name() == "raylet")
        raylet.kill()
        asyncio.run(asyncio.wait_for(node.ended(), 10))
        if sys.platform == "linux":
            # The node counts as ready a moment before Ray's command has ended.
            assert node.crash_message in {
                f"process {raylet.pid} of the Ray node ended with status -9",
                "raylet of the Ray node ended while it started",
            }
        assert alive(processes, within_s=0) == []
    finally:
        node.stop()


@pytest.fixture
def sleeper() -> Iterator[psutil.Process]:
    with subprocess.Popen(
        [sys.executable, "-c", "import time; time.sleep(60)"], start_new_session=True
    ) as process:
        yield psutil.Process(process.pid)
        process.kill()


async def test_an_address_that_is_still_being_written_is_waited_for(
    tmp_path: Path, sleeper: psutil.Process
) -> None:
    for name in ("lock", "owner"):
        (tmp_path / name).touch()
    record = RayNodeRecord("127.0.0.1", "head.1", str(tmp_path), sleeper.pid, started_s(sleeper.pid))
    node = RayNode.adopt(record)
    try:
        ready_path = node.ray_dir / "ray_current_cluster"
        node.ray_dir.mkdir()
        ready_path.touch()
        address = asyncio.create_task(node.wait_ready())
        await asyncio.sleep(0.5)
        ready_path.write_text("127.0.0.1:6379")
        assert await address == "127.0.0.1:6379"
    finally:
        node.stop()


def test_a_node_whose_owner_file_is_gone_is_not_adopted(tmp_path: Path, sleeper: psutil.Process) -> None:
    (tmp_path / "lock").touch()
    record = RayNodeRecord("127.0.0.1", "head.1", str(tmp_path), sleeper.pid, started_s(sleeper.pid))
    # It watches the file that it was started with, and would end however long a new one is locked.
    with pytest.raises(ClusterError, match="has lost its files in "):
        RayNode.adopt(record)
    assert not (tmp_path / "owner").exists()


@pytest.mark.skipif(sys.platform != "linux", reason="only there does a node outlive its owner")
def test_a_process_has_started_at_the_same_time_whatever_the_clock_is_set_to(
    sleeper: psutil.Process, monkeypatch: pytest.MonkeyPatch
) -> None:
    before_s, boot_s, created_s = started_s(sleeper.pid), psutil.boot_time(), sleeper.create_time()
    # The kernel keeps the time since the machine's start, and counts that back from the wall clock.
    monkeypatch.setattr(psutil._pslinux, "boot_time", lambda: boot_s + 60 * 86400)
    assert psutil.Process(sleeper.pid).create_time() - created_s > 86400
    assert started_s(sleeper.pid) == pytest.approx(before_s, abs=1.5)


LINGERING = """
import asyncio, dataclasses, json, sys
from mesh.cluster.ray_node import RayNode, RayNodeConfig
async def main():
    node = RayNode.start(RayNodeConfig("127.0.0.1", "head.1", "token" * 8, linger_s=float(sys.argv[1])))
    await node.wait_ready()
    print(json.dumps(dataclasses.asdict(node.record)), flush=True)
    await node.ended()
asyncio.run(main())
"""


def killed_with_a_lingering_node(linger_s: float) -> tuple[RayNodeRecord, set[psutil.Process]]:
    """The record of a node whose starter was killed, and the node's processes."""
    code = [sys.executable, "-c", LINGERING, str(linger_s)]
    with subprocess.Popen(code, stdout=subprocess.PIPE, text=True) as starter:
        assert starter.stdout is not None
        while not (line := starter.stdout.readline()).startswith("{"):
            assert starter.poll() is None
        processes = descendants(starter.pid)
        record = RayNodeRecord(**json.loads(line))
        with pytest.raises(ClusterError, match="is in use"):
            RayNode.adopt(record)
        starter.send_signal(signal.SIGKILL)
    return record, processes


@pytest.mark.skipif(sys.platform != "linux", reason="nodes linger on Linux only")
def test_a_node_that_lingers_is_adopted_and_stopped() -> None:
    record, processes = killed_with_a_lingering_node(60)
    # Whoever comes by meanwhile leaves its folder alone, also systemd-tmpfiles, which would have to lock it.
    PrivateFolder("mesh-ray-").close()
    folder = os.open(record.folder, os.O_RDONLY | os.O_DIRECTORY)
    with pytest.raises(BlockingIOError):
        fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
    os.close(folder)
    node = RayNode.adopt(record)
    assert node.is_running
    assert asyncio.run(node.wait_ready()) == (Path(record.folder) / "ray/ray_current_cluster").read_text()
    assert node.record == record
    node.stop()
    assert alive(processes, within_s=0) == []
    assert not Path(record.folder).exists()
    with pytest.raises(ClusterError, match="has ended"):
        RayNode.adopt(record)


@pytest.mark.skipif(sys.platform != "linux", reason="nodes linger on Linux only")
def test_a_node_that_nobody_adopts_ends() -> None:
    record, processes = killed_with_a_lingering_node(1)
    assert alive(processes, within_s=15) == []
    with pytest.raises(ClusterError, match="has ended"):
        RayNode.adopt(record)


def test_stopping_while_starting_leaves_nothing(strangers: set[psutil.Process]) -> None:
    node = RayNode.start(RayNodeConfig("127.0.0.1", "head.1", new_ray_token()))
    time.sleep(1.5)
    processes = descendants(os.getpid()) - strangers
    assert processes
    node.stop()
    node.stop()
    assert alive(processes, within_s=0) == []
    assert not node.ray_dir.parent.exists()
    # It can be told that it is over.
    assert not node.is_running


def test_socket_paths_fit() -> None:
    node = RayNode.start(RayNodeConfig("127.0.0.1", "head.1", new_ray_token()))
    node.stop()
    longest = node.ray_dir / "session_2026-12-31_23-59-59_999999_4194304" / "sockets" / "plasma_store"
    assert len(str(longest)) <= 104
    with socket.socket(socket.AF_UNIX) as probe, pytest.raises(FileNotFoundError):
        probe.bind(str(longest))
