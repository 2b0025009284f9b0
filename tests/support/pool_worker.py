"""Worker of pools in tests: does what a job's header names."""

import json
import os
import signal
import sys
import threading
import time
from pathlib import Path

from mesh.util import worker_main
from mesh.util.worker_main import Handle, serve


def handle(header: bytes, payload: bytes) -> bytes:
    match header.decode().split():
        case ["echo"]:
            return payload
        case ["sleep", seconds]:
            time.sleep(float(seconds))
        case ["spin"]:
            while True:
                pass
        case ["fill"]:
            return b"x" * 2**40
        case ["zeros", num_bytes]:
            return bytes(int(num_bytes))
        case ["end", name]:
            os.kill(os.getpid(), signal.Signals[name])
        case ["fail"]:
            raise ValueError(header)
        case ["print"]:
            print("to the standard output", flush=True)
        case ["niceness"]:
            # Of the thread: the process's own stays.
            return str(os.getpriority(os.PRIO_PROCESS, threading.get_native_id())).encode()
        case ["policy", seconds]:
            # Of the thread, once it has computed so long.
            while time.thread_time() < float(seconds):
                pass
            return str(os.sched_getscheduler(0)).encode()
        case ["look"]:
            return json.dumps({"environment": dict(os.environ), "pid": os.getpid()}).encode()
    return b""


def load() -> Handle:
    # A test says when processes come up.
    gate = os.environ.get("GATE")
    while gate and not Path(gate).exists():
        time.sleep(0.01)
    return handle


if __name__ == "__main__":
    # How often jobs that yield are looked at.
    if look_s := os.environ.get("LOOK_S"):
        worker_main._LOOK_S = float(look_s)  # type: ignore[misc]
    # A session that gets next to nothing.
    if niceness := os.environ.get("SESSION_NICENESS"):
        worker_main._SESSION_NICENESS = int(niceness)  # type: ignore[misc]
    serve(load, int(sys.argv[1]), is_long=sys.argv[2] == "1")
