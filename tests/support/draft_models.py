"""Draft models for tests: SmolLM2 in fewer bits, and what it says when it is asked alone."""

from __future__ import annotations

import contextlib
import threading
import time
from typing import TYPE_CHECKING

import numpy as np

from mesh.draft.loading import SETUP
from speculative.draft.context import DraftFile
from speculative.draft.kinds import load_context
from speculative.draft.worker import LoadedDrafter
from speculative.proposer import DrafterKind
from stages.runtime.spans import Span
from stages.runtime.stage_runtime import RuntimeOptions, StageRuntime

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from numpy.typing import NDArray

    from speculative.draft.context import DraftOptions
    from speculative.draft.worker import DraftProposer
    from speculative.proposer import Proposal

_PATIENCE_S = 60.0


@contextlib.contextmanager
def running_draft(
    path: Path,
    options: DraftOptions,
    *,
    num_tokens: int = 1 << 30,
    kind: DrafterKind = DrafterKind.MODEL,
    feature_width: int = 0,
) -> Iterator[LoadedDrafter]:
    """A drafter in this process."""
    file = DraftFile(kind, path, options, num_tokens, feature_width)
    model = LoadedDrafter(file, load_context(file, SETUP), clock_s=time.perf_counter)
    try:
        yield model
    finally:
        model.close()


def greedy(logits: NDArray[np.float32], _position: int, _before: Sequence[int]) -> int:
    return int(np.argmax(logits))


def greedy_alone(path: Path, prompt: Sequence[int], count: int) -> list[int]:
    """What the model answers, by the runtime that stages use, a token at a time."""
    runtime = StageRuntime(path, RuntimeOptions(ctx_size=512))
    try:
        tokens = list(prompt)
        start = 0
        for _ in range(count):
            logits = runtime.decode([Span(0, start, tokens[start:], num_outputs=1)])[0][0]
            start = len(tokens)
            tokens.append(int(np.argmax(logits)))
        return tokens[-count:]
    finally:
        runtime.close()


def wait_for(proposer: DraftProposer, count: int, after: Sequence[int] = ()) -> Proposal:
    """A full proposal; woken by the proposer, never by looking again and again."""
    is_longer = threading.Event()
    proposer.listen(is_longer.set)
    deadline_s = time.monotonic() + _PATIENCE_S
    while len((proposal := proposer.propose(count, after)).tokens) < count:
        assert is_longer.wait(deadline_s - time.monotonic()), f"no more than {proposal}"
        is_longer.clear()
    return proposal
