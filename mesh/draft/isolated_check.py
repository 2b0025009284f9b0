"""Isolated check: the first load of a drafter, in a process of its own, since llama.cpp aborts on odd ones.

A drafter that passed is remembered, so that it is checked once. Also the setup of the process in which a
drafter computes later.
"""

from __future__ import annotations

import hashlib
import time
from contextlib import suppress
from importlib.metadata import version
from typing import TYPE_CHECKING, Final

import structlog

from mesh.util.logs import set_up_logs
from spanmesh_proto.errors import InvalidModel
from speculative.draft.context import ContextSetup, DraftFile, DraftOptions, DraftUnusable
from speculative.draft.kinds import load_context
from stages.isolated import ProcessEnded, ProcessSilent, call
from stages.runtime.hidden_tap import TensorTap
from stages.runtime.llama import init_backend, last_complaint
from stages.runtime.numerics import numerics_for, prepare_process
from stages.weights.disk_cache import default_root
from stages.weights.hashing import stamps_of

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from speculative.proposer import DrafterKind

# Enough for the tokens that loading drafts.
_OPTIONS = DraftOptions(ctx_size=64)
# A few tokens take less than a second once the file is read.
_PATIENCE_S: Final = 60.0
_SLOWEST_BYTES_PER_S: Final = 20e6

log = structlog.get_logger()


def check_isolated(path: Path, kind: DrafterKind, num_tokens: int, root: Path | None = None) -> None:
    """Load a drafter and draft with it, in a process that may end, unless that went well before.

    Args:
        path: The file that llama.cpp loads.
        kind: Its kind.
        num_tokens: Number of token ids of the target.
        root: Folder of the cache, the user's unless given.

    Raises:
        InvalidModel: If it cannot draft, or llama.cpp aborts or does not return.
    """
    told = f"{version('llama-cpp-python')} {kind} {num_tokens} {path} {stamps_of((path,))}"
    folder = (root if root is not None else default_root()) / "drafters" / "checked"
    passed = folder / hashlib.sha256(told.encode()).hexdigest()[:32]
    if passed.exists():
        return
    load_isolated(path, kind, num_tokens)
    with suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True)
        passed.touch()


def load_isolated(path: Path, kind: DrafterKind, num_tokens: int) -> float:
    """Load a drafter and draft with it, in a process that may end.

    Args:
        path: The file that llama.cpp loads.
        kind: Its kind.
        num_tokens: Number of token ids of the target.

    Returns:
        Time of a drafted token, in ms.

    Raises:
        InvalidModel: If it cannot draft, or llama.cpp aborts or does not return.
    """
    limit_s = _PATIENCE_S + path.stat().st_size / _SLOWEST_BYTES_PER_S
    try:
        drafted_ms: float = call(_load, path, kind, num_tokens, silence_s=limit_s)
    except ProcessSilent:
        raise InvalidModel(
            f"llama.cpp does not finish a few tokens with {path.name} in {limit_s:.0f} s: use another "
            "drafter, or none"
        ) from None
    except ProcessEnded as ended:
        raise InvalidModel(
            f"llama.cpp aborts when it drafts with {path.name} ({ended}): use another drafter, or none"
        ) from None
    return drafted_ms


def _load(path: Path, kind: DrafterKind, num_tokens: int, _report: Callable[..., None]) -> float:
    """Work of the process."""
    _prepare()
    try:
        context = load_context(DraftFile(kind, path, _OPTIONS, num_tokens), SETUP)
    except DraftUnusable as error:
        reason = f"{path.name} cannot draft: {error}; llama.cpp: {last_complaint()}"
        raise InvalidModel(reason) from None
    context.close()
    return context.ms_per_token


def _prepare() -> None:
    # For speed: drafted tokens are verified.
    set_up_logs()
    init_backend()
    prepare_process(numerics_for(exact=False, num_threads=1))


SETUP: Final = ContextSetup(_prepare, last_complaint, TensorTap, time.monotonic)
"""Setup of the process in which a drafter computes."""
