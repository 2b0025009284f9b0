"""What a pass of a block drafter is measured to cost, and how sure it is of its tokens."""

from __future__ import annotations

import contextlib
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from speculative.draft.context import DraftFile, DraftOptions, DraftOutput, SlotRows
from speculative.draft.worker import LoadedDrafter
from speculative.proposer import DrafterKind

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from speculative.draft.block_sequence import BlockSpan
    from speculative.draft.worker import DraftProposer
    from speculative.proposer import Proposal, Replace

PASS_MS, ROW_MS = 10.0, 2.0
NUM_TOKENS = 8


class TimedContext:
    """Drafts zeros; a pass takes `PASS_MS` and `ROW_MS` for each of its tokens."""

    num_tokens = NUM_TOKENS
    ms_per_token = PASS_MS / 8 + ROW_MS
    feature_width = 1
    most_drafted = 8
    thread_id: int | None = None
    is_alive = True

    def __init__(self, confidence: float | None = None) -> None:
        self.now_s = 0.0
        self._confidence = confidence

    def decode(self, parts: Sequence[SlotRows[BlockSpan]], while_computing: Any) -> list[DraftOutput | None]:
        num_drafted = sum(part.span.num_drafted for part in parts)
        self.now_s += (PASS_MS + ROW_MS * num_drafted) / 1000
        return [self._output(part.span.num_drafted) if part.span.has_output else None for part in parts]

    def _output(self, num_drafted: int) -> DraftOutput:
        confidences = None
        if self._confidence is not None:
            confidences = np.full(num_drafted, self._confidence, np.float32)
        return DraftOutput(np.zeros((num_drafted, NUM_TOKENS), np.float32), confidences=confidences)

    def abort(self) -> None: ...

    def resume(self) -> None: ...

    def is_end(self, token: int) -> bool:
        return False

    def copy(self, source: int, slot: int, num_tokens: int) -> None: ...

    def free(self, slot: int) -> None: ...

    def close(self) -> None: ...


@contextlib.contextmanager
def proposing(context: TimedContext, replace: Replace | None = None) -> Iterator[DraftProposer]:
    """A proposer of blocks of zeros, or of others that stand for them."""
    file = DraftFile(DrafterKind.DFLASH, Path("drafter.gguf"), DraftOptions(), NUM_TOKENS)
    with contextlib.closing(LoadedDrafter(file, context, clock_s=lambda: context.now_s)) as loaded:
        yield loaded.open(lambda _logits, _position, _before: 0, replace=replace)


def test_lengths_and_times_of_blocks_are_measured() -> None:
    context = TimedContext()
    with proposing(context) as proposer:
        is_ready = threading.Event()
        proposer.listen(is_ready.set)
        assert proposer.draft_cost.tokens_per_pass == 8.0
        text = [1, 2, 3]
        proposer.extend(text)
        for number in range(60):
            count = (2, 4, 6)[number % 3]
            is_ready.clear()
            proposer.take_features(len(text) - 3, np.zeros((2, 1), np.float32))
            assert proposer.propose(count).tokens == ()
            assert is_ready.wait(10.0)
            assert proposer.propose(count).tokens == (0,) * count
            proposer.extend([0, 5])
            text += [0, 5]
        cost = proposer.draft_cost
        assert cost.row_ms == pytest.approx(ROW_MS, rel=0.2)
        assert cost.tokens_per_pass == pytest.approx(4.0, rel=0.2)
        assert cost.ms_per_token == pytest.approx(PASS_MS / 4 + ROW_MS, rel=0.25)


@pytest.mark.parametrize(
    ("confidence", "likelihood"), [(None, 1 / NUM_TOKENS), (0.25, 0.25), (np.nan, None), (1.5, None)]
)
def test_confidences_take_the_place_of_probabilities(
    confidence: float | None, likelihood: float | None
) -> None:
    with proposing(TimedContext(confidence)) as proposer:
        session = proposer._session
        is_ready = threading.Event()
        proposer.listen(is_ready.set)
        proposer.extend([1, 2, 3])
        proposer.take_features(0, np.zeros((2, 1), np.float32))
        proposer.propose(2)
        deadline_s = time.monotonic() + 10.0
        while not is_ready.is_set() and session.error is None and time.monotonic() < deadline_s:
            time.sleep(0.001)
        if likelihood is None:
            with pytest.raises(ValueError, match="is sure of token 0 to"):
                proposer.propose(2)
        else:
            assert proposer.propose(2).confidences == pytest.approx((likelihood, likelihood))


def proposed(proposer: DraftProposer, count: int) -> Proposal:
    """What it proposes once it has drafted."""
    is_ready = threading.Event()
    proposer.listen(is_ready.set)
    proposer.extend([1, 2, 3])
    proposer.take_features(0, np.zeros((2, 1), np.float32))
    proposer.propose(count)
    assert is_ready.wait(10.0)
    return proposer.propose(count)


def test_others_stand_for_a_block_that_was_computed_all_the_same() -> None:
    context = TimedContext(0.25)
    asked = []

    def instead(text: Sequence[int], count: int) -> tuple[Sequence[int], Sequence[float]]:
        asked.append((tuple(text), count))
        return (4, 5, 6), (0.9, 0.8, 0.7)

    with proposing(context, instead) as proposer:
        found = proposed(proposer, 4)
        assert (found.tokens, found.confidences, found.depths) == ((4, 5, 6), (0.9, 0.8, 0.7), (1, 2, 3))
        assert found.proposer == "dflash"
        assert asked == [((1, 2, 3), 4)]
        assert context.now_s == pytest.approx((PASS_MS + 4 * ROW_MS) / 1000)


def test_what_stands_for_drafts_and_fails_ends_the_drafting_of_its_session_alone() -> None:
    def fails(_text: Sequence[int], _count: int) -> tuple[Sequence[int], Sequence[float]]:
        raise ValueError("no answer")

    with proposing(TimedContext(), fails) as proposer:
        proposer.extend([1, 2, 3])
        proposer.take_features(0, np.zeros((2, 1), np.float32))
        proposer.propose(2)
        deadline_s = time.monotonic() + 10.0
        while proposer._session.error is None and time.monotonic() < deadline_s:
            time.sleep(0.001)
        with pytest.raises(ValueError, match="no answer"):
            proposer.propose(2)
