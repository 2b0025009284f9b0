"""Worker of pools in tests: does what a job's header names."""

import json
import os
import signal
import time

from mesh.util.worker_main import serve


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
        case ["crash"]:
            os.kill(os.getpid(), signal.SIGSEGV)
        case ["fail"]:
            raise ValueError(header)
        case ["print"]:
            print("to the standard output", flush=True)
        case ["look"]:
            return json.dumps({"environment": dict(os.environ), "pid": os.getpid()}).encode()
        case ["descend", levels]:
            return str(_depth(int(levels))).encode()
    return b""


def _depth(levels: int) -> int:
    # Through C, whose stack each level takes a part of.
    return 0 if not levels else 1 + max(map(_depth, [levels - 1]))


if __name__ == "__main__":
    serve(handle, lambda header, payload: int(payload) if header.startswith(b"descend") else 2**20)
