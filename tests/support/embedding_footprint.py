"""What a process takes at most while it loads an embedding model and computes its fullest batches.

Run as a program: a job on standard input; the last word on standard output is a number of bytes.
"""

import json
import sys
from contextlib import closing
from pathlib import Path

from stages.embedding.runtime import EmbeddingRuntime
from stages.runtime.stage_runtime import RuntimeOptions


def main() -> None:
    job = json.load(sys.stdin)
    with closing(EmbeddingRuntime(Path(job["path"]), RuntimeOptions(**job["options"]))) as runtime:
        limits = runtime.limits
        each = limits.most_rows // limits.most_texts
        for texts in ([[5] * limits.longest], [[5] * each] * limits.most_texts, [[5]]):
            runtime.embed(texts)
    status = Path("/proc/self/status").read_text()
    peak = next(line for line in status.splitlines() if line.startswith("VmHWM"))
    print(int(peak.split()[1]) * 1024)


if __name__ == "__main__":
    main()
