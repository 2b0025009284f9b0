"""Commands on a system with nothing of Linux: on Linux, with all that only it has hidden from the product."""

from __future__ import annotations

import contextlib
import datetime as dt
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import psutil
import pytest

from mesh.cluster.addresses import free_port
from mesh.cluster.certificates import make_certificate
from mesh.cluster.join_token import JoinToken, encode
from tests.support.hidden_linux import SYSTEM, SYSTEM_NAME, hidden_environment, is_of_linux, refused
from tests.support.tiny_models import TinyModel

if TYPE_CHECKING:
    from collections.abc import Mapping

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="what it hides is Linux's")

ROOT = Path(__file__).parents[2]
MESH = str(Path(sys.executable).with_name("mesh"))
# Runs the same lines as a module of the product and as one of another package, and prints what each finds.
PROBE = """
import ctypes, os, platform, select, shutil, signal, sys
from pathlib import Path

def opens(path):
    try:
        open(path).close()
    except FileNotFoundError:
        return False
    return True

def lists(path):
    try:
        os.listdir(path)
    except FileNotFoundError:
        return False
    return True

found = {
    "system": [sys.platform, platform.system()],
    "names": [hasattr(os, "sched_getaffinity"), hasattr(select, "epoll"), hasattr(signal, "sigtimedwait")],
    "functions": [hasattr(ctypes.CDLL(None), "prctl"), hasattr(ctypes.CDLL(None), "strlen")],
    "files": [Path("/proc").exists(), opens("/proc/self/status"), lists("/proc"), opens("/etc/hosts")],
}
"""
PROBES = """
import json, sys
source = sys.stdin.read()
for package in ("mesh", "another"):
    names = {"__name__": package + ".probe"}
    exec(compile(source, "probe", "exec"), names)
    print(json.dumps(names["found"]))
"""
IMPORTS = """
import importlib, pkgutil, traceback
imported, failures = [], []
for room in ("spanmesh_proto", "stages", "speculative", "mesh"):
    path = importlib.import_module(room).__path__
    for name in (room, *(module.name for module in pkgutil.walk_packages(path, room + "."))):
        if not name.rpartition(".")[2].startswith("_"):  # extensions, which Python does not import
            try:
                importlib.import_module(name)
            except ModuleNotFoundError as error:
                # What computes with torch is of no use without that extra.
                if error.name != "torch" or not name.startswith("mesh.tuning."):
                    failures.append(name + ": " + traceback.format_exc())
            except Exception:
                failures.append(name + ": " + traceback.format_exc())
            imported.append(name)
print(*failures, sep="\\n")
print(len(imported))
"""
# A process that ends with its parent, which starts it and waits.
ORPHAN = """
import os, time
from mesh.util.dependent_child import die_with_parent
die_with_parent(os.getppid())
print(os.getpid(), flush=True)
time.sleep(600)
"""
PARENT = """
import subprocess, sys
subprocess.run([sys.executable, "-c", sys.argv[1]])
"""


def run(*command: str, environment: Mapping[str, str], text: str = "") -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command, env=dict(environment), input=text, capture_output=True, text=True, check=False, timeout=60
    )


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    return hidden_environment(tmp_path) | {"XDG_CACHE_HOME": str(tmp_path / "cache")}


def test_linux_is_hidden_from_the_product_and_from_nobody_else(
    environment: dict[str, str], tmp_path: Path
) -> None:
    done = run(sys.executable, "-c", PROBES, environment=environment, text=PROBE)
    assert done.returncode == 0, done.stderr
    ours, others = map(json.loads, done.stdout.splitlines())
    assert ours == {
        "system": [SYSTEM, SYSTEM_NAME],
        "names": [False, False, False],
        "functions": [False, True],
        "files": [False, False, False, True],
    }
    assert others["system"] == ["linux", "Linux"]
    assert all(all(others[kind]) for kind in ("names", "functions", "files"))
    assert {"os.sched_getaffinity", "libc.prctl", "/proc", "/proc/self/status"} <= refused(tmp_path)


