"""Rows that a drafter only absorbs end behind the KV cache, and leave in it what whole graphs would."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import llama_cpp
import numpy as np
import pytest

from mesh.draft.drafter import loadable_file, own_head, read_drafter
from mesh.draft.loading import SETUP
from mesh.text.tokenizer import Tokenizer
from speculative.draft.context import DraftFile, DraftOptions, SlotRows
from speculative.draft.kinds import KINDS
from speculative.draft.session import FeatureSpan
from speculative.proposer import DrafterKind
from stages.runtime.hidden_tap import TensorTap
from stages.runtime.llama import ggml_base, init_backend
from stages.slicing.model_facts import read_model_facts
from tests.support.eagle3 import DRAFTER
from tests.support.mimo2 import write_mimo2

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from numpy.typing import NDArray

pytestmark = pytest.mark.model

NUM_ABSORBED = 12


class NodeTap(TensorTap):
    """Also notes the nodes of each graph; can let all graphs run to their ends."""

    def __init__(self, width: int, max_rows: int, *, may_end: bool) -> None:
        super().__init__(width, max_rows)
        self.nodes: list[str] = []
        self._may_end = may_end
        compiled: Callable[[Any, bool, Any], bool] = self.callback

        def note(tensor: Any, ask: bool, data: Any) -> bool:  # noqa: FBT001 - C calls it
            if ask:
                self.nodes.append(ggml_base().ggml_get_name(tensor).decode())
            return compiled(tensor, ask, data)

        self.callback = llama_cpp.ggml_backend_sched_eval_callback(note)

    def end_behind(self, name: str) -> None:
        self.nodes.clear()
        super().end_behind(name if self._may_end else "")


def output(
    path: Path, kind: DrafterKind, num_tokens: int, *, may_end: bool
) -> tuple[NDArray[np.float32], list[str]]:
    """Logits of a row behind absorbed ones, and the nodes of the graph that absorbed them."""
    taps: list[NodeTap] = []

    def make_tap(width: int, max_rows: int) -> NodeTap:
        taps.append(NodeTap(width, max_rows, may_end=may_end))
        return taps[-1]

    file = DraftFile(kind, path, DraftOptions(ctx_size=64, num_sessions=2), num_tokens)
    context = KINDS[kind].context(file, replace(SETUP, make_tap=make_tap))
    with contextlib.closing(context):
        features = np.random.default_rng(1).normal(size=(NUM_ABSORBED + 1, context.feature_width))
        rows = features.astype(np.float32)
        tokens = tuple(range(1, NUM_ABSORBED + 2))
        span = FeatureSpan(1, tokens[:-1], rows[:-1], None, has_output=False, is_anew=True)
        assert context.decode([SlotRows(0, span)], contextlib.nullcontext()) == [None]
        nodes = list(taps[0].nodes)
        last = FeatureSpan(len(tokens), tokens[-1:], rows[-1:], None, has_output=True, is_anew=False)
        outputs = context.decode([SlotRows(0, last)], contextlib.nullcontext())
        assert outputs is not None
        assert outputs[0] is not None
        return outputs[0].values.copy(), nodes


@pytest.mark.parametrize("kind", [DrafterKind.EAGLE3, DrafterKind.MTP])
def test_absorbed_rows_end_behind_the_cache(kind: DrafterKind, tmp_path: Path, smollm2_path: Path) -> None:
    init_backend()
    if kind is DrafterKind.MTP:
        target = write_mimo2(smollm2_path, tmp_path / "mimo2.gguf")
        drafter = own_head(read_model_facts(target))
    else:
        target = smollm2_path
        drafter = read_drafter(DRAFTER, read_model_facts(target))
    assert drafter is not None
    path = loadable_file(drafter, target, tmp_path)
    num_tokens = Tokenizer(target).n_vocab
    found, nodes = output(path, kind, num_tokens, may_end=True)
    expected, all_nodes = output(path, kind, num_tokens, may_end=False)
    assert np.array_equal(found, expected)
    assert any(node.startswith("ffn_") for node in all_nodes)
    assert nodes == all_nodes[: len(nodes)]
    assert nodes[-1].startswith("cache_v_l")
    assert not any(node.startswith(("ffn_", "kqv")) for node in nodes)
