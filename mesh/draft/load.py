"""Loading a draft model for a target."""

from __future__ import annotations

from typing import TYPE_CHECKING

import structlog

from mesh.text.tokenizer import Tokenizer, num_shared_tokens
from spanmesh_proto.errors import InvalidModel
from speculative.draft.context import DraftUnusable
from speculative.draft.model import DraftModel
from stages.runtime.llama import last_complaint
from stages.runtime.numerics import numerics_for, prepare_process

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from speculative.draft.context import DraftOptions

log = structlog.get_logger()


def load_draft(
    path: Path, target: Tokenizer, options: DraftOptions, *, clock_s: Callable[[], float]
) -> DraftModel:
    """A draft model that means by every token what the target means by it.

    Args:
        path: The GGUF.
        target: The vocabulary of the model that is served.
        options: How it drafts and computes.
        clock_s: Monotonic, seconds.

    Raises:
        InvalidModel: If it is not a GGUF, has another vocabulary or cannot draft.
        ClusterError: If this process computes in a numeric mode that the draft would disturb.
    """
    num_tokens = num_shared_tokens(Tokenizer(path).vocabulary(), target.vocabulary())
    prepare_process(numerics_for(exact=False, num_threads=options.num_threads))
    try:
        model = DraftModel(path, options, num_tokens=num_tokens, clock_s=clock_s)
    except DraftUnusable as error:
        raise InvalidModel(f"{error}; llama.cpp: {last_complaint()}") from error
    log.info("draft_loaded", draft=path.name, ms_per_token=round(model.draft_ms_per_token, 2))
    return model
