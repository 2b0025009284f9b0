"""Loading of drafters: in a process of their own, since llama.cpp aborts on odd files."""

from __future__ import annotations

import time
from contextlib import ExitStack
from typing import TYPE_CHECKING, Final

from mesh.draft.drafter import loadable_file
from mesh.text.tokenizer import Tokenizer, num_shared_tokens
from mesh.util.logs import set_up_logs
from spanmesh_proto.errors import InvalidModel
from speculative.draft.context import ContextSetup, DraftFile, DraftUnusable
from speculative.draft.isolated_context import ContextEnded, IsolatedContext
from speculative.draft.worker import LoadedDrafter
from stages.gguf import part_paths
from stages.runtime.hidden_tap import TensorTap
from stages.runtime.llama import init_backend, last_complaint
from stages.runtime.numerics import numerics_for, prepare_process

if TYPE_CHECKING:
    from pathlib import Path

    from mesh.draft.drafter import Drafter
    from speculative.draft.context import DraftOptions

# A few tokens take less than a second once the file is read.
_PATIENCE_S: Final = 60.0
_SLOWEST_BYTES_PER_S: Final = 20e6


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
    file = DraftFile(drafter.kind, path, options, target.n_vocab)
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


SETUP: Final = ContextSetup(_prepare, last_complaint, TensorTap, time.monotonic)
"""Setup of the process in which a drafter computes."""
