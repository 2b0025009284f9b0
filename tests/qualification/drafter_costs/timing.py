"""Times of a drafter that reads hidden states, alone in a process: rows with outputs and rows without."""

from __future__ import annotations

import contextlib
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

import numpy as np

from mesh.draft.drafter import loadable_file
from mesh.draft.loading import SETUP
from mesh.util.logs import set_up_logs
from spanmesh_proto.errors import MeshError
from speculative.draft.context import DraftFile, DraftOptions, DraftUnusable, SlotRows
from speculative.draft.kinds import FeatureContext, load_context
from speculative.draft.session import FeatureSpan
from stages.isolated import ProcessEnded, call
from stages.runtime.llama import init_backend

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

    from mesh.draft.drafter import Drafter

# Rows of a prompt come to the drafter so many at a time.
_NUM_ROWS: Final = 64
_NUM_TIMES: Final = 15
_DRAFTER_PATIENCE_S: Final = 120.0


@dataclass(frozen=True)
class DrafterTimes:
    """Times of the drafter for the same number of rows, in ms, in the order measured."""

    num_rows: int
    """How many."""
    absorbed: tuple[float, ...]
    """For its cache only, from features."""
    full: tuple[float, ...]
    """With outputs, from features."""
    chained: tuple[float, ...]
    """With outputs, from states of its own: without its encoder of features."""


def time_drafter(drafter: Drafter, target: Path, num_tokens: int) -> DrafterTimes:
    """Time rows of a drafter with and without outputs, in a process of its own.

    Args:
        drafter: It reads features.
        target: The served model.
        num_tokens: Number of its token ids.

    Raises:
        MeshError: If the drafter cannot be run.
    """
    with tempfile.TemporaryDirectory(prefix="spanmesh-drafter-") as folder:
        path = loadable_file(drafter, target, Path(folder))
        # A session for each row with an output: a batch has one a session.
        options = DraftOptions(ctx_size=2 * _NUM_ROWS, num_sessions=_NUM_ROWS)
        file = DraftFile(drafter.kind, path, options, num_tokens)
        try:
            times: DrafterTimes = call(_times_of, file, silence_s=_DRAFTER_PATIENCE_S)
        except ProcessEnded as ended:
            raise MeshError(f"llama.cpp ended with {drafter.path.name}: {ended}") from None
    return times


def _times_of(file: DraftFile, _report: Callable[..., None]) -> DrafterTimes:
    """What the process does."""
    set_up_logs()
    init_backend()
    try:
        context = load_context(file, SETUP)
    except DraftUnusable as error:
        raise MeshError(f"{file.path.name}: {error}") from None
    with contextlib.closing(context):
        assert isinstance(context, FeatureContext)
        return _times(context)


def _times(context: FeatureContext) -> DrafterTimes:
    random = np.random.default_rng(1)
    features = random.normal(size=(_NUM_ROWS, context.feature_width)).astype(np.float32)
    states = random.normal(size=(_NUM_ROWS, context.width)).astype(np.float32)
    tokens = tuple(range(1, 1 + _NUM_ROWS))
    slots = list(enumerate(tokens))
    kinds = (
        [SlotRows(0, FeatureSpan(1, tokens, features, None, has_output=False, is_anew=True))],
        [SlotRows(slot, _with_output(token, features[slot : slot + 1], None)) for slot, token in slots],
        [SlotRows(slot, _with_output(token, features[:0], states[slot])) for slot, token in slots],
    )
    times_ms: tuple[list[float], ...] = tuple([] for _ in kinds)
    for _ in range(1 + _NUM_TIMES):
        for parts, own_ms in zip(kinds, times_ms, strict=True):
            for slot, _token in slots:
                context.free(slot)
            started_s = time.perf_counter()
            context.decode(parts, contextlib.nullcontext())
            own_ms.append((time.perf_counter() - started_s) * 1e3)
    # The first of each only warms up.
    absorbed, full, chained = (tuple(own_ms[1:]) for own_ms in times_ms)
    return DrafterTimes(_NUM_ROWS, absorbed, full, chained)


def _with_output(token: int, features: NDArray[np.float32], state: NDArray[np.float32] | None) -> FeatureSpan:
    return FeatureSpan(1, (token,), features, state, has_output=True, is_anew=True)
