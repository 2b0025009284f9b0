"""Loading of drafters: in a process of their own, since llama.cpp aborts on odd files."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mesh.draft.completion import loadable_file
from mesh.draft.isolated_check import SETUP, check_isolated
from mesh.text.tokenizer import Tokenizer, num_shared_tokens
from spanmesh_proto.errors import InvalidModel
from speculative.draft.context import DraftFile, DraftUnusable
from speculative.draft.isolated_context import IsolatedContext
from speculative.draft.loaded_drafter import LoadedDrafter

if TYPE_CHECKING:
    from pathlib import Path

    from mesh.draft.drafter import Drafter
    from speculative.draft.context import DraftOptions


def load_drafter(
    drafter: Drafter, target: Tokenizer, options: DraftOptions, *, root: Path | None = None
) -> LoadedDrafter:
    """Load a drafter of any kind.

    Args:
        drafter: The drafter.
        target: Tokenizer of the served model.
        options: Options of the draft model.
        root: Folder of the cache, the user's unless given.

    Raises:
        InvalidModel: If its vocabulary is not the target's, token by token, or if it cannot draft.
        ModelError: If its file cannot be completed.
    """
    path = loadable_file(drafter, target.path, root)
    # Before the vocabulary is read in this process: llama.cpp aborts on some.
    check_isolated(path, drafter.kind, target.n_vocab, root)
    num_tokens = num_shared_tokens(Tokenizer(path).vocabulary(), target.vocabulary())
    file = DraftFile(drafter.kind, path, options, num_tokens)
    try:
        context = IsolatedContext(file, SETUP)
    except DraftUnusable as error:
        raise InvalidModel(str(error)) from error
    return LoadedDrafter(file, context, clock_s=SETUP.clock_s)
