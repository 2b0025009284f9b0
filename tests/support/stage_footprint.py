"""What a process takes at most while it loads a stage and computes all that a batch may hold.

Run as a program: a job on standard input; the last word on standard output is a number of bytes.
"""

import json
import sys
from contextlib import closing
from pathlib import Path

import numpy as np

from stages.runtime.spans import Span
from stages.runtime.stage_runtime import RuntimeOptions, StageRuntime


def _exercise(runtime: StageRuntime, num_slots: int) -> None:
    """Full batches, of one slot and of all, every row with an output."""
    info = runtime.info
    for rows, slots in ((runtime.max_rows, 1), (runtime.max_rows // num_slots, num_slots)):
        hidden = None if info.is_first else np.ones((rows, info.n_embd), np.float32)
        for start in (0, rows):
            runtime.decode(
                [Span(slot, start, [5] * rows, hidden, rows if info.is_tail else 0) for slot in range(slots)]
            )


def main() -> None:
    job = json.load(sys.stdin)
    options = RuntimeOptions(**job["options"])
    with closing(StageRuntime(Path(job["path"]), options)) as runtime:
        _exercise(runtime, options.num_slots)
    status = Path("/proc/self/status").read_text()
    peak = next(line for line in status.splitlines() if line.startswith("VmHWM"))
    print(int(peak.split()[1]) * 1024)


if __name__ == "__main__":
    main()
