"""A confined process: what it cannot do any more, and that it computes on."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = """
import ctypes, io, json, os, signal, socket, subprocess, sys, threading, zlib
from mesh.util.confinement import confine

told, goes_on = {}, threading.Event()
def attempt(name, function, *arguments):
    try:
        function(*arguments)
        told[name] = "done"
    except OSError as error:
        told[name] = error.strerror
    except RuntimeError as error:
        told[name] = str(error)
def attempts(prefix):
    parent = os.getppid()
    attempt(prefix + "read a file", open, "/etc/passwd")
    attempt(prefix + "write a file", open, sys.argv[1], "w")
    attempt(prefix + "remove a file", os.unlink, sys.argv[1])
    attempt(prefix + "open a socket", socket.socket)
    attempt(prefix + "open a pair of sockets", socket.socketpair)
    attempt(prefix + "fork", os.fork)
    attempt(prefix + "run a program", os.execv, "/bin/true", ["true"])
    attempt(prefix + "signal another process", os.kill, parent, 0)
    attempt(prefix + "bind a file to memory", os.memfd_create, "x")
    attempt(prefix + "start a thread", threading.Thread(target=print).start)
def elsewhere():
    goes_on.wait()
    attempts("in another thread: ")
thread = threading.Thread(target=elsewhere)
thread.start()
told["confined"] = confine()
attempts("")
goes_on.set()
thread.join()
told["computes"] = zlib.crc32(bytes(50_000_000)) > 0
told["waits"] = thread.is_alive() or True
print(json.dumps(told), flush=True)
if len(sys.argv) > 2:
    os.abort()
"""


@pytest.mark.skipif(sys.platform != "linux", reason="a filter of Linux")
def test_a_confined_process_only_computes(tmp_path: Path) -> None:
    kept = tmp_path / "kept"
    kept.touch()
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(kept)], capture_output=True, text=True, check=False, timeout=60
    )
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    if not told.pop("confined"):
        pytest.skip("this system forbids filters")
    assert told.pop("computes")
    assert told.pop("waits")
    assert len(told) == 20
    assert set(told.values()) <= {"Operation not permitted", "can't start new thread"}, told
    assert kept.exists()


@pytest.mark.skipif(sys.platform != "linux", reason="a filter of Linux")
def test_a_confined_process_may_abort(tmp_path: Path) -> None:
    """Else abort() would loop, or end by a fault that tells less."""
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(tmp_path / "x"), "abort"],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert done.returncode == -6, done.stderr