@pytest.mark.parametrize(
    ("path", "is_linux_s"),
    [
        ("/proc", True),
        ("/proc/self/fd/2", True),
        ("/sys/fs/cgroup/memory.max", True),
        ("/dev/cpu_dma_latency", True),
        ("unshare", True),
        ("/usr/bin/ip", True),
        ("/process", False),
        ("/dev/null", False),
        ("/srv/proc/ip", False),
        ("/usr/bin/python3", False),
    ],
)
def test_what_counts_as_linux_s(path: str, *, is_linux_s: bool) -> None:
    assert is_of_linux(path) is is_linux_s


def test_every_module_can_be_imported(environment: dict[str, str]) -> None:
    done = run(sys.executable, "-c", IMPORTS, environment=environment)
    assert done.returncode == 0, done.stderr
    *failures, number = done.stdout.strip().splitlines()
    assert failures == [], done.stdout
    rooms = (ROOT / room for room in ("proto", "stages", "speculative", "mesh"))
    files = [path.with_suffix("").parts for room in rooms for path in room.rglob("*.py")]
    assert int(number) == sum(not parts[-1].startswith("_") or parts[-1] == "__init__" for parts in files)


def test_doctor_finds_no_fault_in_what_only_linux_does(environment: dict[str, str], tmp_path: Path) -> None:
    command = [MESH, "doctor", "--json", "--advertise", "127.0.0.1", "--port", str(free_port("127.0.0.1"))]
    done = run(*command, environment=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    checks = {check["what"]: check for check in json.loads(done.stdout)}
    assert checks["processors"]["outcome"] == "ok"
    assert "only Linux" in checks["processors"]["detail"]
    assert "CPU" in checks["device"]["detail"]
    # It would have looked there.
    assert {"/proc/self/cgroup", "/proc/cpuinfo", "/dev/cpu_dma_latency", "/dev/kfd"} <= refused(tmp_path)


def test_plan_measures_this_host(environment: dict[str, str], tmp_path: Path) -> None:
    model = TinyModel("llama").write(tmp_path / "model.gguf")
    done = run(MESH, "plan", str(model), "--json", environment=environment)
    assert done.returncode == 0, done.stderr
    plan = json.loads(done.stdout)
    assert [stage["layers"] for stage in plan["stages"]] == [[0, 6]]
    assert plan["prediction"]["tokens_per_s"] > 0
    assert "os.sched_getaffinity" in refused(tmp_path)


def test_join_gets_as_far_as_to_a_head_that_is_not_there(environment: dict[str, str]) -> None:
    now = dt.datetime.now(dt.UTC)
    address = f"127.0.0.1:{free_port('127.0.0.1')}"
    fingerprint = make_certificate(now).fingerprint
    token = encode(JoinToken((address,), "secret", fingerprint, int(now.timestamp()) + 3600))
    done = run(MESH, "join", "--token-file", "-", environment=environment, text=token)
    assert done.returncode == 1
    assert f"cannot reach the head at {address}" in done.stderr


def test_serve_says_that_stages_outlive_a_head_on_linux_only(environment: dict[str, str]) -> None:
    done = run(MESH, "serve", "--linger", "60", environment=environment)
    assert done.returncode == 2
    assert "--linger needs Linux" in done.stderr


def test_a_process_ends_with_its_parent(environment: dict[str, str]) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", PARENT, ORPHAN], env=environment, stdout=subprocess.PIPE, text=True
    ) as parent:
        assert parent.stdout is not None
        orphan = psutil.Process(int(parent.stdout.readline()))
        parent.kill()
    deadline_s = time.monotonic() + 30
    with contextlib.suppress(psutil.NoSuchProcess):
        while orphan.is_running() and orphan.status() != psutil.STATUS_ZOMBIE:
            assert time.monotonic() < deadline_s
            time.sleep(0.05)


def test_nothing_of_this_lasts_in_this_process() -> None:
    assert sys.platform == "linux"
    assert Path("/proc/self/status").exists()
