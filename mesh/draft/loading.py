"""Loading of drafters in a process of their own, and the check of one up to its first drafted tokens."""

from __future__ import annotations

import time
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final

from mesh.draft.drafter import loadable_bytes, loadable_file, own_head, read_drafter
from mesh.draft.memory import drafter_bytes
from mesh.text.tokenizer import Tokenizer, num_shared_tokens
from mesh.util.logs import set_up_logs
from spanmesh_proto.errors import InvalidModel
from speculative.draft.context import ContextSetup, DraftFile, DraftUnusable
from speculative.draft.isolated_context import ContextEnded, IsolatedContext
from speculative.draft.worker import LoadedDrafter
from stages.gguf import part_paths
from stages.runtime.hidden_tap import HeadState, TensorTap
from stages.runtime.llama import init_backend, last_complaint
from stages.runtime.numerics import numerics_for, prepare_process
from stages.slicing.model_facts import read_model_facts
from stages.transport.hidden_codec import HiddenType

if TYPE_CHECKING:
    from pathlib import Path

    from mesh.draft.drafter import Drafter
    from speculative.draft.context import DraftOptions
    from speculative.proposer import DrafterKind
    from stages.slicing.model_facts import ModelFacts

# A few tokens take less than a second once the file is read.
_PATIENCE_S: Final = 60.0
_SLOWEST_BYTES_PER_S: Final = 20e6
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
    """Memory on the head for all sessions; of an assistant, beside the last stage."""
    num_sessions: int
    """How many."""
    ctx_size: int
    """Positions of each."""
    draft_ms_per_token: float
    """Time of a drafted token on this host, in ms; of a block, its time divided by its tokens."""
    most_drafted: int
    """Most tokens that it drafts in one pass: 1, or those of a block."""
    block_tokens: int | None
    """Tokens of the block that was timed; None for drafters of single tokens."""


def load_drafter(
    drafter: Drafter, target: Tokenizer, options: DraftOptions, *, root: Path | None = None
) -> LoadedDrafter:
    """Load a drafter of any kind in a process of its own, and draft a few tokens with it.

    Args:
        drafter: The drafter.
        target: Tokenizer of the served model.
        options: Options of the draft model.
        root: Folder of the cache, the user's unless given.

    Raises:
        InvalidModel: If it cannot draft, if llama.cpp aborts or does not return, or if its vocabulary is not
            the target's, token by token.
        ModelError: If its file cannot be completed.
    """
    path = loadable_file(drafter, target.path, root)
    file = DraftFile(drafter.kind, path, options, target.n_vocab, drafter.feature_width)
    with ExitStack() as on_refusal:
        context = _isolated(file)
        on_refusal.callback(context.close)
        # Not before: llama.cpp aborts on some vocabularies, too.
        num_shared_tokens(Tokenizer(path).vocabulary(), target.vocabulary())
        loaded = LoadedDrafter(file, context, clock_s=SETUP.clock_s)
        on_refusal.pop_all()
    return loaded


def _isolated(file: DraftFile) -> IsolatedContext:
    name = file.path.name
    num_bytes = sum(part.stat().st_size for part in part_paths(file.path))
    limit_s = _PATIENCE_S + num_bytes / _SLOWEST_BYTES_PER_S
    try:
        return IsolatedContext(file, SETUP, limit_s=limit_s)
    except ContextEnded as ended:
        failure = f"aborts when it drafts with {name} (exit code {ended.exit_code})"
        if ended.was_late:
            failure = f"does not finish a few tokens with {name} in {limit_s:.0f} s"
        raise InvalidModel(f"llama.cpp {failure}: use another drafter, or none") from None
    except DraftUnusable as error:
        raise InvalidModel(f"{name} cannot draft: {error}") from error


def _prepare() -> None:
    # For speed: drafted tokens are verified.
    set_up_logs()
    init_backend()
    prepare_process(numerics_for(exact=False, num_threads=1))


def _head_rows(context: Any, n_embd: int) -> HeadState | None:
    try:
        head = HeadState(context, n_embd)
    except ImportError:
        return None
    head.keep(is_kept=True)
    return head


SETUP: Final = ContextSetup(_prepare, last_complaint, TensorTap, _head_rows, time.monotonic)
"""Setup of the process in which a drafter computes."""


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
        n_layers=drafter.num_drafting_layers,
        read_layers=drafter.layers,
        n_target_layers=model.n_layers,
        feature_bytes_per_token=len(drafter.layers) * HiddenType.F16.row_bytes(drafter.n_embd),
        num_tokens=num_tokens,
        num_own_tokens=None if d2t is None else d2t.shape[0],
        file_bytes=drafter.header.file_bytes,
        lacks=drafter.lacks,
        loaded_bytes=loadable_bytes(drafter, target),
        memory_bytes=drafter_bytes(drafter, target, options),
        num_sessions=options.num_sessions,
        ctx_size=options.ctx_size,
        draft_ms_per_token=draft_ms_per_token,
        most_drafted=drafter.most_drafted,
        block_tokens=min(drafter.most_drafted, options.draft_max) if drafter.most_drafted > 1 else None,
    )


def _drafter(path: Path, model: ModelFacts) -> Drafter:
    if path.exists() and path.samefile(model.path) and (head := own_head(model)) is not None:
        return head
    return read_drafter(path, model)
