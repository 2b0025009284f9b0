"""Check of a drafter for a model, from its header to its first drafted tokens."""

from __future__ import annotations

from contextlib import closing
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

from mesh.draft.drafter import drafter_bytes, loadable_bytes, own_head, read_drafter
from mesh.draft.loading import load_drafter
from mesh.text.tokenizer import Tokenizer
from speculative.draft import defaults
from stages.slicing.model_facts import read_model_facts
from stages.transport.hidden_codec import HiddenType

if TYPE_CHECKING:
    from pathlib import Path

    from mesh.draft.drafter import Drafter
    from speculative.draft.context import DraftOptions
    from speculative.proposer import DrafterKind
    from stages.slicing.model_facts import ModelFacts

# Enough for the tokens that loading drafts.
_TRIAL_POSITIONS: Final = 64


@dataclass(frozen=True)
class CheckedDrafter:
    """A drafter that fits its model and drafted some tokens."""

    kind: DrafterKind
    """Its kind."""
    n_layers: int
    """Its own layers."""
    read_layers: tuple[int, ...]
    """Layers of the model whose outputs it reads, in its order; `n_target_layers` stands for the head state.
    """
    n_target_layers: int
    """Layers of the model."""
    feature_bytes_per_token: int
    """Size of their hidden states in f16, for one position; 0 if it reads none."""
    num_tokens: int
    """Token ids that it shares with the model."""
    num_own_tokens: int | None
    """Token ids that it can draft, if fewer."""
    file_bytes: int
    """Size of its file."""
    lacks: tuple[str, ...]
    """Tensors that it takes from the model."""
    loaded_bytes: int
    """Size of the file that is loaded, with those."""
    memory_bytes: int
    """Memory on the head, for all sessions."""
    num_sessions: int
    """How many."""
    ctx_size: int
    """Positions of each."""
    draft_ms_per_token: float
    """Time of a drafted token on this host, in ms."""


def check_drafter(path: Path, target: Path, options: DraftOptions) -> CheckedDrafter:
    """Check a drafter as serving does, and load it.

    Args:
        path: Its file; the model's own for the head that it brings.
        target: The model.
        options: Options of the draft model.

    Raises:
        InvalidModel: If it is no GGUF, a drafter of another model or vocabulary, or cannot draft.
        UncuttableModel: If drafters of its kind cannot be run for this model.
        ModelError: If its file cannot be completed.
        ClusterError: If its KV cache cannot have the format of `options`.
    """
    model = read_model_facts(target)
    drafter = _drafter(path, model)
    # What the real sizes take is computed below: a trial needs no memory for them.
    small = replace(options, ctx_size=_TRIAL_POSITIONS, num_sessions=1)
    with closing(load_drafter(drafter, Tokenizer(target), small)) as loaded:
        num_tokens, draft_ms_per_token = loaded.num_tokens, loaded.draft_ms_per_token
    d2t = drafter.header.tensors.get("d2t")
    return CheckedDrafter(
        kind=drafter.kind,
        n_layers=_num_layers(drafter),
        read_layers=drafter.layers,
        n_target_layers=model.n_layers,
        feature_bytes_per_token=len(drafter.layers) * HiddenType.F16.row_bytes(drafter.n_embd),
        num_tokens=num_tokens,
        num_own_tokens=None if d2t is None else d2t.shape[0],
        file_bytes=drafter.header.file_bytes,
        lacks=drafter.lacks,
        loaded_bytes=loadable_bytes(drafter, target),
        memory_bytes=drafter_bytes(drafter, target, options, defaults.CONTEXT),
        num_sessions=options.num_sessions,
        ctx_size=options.ctx_size,
        draft_ms_per_token=draft_ms_per_token,
    )


def _drafter(path: Path, model: ModelFacts) -> Drafter:
    if path.exists() and path.samefile(model.path) and (head := own_head(model)) is not None:
        return head
    return read_drafter(path, model)


def _num_layers(drafter: Drafter) -> int:
    """Layers that draft: of a head for multi-token prediction the first one only."""
    if drafter.reads_features:
        return 1
    return drafter.header.integer(f"{drafter.header.architecture}.block_count")
