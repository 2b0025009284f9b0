"""Child process that measures TCP round trips."""

from __future__ import annotations

import errno
import json
import socket
import sys
import time

_CLOSED_PORT = 9


def round_trips_ms(address: str, num_samples: int, *, timeout_s: float = 5.0) -> list[float]:
    """Times from a connection request to its refusal.

    Raises:
        TimeoutError: If no refusal comes in time.
    """
    samples: list[float] = []
    for _ in range(num_samples):
        with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET) as trial:
            trial.settimeout(timeout_s)
            start = time.perf_counter()
            refusal = trial.connect_ex((address, _CLOSED_PORT))
            samples.append((time.perf_counter() - start) * 1e3)
        if refusal != errno.ECONNREFUSED:
            raise TimeoutError(f"{address} did not answer within {timeout_s:g} s")
    return samples


if __name__ == "__main__":
    sys.stdout.write(json.dumps(round_trips_ms(sys.argv[1], int(sys.argv[2]))))
