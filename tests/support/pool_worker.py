"""Worker of pools in tests: does what a job's header names."""

import json
import os
import signal
import sys
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
        case ["end", name]:
            os.kill(os.getpid(), signal.Signals[name])
        case ["fail"]:
            raise ValueError(header)
        case ["print"]:
            print("to the standard output", flush=True)
        case ["look"]:
            return json.dumps({"environment": dict(os.environ), "pid": os.getpid()}).encode()
    return b""


if __name__ == "__main__":
    serve(lambda: handle, int(sys.argv[1]))
