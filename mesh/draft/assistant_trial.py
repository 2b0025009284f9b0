"""Trial of an assistant: a few tokens in a process of its own, beside layers without weights.

llama.cpp aborts on some files, and beside a stage that would end the stage. The layers are those of the
model's shortest possible last stage.
"""

from __future__ import annotations

import contextlib
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Final

import numpy as np

from mesh.draft.assistant_file import ARCHITECTURE
from mesh.draft.drafter import read_drafter, with_drafter
from mesh.draft.loading import CheckedDrafter, check_drafter
from mesh.util.logs import set_up_logs
from spanmesh_proto.errors import InvalidModel, MeshError
from stages.gguf import read_header
from stages.isolated import ProcessEnded, ProcessSilent, call
from stages.layers import LayerRange
from stages.runtime.assistant import Assistant, DraftStart
from stages.runtime.spans import Span
from stages.runtime.stage_runtime import RuntimeOptions, StageRuntime
from stages.slicing.model_facts import read_model_facts
from stages.slicing.source_model import read_source
from stages.slicing.stage_writer import blank_stage

if TYPE_CHECKING:
    from collections.abc import Callable

    from speculative.draft.context import DraftOptions

# As for other drafters: reading the file takes longest.
_PATIENCE_S: Final = 60.0
_SLOWEST_BYTES_PER_S: Final = 20e6
_CTX_SIZE: Final = 64
_NUM_TOKENS: Final = 4


def try_assistant(path: Path, target: Path) -> float:
    """Draft a few tokens with an assistant that fits a model, by their headers.

    Args:
        path: Its file.
        target: The model's file.

    Returns:
        Time of a drafted token on this host, in ms.

    Raises:
        InvalidModel: If it cannot draft, or if llama.cpp aborts or does not return.
    """
    limit_s = _PATIENCE_S + path.stat().st_size / _SLOWEST_BYTES_PER_S
    try:
        ms_per_token: float = call(draft_beside_blank, path, target, silence_s=limit_s)
    except ProcessEnded as ended:
        failure = f"aborts when it drafts with {path.name} (exit code {ended.exit_code})"
    except ProcessSilent:
        failure = f"does not finish a few tokens with {path.name} in {limit_s:.0f} s"
    except MeshError as error:
        raise InvalidModel(f"{path.name} cannot draft: {error.message}") from error
    else:
        return ms_per_token
    raise InvalidModel(f"llama.cpp {failure}: use another drafter, or none")


def check_any_drafter(path: Path, target: Path, options: DraftOptions) -> CheckedDrafter:
    """Check a drafter as serving does: an assistant by its trial, others by loading them.

    Args:
        path: Its file; the model's own for the head that it brings.
        target: The model.
        options: Options of the draft model.

    Raises:
        MeshError: See `check_drafter`.
    """
    if read_header(path).architecture != ARCHITECTURE:
        return check_drafter(path, target, options)
    model = read_model_facts(target)
    drafter = read_drafter(path, model)
    beside = with_drafter(model, drafter, options.num_sessions)
    return CheckedDrafter(
        kind=drafter.kind,
        n_layers=drafter.num_drafting_layers,
        read_layers=(),
        n_target_layers=model.n_layers,
        feature_bytes_per_token=0,
        num_tokens=model.n_vocab,
        num_own_tokens=None,
        file_bytes=drafter.header.file_bytes,
        lacks=(),
        loaded_bytes=drafter.header.file_bytes,
        memory_bytes=beside.head_bytes
        + beside.head_packing_bytes
        - model.head_bytes
        - model.head_packing_bytes,
        num_sessions=options.num_sessions,
        ctx_size=options.ctx_size,
        draft_ms_per_token=try_assistant(path, target),
        most_drafted=1,
        block_tokens=None,
    )


def draft_beside_blank(path: Path, target: Path, _send: Callable[..., None]) -> float:
    """The trial itself, in this process.

    Args:
        path: As for `try_assistant`.
        target: Likewise.
        _send: Of no use here, see `stages.isolated.call`.

    Returns:
        Time of a drafted token, in ms.

    Raises:
        MeshError: If it cannot draft.
    """
    set_up_logs()
    model = read_source(target)
    n_layers = model.n_layers
    start = max((cut for cut in model.allowed_cuts if cut <= n_layers - 2), default=0)
    with tempfile.TemporaryDirectory() as folder:
        blank = Path(folder) / "blank.gguf"
        blank_stage(model, LayerRange(start, n_layers)).write(blank)
        runtime = StageRuntime(blank, RuntimeOptions(ctx_size=_CTX_SIZE, has_reader=True, gpu_layers=()))
        with contextlib.closing(runtime):
            assistant = Assistant(path, runtime)
            hidden = None if runtime.info.is_first else np.zeros((1, runtime.info.n_embd), np.float32)
            runtime.decode([Span(0, 0, [0], hidden, 1)])
            state = np.ones(runtime.info.n_embd, np.float32)
            # The first one also makes llama.cpp's graph.
            first, rest = (DraftStart(0, 1, 0, state, count) for count in (1, _NUM_TOKENS))
            assistant.draft([first], _draw)
            begun_s = time.perf_counter()
            drafts = assistant.draft([rest], _draw)
            elapsed_s = time.perf_counter() - begun_s
    if len(drafts[0]) != _NUM_TOKENS:
        raise InvalidModel(f"it drafts {len(drafts[0])} of {_NUM_TOKENS} tokens")
    return 1e3 * elapsed_s / _NUM_TOKENS


def _draw(_draft: int, _count: int, _logits: object) -> int:
    # Without weights of the model logits are no numbers.
    return 0
