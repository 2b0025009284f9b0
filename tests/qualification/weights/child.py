"""Child process that cuts, hashes or fetches a stage file.

Its last line on standard output is JSON: seconds that it took, and the most memory that it had.
"""

from __future__ import annotations

import asyncio
import json
import resource
import sys
import time
from contextlib import suppress
from pathlib import Path

from stages.layers import LayerRange


def main(arguments: list[str]) -> None:
    """Do one thing, and say what it took."""
    before_s = time.monotonic()
    match arguments:
        case "cut", *rest:
            _cut(*rest)
        case "hash", *rest:
            _hash(*rest)
        case "fetch", *rest:
            _fetch(*rest)
        case _:
            raise SystemExit(__doc__)
    took_s = time.monotonic() - before_s
    print(json.dumps({"seconds": took_s, "peak_rss_bytes": _peak_rss_bytes()}), flush=True)


def _peak_rss_bytes() -> int:
    # Not `ru_maxrss`: Linux counts in that what the parent had when it started this process.
    with suppress(OSError):
        for line in Path("/proc/self/status").read_text().splitlines():
            name, _, value = line.partition(":")
            if name == "VmHWM":
                return int(value.split()[0]) * 1024
    # macOS, and in bytes there.
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def _cut(model: str, start: str, stop: str, output: str) -> None:
    from stages.certification.certify import cut_stage  # noqa: PLC0415 - each is measured without the others

    cut_stage(Path(model), LayerRange(int(start), int(stop)), Path(output))


def _hash(model: str, start: str, stop: str, cache: str) -> None:
    from stages.weights.virtual_stages import StageCache  # noqa: PLC0415

    StageCache(Path(cache)).describe(Path(model), LayerRange(int(start), int(stop)))


def _fetch(store: str, sha256: str, address: str, certificate: str, secret: str) -> None:
    from stages.weights.disk_cache import StageStore  # noqa: PLC0415
    from stages.weights.fetch import FetchSource, fetch_stage  # noqa: PLC0415

    source = FetchSource(address, Path(certificate).read_bytes(), secret)
    asyncio.run(fetch_stage(StageStore(Path(store)), sha256, source))


if __name__ == "__main__":
    main(sys.argv[1:])
