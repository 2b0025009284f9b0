"""Times of a drafter that reads hidden states, alone in a process.

Of one that drafts single tokens: rows with outputs and rows without. Of one that drafts blocks: blocks, by
their length, and features that it reads.
"""

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
from speculative.draft.block_context import BlockContext
from speculative.draft.block_sequence import BlockSpan
from speculative.draft.context import DraftFile, DraftOptions, DraftUnusable, SlotRows
from speculative.draft.kinds import FeatureContext, load_context
from speculative.draft.session import FeatureSpan
from stages.isolated import ProcessEnded, call
from stages.runtime.llama import init_backend

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from numpy.typing import NDArray

    from mesh.draft.drafter import Drafter

# Rows of a prompt come to the drafter so many at a time.
_NUM_ROWS: Final = 64
_NUM_TIMES: Final = 15
_DRAFTER_PATIENCE_S: Final = 120.0
# Of features that are read, and of tokens in a block.
_NUM_READ: Final = (1, 8, 64)
_LENGTHS: Final = (1, 2, 4, 8, 15)


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


@dataclass(frozen=True)
class BlockTimes:
    """Shortest times of a drafter of blocks, in ms."""

    blocks_ms: Mapping[int, float]
    """Of a block, by its tokens."""
    reading_ms: Mapping[int, float]
    """Of features that are read, by their rows."""


def time_drafter(drafter: Drafter, target: Path, num_tokens: int) -> DrafterTimes | BlockTimes:
    """Time a drafter in a process of its own.

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
        num_sessions = _NUM_ROWS if drafter.most_drafted == 1 else 1
        options = DraftOptions(
            ctx_size=2 * _NUM_ROWS, num_sessions=num_sessions, draft_max=max(_LENGTHS), draft_min=1
        )
        file = DraftFile(drafter.kind, path, options, num_tokens, drafter.feature_width)
        try:
            times: DrafterTimes | BlockTimes = call(_times_of, file, silence_s=_DRAFTER_PATIENCE_S)
        except ProcessEnded as ended:
            raise MeshError(f"llama.cpp ended with {drafter.path.name}: {ended}") from None
    return times


def _times_of(file: DraftFile, _report: Callable[..., None]) -> DrafterTimes | BlockTimes:
    """What the process does."""
    set_up_logs()
    init_backend()
    try:
        context = load_context(file, SETUP)
    except DraftUnusable as error:
        raise MeshError(f"{file.path.name}: {error}") from None
    with contextlib.closing(context):
        if isinstance(context, BlockContext):
            return _block_times(context)
        assert isinstance(context, FeatureContext)
        return _times(context)


def _block_times(context: BlockContext) -> BlockTimes:
    random = np.random.default_rng(1)
    features = random.normal(size=(2 * _NUM_ROWS, context.feature_width)).astype(np.float32)

    def span(start: int, stop: int, num_drafted: int) -> BlockSpan:
        return BlockSpan(
            start,
            tuple(range(start, stop)),
            features[start - 1 : stop - 1],
            None,
            has_output=num_drafted > 0,
            is_anew=start == 1,
            num_drafted=num_drafted,
        )

    def shortest_ms(timed: BlockSpan) -> float:
        times_ms = []
        for _ in range(_NUM_TIMES):
            started_s = time.perf_counter()
            context.decode([SlotRows(0, timed)], contextlib.nullcontext())
            times_ms.append((time.perf_counter() - started_s) * 1e3)
        return min(times_ms)

    context.decode([SlotRows(0, span(1, _NUM_ROWS, 0))], contextlib.nullcontext())
    reading_ms = {num_rows: shortest_ms(span(_NUM_ROWS, _NUM_ROWS + num_rows, 0)) for num_rows in _NUM_READ}
    lengths = [length for length in _LENGTHS if length <= context.most_drafted]
    # A block is drafted behind a row that is read.
    blocks_ms = {
        length: shortest_ms(span(_NUM_ROWS, _NUM_ROWS + 1, length)) - reading_ms[1] for length in lengths
    }
    return BlockTimes(blocks_ms, reading_ms)


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
