"""Stage profiler: times a stage with blank weights, in a child process or a Ray actor.

Run as a program: a request as JSON on standard input, timings as JSON on standard output. Its process takes
llama.cpp's memory with it; on other hosts Ray starts one, see `StageProfiler`.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import Any, Final

import numpy as np
import structlog

from spanmesh_proto.errors import MeshError, ModelDoesNotFit
from stages.cancellable_work import in_own_thread
from stages.host.cpu_latency import CpuLatencyRequest
from stages.host.profile_request import ProfileRequest, StageTiming
from stages.runtime.process_memory import free_memory_bytes
from stages.runtime.spans import Span
from stages.runtime.stage_runtime import RuntimeOptions, StageRuntime
from stages.sampling.sampler import SamplingParams
from stages.sampling.verifier import WindowVerifier
from stages.units import format_size

# Weights may be in memory twice: as the file's pages, and repacked for the processor.
_WEIGHT_COPIES: Final = 2
_BESIDE_BYTES: Final = 256 * 2**20
_NUM_WARM_UP: Final = 3
_NUM_CHUNKS: Final = 3


class _Player:
    """Computes windows as a stage's worker does, as far as it takes time."""

    def __init__(self, runtime: StageRuntime) -> None:
        self._runtime = runtime
        self._verifier = WindowVerifier(SamplingParams())
        # Arbitrary values of a plausible magnitude; the blank norms turn them into zeros.
        shape = (runtime.max_rows, runtime.info.n_embd)
        self._hidden = np.random.default_rng(0).standard_normal(shape, np.float32)

    def play(self, start: int, num_rows: int) -> None:
        info = self._runtime.info
        hidden = None if info.is_first else self._hidden[:num_rows]
        span = Span(0, start, [0] * num_rows, hidden, num_outputs=1 if info.is_tail else 0)
        (output,) = self._runtime.decode([span])
        if info.is_tail:
            self._verifier.verify(output, span.tokens, start)
        else:
            output.tobytes()

    def median_ms(self, request: ProfileRequest, num_rows: int, num_warm_up: int, num_rounds: int) -> float:
        times_ms = []
        for number in range(num_warm_up + num_rounds):
            time.sleep(request.pause_ms / 1e3)
            start_s = time.perf_counter()
            self.play(request.position, num_rows)
            if number >= num_warm_up:
                times_ms.append((time.perf_counter() - start_s) * 1e3)
        return median(times_ms)


class StageProfiler:
    """Ray actor that times stages on one host."""

    async def profile(self, fields: dict[str, Any]) -> dict[str, Any]:
        """Time the stage of a request; see `profile_stage`."""
        request = ProfileRequest.from_dict(fields)
        return asdict(await in_own_thread(profile_stage, request))


def profile_stage(request: ProfileRequest) -> StageTiming:
    """Load the blank stage, time it, and remove it.

    Raises:
        ModelDoesNotFit: If there is not enough memory for it.
        InvalidModel: If llama.cpp cannot load it.
        MeshError: If it cannot compute it.
    """
    needed_bytes = _WEIGHT_COPIES * request.blank.num_bytes + _BESIDE_BYTES
    free_bytes = free_memory_bytes()
    if needed_bytes > free_bytes:
        raise ModelDoesNotFit(
            f"timing a stage needs up to {format_size(needed_bytes)} of memory, {format_size(free_bytes)} "
            "are free; stop other programs on this host"
        )
    with tempfile.TemporaryDirectory(prefix="mesh-rehearsal-") as folder:
        path = Path(folder) / "blank.gguf"
        request.blank.write(path)
        return _time(path, request)


def _time(path: Path, request: ProfileRequest) -> StageTiming:
    cpu_latency = CpuLatencyRequest()
    runtime: StageRuntime | None = None
    try:
        options = RuntimeOptions(
            ctx_size=request.position + 128,
            num_threads=request.num_threads,
            exact=request.is_exact,
            kv_type=request.kv_type,
            gpu_layers=request.gpu_layers,
            cpu_moe_layers=request.cpu_moe_layers,
        )
        runtime = StageRuntime(path, options)
        cpu_latency.update(1)
        player = _Player(runtime)
        chunk_rows = runtime.max_rows
        for start in range(0, request.position, chunk_rows):
            player.play(start, min(chunk_rows, request.position - start))
        return StageTiming(
            row_ms=player.median_ms(request, 1, _NUM_WARM_UP, request.num_rounds),
            # These take long, so that few measurements suffice.
            chunk_ms=player.median_ms(request, chunk_rows, 1, _NUM_CHUNKS),
            chunk_rows=chunk_rows,
        )
    finally:
        cpu_latency.update(0)
        if runtime is not None:
            runtime.close()


def main() -> None:
    """One request from standard input; exits with 1 and the reason if it cannot be timed."""
    structlog.configure(logger_factory=structlog.PrintLoggerFactory(file=sys.stderr))
    try:
        timing = profile_stage(ProfileRequest.from_dict(json.load(sys.stdin)))
    except MeshError as error:
        sys.exit(error.message)
    sys.stdout.write(json.dumps(asdict(timing)) + "\n")


if __name__ == "__main__":
    main()
