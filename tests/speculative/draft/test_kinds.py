"""Kinds of drafters: each has its parts, and its proposers do what the kind does."""

from __future__ import annotations

import contextlib
import gc
import time
import weakref
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from speculative.draft.context import DraftFile, DraftOptions
from speculative.draft.kinds import KINDS
from speculative.draft.session import FeatureSequence
from speculative.draft.worker import LoadedDrafter
from speculative.proposer import DRAFTERS, DrafterKind, FeatureReader

if TYPE_CHECKING:
    from collections.abc import Iterator

WIDTH = 3


class IdleContext:
    """Computes nothing."""

    num_tokens = 5
    ms_per_token = 2.0
    feature_width = WIDTH
    most_drafted = 4
    thread_id: int | None = None
    is_alive = True
    is_open = True

    def decode(self, parts: Any, while_computing: Any) -> None:
        return None

    def abort(self) -> None: ...

    def resume(self) -> None: ...

    def is_end(self, token: int) -> bool:
        return token == 1

    def copy(self, source: int, slot: int, num_tokens: int) -> None: ...

    def free(self, slot: int) -> None: ...

    def close(self) -> None:
        self.is_open = False


@contextlib.contextmanager
def idle_drafter(kind: DrafterKind) -> Iterator[LoadedDrafter]:
    file = DraftFile(kind, Path("drafter.gguf"), DraftOptions(), 5)
    context = IdleContext()
    drafter = LoadedDrafter(file, context, clock_s=time.monotonic)
    try:
        yield drafter
    finally:
        drafter.close()
    assert not context.is_open


def test_each_kind_has_its_parts_and_a_name_of_its_own() -> None:
    assert KINDS.keys() == set(DrafterKind) - {DrafterKind.ASSISTANT}
    # Drafters of blocks have their context in common.
    assert len({parts.context for parts in KINDS.values() if parts.most_drafted == 1}) == 3
    names = ["eagle3", "mtp", "dflash", "dspark", "dflash2", "assistant"]
    assert list(DRAFTERS) == ["draft", *names]
    assert [f"{kind}" for kind in DrafterKind] == ["model", *names]


@pytest.mark.parametrize("kind", list(KINDS))
def test_a_proposer_has_the_name_of_its_kind_and_takes_features_if_that_reads_any(kind: DrafterKind) -> None:
    with idle_drafter(kind) as drafter:
        assert (drafter.num_tokens, drafter.draft_ms_per_token) == (5, 2.0)
        proposer = drafter.open(lambda _logits, _position, _before: 0)
        assert proposer.name == kind.proposer
        assert isinstance(proposer, FeatureReader) is (kind is not DrafterKind.MODEL)
        if isinstance(proposer, FeatureReader):
            sequence = proposer._session.sequence
            assert isinstance(sequence, FeatureSequence)
            proposer.take_features(4, np.ones((2, WIDTH), np.float32))
            assert sorted(sequence.features) == [4, 5]
        proposer.close()


@pytest.mark.parametrize("kind", list(KINDS))
def test_a_closed_proposer_is_gone_with_its_features(kind: DrafterKind) -> None:
    with idle_drafter(kind) as drafter:
        proposer = drafter.open(lambda _logits, _position, _before: 0)
        proposer.close()
        left = weakref.ref(proposer)
        gc.disable()
        try:
            del proposer
            assert left() is None
        finally:
            gc.enable()
