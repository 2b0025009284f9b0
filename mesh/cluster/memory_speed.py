"""Child process that measures memory bandwidth.

Run as a program: the number of threads as its argument, GB/s on standard output.
"""

from __future__ import annotations

import sys
import threading
import time
from typing import Final

import numpy as np

# Larger than the caches of most processors, small enough for any host.
_PROBE_BYTES: Final = 64 * 2**20
_PROBE_ROUNDS: Final = 5


def memory_speed_gb_per_s(num_threads: int) -> float:
    """Speed at which `num_threads` threads together read memory, the best of several rounds.

    Each thread sums a block of its own (numpy releases the interpreter lock meanwhile). Other work on the
    host can only slow a round down, hence the best.
    """
    num_words = _PROBE_BYTES // num_threads // 8
    blocks = [np.ones(num_words, dtype=np.uint64) for _ in range(num_threads)]
    best_s = min(_time_round(blocks) for _ in range(_PROBE_ROUNDS))
    return num_words * 8 * num_threads / best_s / 1e9


def _time_round(blocks: list[np.ndarray[tuple[int], np.dtype[np.uint64]]]) -> float:
    threads = [threading.Thread(target=block.sum) for block in blocks]
    start_s = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return time.perf_counter() - start_s


def main() -> None:
    """Measure and print."""
    print(memory_speed_gb_per_s(int(sys.argv[1])))  # noqa: T201


if __name__ == "__main__":
    main()
