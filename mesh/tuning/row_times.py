"""Times on this host: of a window's rows, by a model without weights in a process of its own; of drafters."""

from __future__ import annotations

import contextlib
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Final

from mesh.draft.loading import check_drafter
from mesh.tuning.report import RingTimes
from mesh.util.logs import set_up_logs
from spanmesh_proto.errors import InvalidModel
from speculative.draft.context import DraftOptions
from stages.isolated import ProcessEnded, call
from stages.layers import LayerRange
from stages.runtime.numerics import numerics_for, prepare_process
from stages.runtime.spans import Span
from stages.runtime.stage_runtime import RuntimeOptions, StageRuntime
from stages.slicing.model_facts import read_model_facts
from stages.slicing.source_model import read_source
from stages.slicing.stage_writer import blank_stage

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from stages.slicing.model_facts import ModelFacts

# A larger model is timed by its first layers, and the rest is added in proportion to the bytes.
_MOST_BYTES: Final = 512 * 2**20
_NUM_ROWS: Final = (1, 2, 3, 5, 9)
# Rows before those that are timed.
_POSITION: Final = 64
_CTX_SIZE: Final = 256
_NUM_ROUNDS: Final = 7


def measured_rows_ms(target: Path) -> tuple[tuple[int, float], ...]:
    """Rows of a window, and the time of all layers of a model for them.

    Raises:
        InvalidModel: If llama.cpp cannot compute the model.
    """
    try:
        found: tuple[tuple[int, float], ...] = call(_measure, target)
    except ProcessEnded as ended:
        raise InvalidModel(
            f"llama.cpp aborts when it computes {target.name} without its weights (exit code "
            f"{ended.exit_code})"
        ) from None
    return found


def ring_times(target: Path, drafters: Sequence[Path], num_stages: int) -> list[RingTimes]:
    """Times on this host of a model and of each of its drafters.

    Raises:
        ModelError: If one of them cannot be computed.
    """
    rows_ms = measured_rows_ms(target)
    return [
        RingTimes(rows_ms, check_drafter(path, target, DraftOptions()).draft_ms_per_token, num_stages)
        for path in drafters
    ]


def _measure(target: Path, _report: Callable[..., None]) -> tuple[tuple[int, float], ...]:
    set_up_logs()
    prepare_process(numerics_for(exact=False, num_threads=1))
    facts, source = read_model_facts(target), read_source(target)
    stop = _stop(facts)
    total = sum(facts.layer_bytes) + facts.head_bytes
    part = total if stop == facts.n_layers else sum(facts.layer_bytes[:stop])
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "blank.gguf"
        blank_stage(source, LayerRange(0, stop)).write(path)
        with contextlib.closing(StageRuntime(path, RuntimeOptions(ctx_size=_CTX_SIZE))) as runtime:
            runtime.decode([Span(0, 0, [0] * _POSITION)])
            return tuple((count, total / part * _best_ms(runtime, count)) for count in _NUM_ROWS)


def _stop(facts: ModelFacts) -> int:
    """First layer that is not timed."""
    fitting = [cut for cut in facts.allowed_cuts if sum(facts.layer_bytes[:cut]) <= _MOST_BYTES]
    is_small = sum(facts.layer_bytes) + facts.head_bytes <= _MOST_BYTES
    return (
        facts.n_layers if is_small or not facts.allowed_cuts else max(fitting, default=facts.allowed_cuts[0])
    )


def _best_ms(runtime: StageRuntime, num_rows: int) -> float:
    """Least time of several rounds: what others compute meanwhile makes some longer."""
    num_outputs = num_rows if runtime.info.is_tail else 0
    times_ms = []
    for _ in range(_NUM_ROUNDS):
        begun_s = time.perf_counter()
        runtime.decode([Span(0, _POSITION, [0] * num_rows, None, num_outputs)])
        times_ms.append(1e3 * (time.perf_counter() - begun_s))
    return min(times_ms)
