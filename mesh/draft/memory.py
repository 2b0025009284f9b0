"""Memory of drafters on the coordinator's host, from their headers."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Final

from mesh.draft.drafter import loadable_bytes, read_drafter, with_drafter
from mesh.placement.context_choice import MOST_CTX_SIZE
from mesh.placement.memory_estimate import CELL_BYTES, MASK_BYTES, StageSizes, Workload
from spanmesh_proto.errors import ModelError
from speculative.draft import defaults
from speculative.draft.context import MAX_ROWS, DraftOptions
from stages.gguf import read_header
from stages.runtime.kv_types import KV_TYPES, check_kv_type
from stages.slicing.model_facts import read_model_facts
from stages.slicing.tensor_names import EMBEDDING

if TYPE_CHECKING:
    from pathlib import Path

    from mesh.draft.drafter import Drafter
    from stages.slicing.model_facts import ModelFacts

# Of the process in which it computes: Python, llama.cpp's library and small buffers.
_PROCESS_BYTES: Final = 96 * 2**20
# Of a process that trains: torch, and a batch of answers.
_TORCH_BYTES: Final = 1 << 30
# Weight, gradient and two moments in float32, and as much again where drafters are compared.
_BYTES_PER_WEIGHT: Final = 32


def facts_with(target: Path, draft: Path | None, num_sessions: int) -> tuple[ModelFacts, Drafter | None]:
    """Facts of a model for its placement, and its drafter.

    Args:
        target: The model.
        draft: File of the drafter; None for none.
        num_sessions: Concurrent sessions.

    Raises:
        MeshError: See `read_model_facts` and `read_drafter`.
    """
    model = read_model_facts(target)
    drafter = None if draft is None else read_drafter(draft, model)
    return with_drafter(model, drafter, num_sessions), drafter


def bytes_beside(drafter: Drafter | None, target: Path, ctx_size: int, num_sessions: int) -> int:
    """Memory of a drafter on the coordinator's host with the default options; 0 for none.

    Args:
        drafter: The drafter.
        target: The served model.
        ctx_size: Positions of a session.
        num_sessions: Concurrent sessions.
    """
    if drafter is None:
        return 0
    return drafter_bytes(drafter, target, DraftOptions(ctx_size=ctx_size, num_sessions=num_sessions))


def most_ctx_size(drafter: Drafter, target: ModelFacts) -> int:
    """Most positions of a session for which a drafter is ever loaded."""
    ctx_size = min(target.n_ctx_train, MOST_CTX_SIZE)
    if drafter.reads_features:
        # It goes by what the target has read.
        return ctx_size
    # Beyond its training it would draft nonsense.
    return min(ctx_size, drafter.header.integer(f"{drafter.header.architecture}.context_length", ctx_size))


def drafter_bytes(
    drafter: Drafter, target: Path, options: DraftOptions, context: int = defaults.CONTEXT
) -> int:
    """Weights, KV cache, buffers and process of a drafter, and hidden states that it keeps.

    None for one that computes beside the last stage.

    Args:
        drafter: The drafter.
        target: The served model.
        options: Options of the draft model.
        context: Positions of each session whose hidden states it keeps.

    Raises:
        ClusterError: If the KV cache cannot have the requested format with its head size.
    """
    if drafter.is_beside_tail:
        return 0
    if drafter.reads_features:
        return _PROCESS_BYTES + feature_drafter_bytes(drafter, target, options, context)
    return _PROCESS_BYTES + draft_memory_bytes(drafter.path, options)


def tuning_bytes(drafter: Drafter) -> int:
    """Memory of a process that trains a drafter in the background, from its header.

    Args:
        drafter: An EAGLE-3 drafter.
    """
    tensors = drafter.header.tensors.values()
    return _TORCH_BYTES + _BYTES_PER_WEIGHT * sum(math.prod(tensor.shape) for tensor in tensors)


def draft_memory_bytes(path: Path, options: DraftOptions) -> int:
    """Weights, KV cache and buffers of a draft model, from its header.

    Args:
        path: The GGUF.
        options: Options of the draft model.

    Returns:
        Bytes, rather too many than too few; 0 for an unreadable file, which loading will report.

    Raises:
        ClusterError: If the KV cache cannot have the requested format with its head size.
    """
    try:
        facts = read_model_facts(path)
    except (ModelError, OSError):
        return 0
    check_kv_type(options.kv_type, path.name, facts.head_widths, option="--draft-kv-type")
    # As on a GPU, all sessions share one cache: a batch's mask covers the positions of all of them.
    workload = Workload(options.ctx_size, options.num_sessions, options.kv_type, on_gpu=True)
    sizes = StageSizes(facts, workload)
    memory = sizes.memory(sizes.whole)
    # The file as it is: no tensor is stored twice, as in a first stage and a tail.
    return facts.file_bytes + memory.cache_bytes + memory.buffer_bytes


def feature_drafter_bytes(drafter: Drafter, target: Path, options: DraftOptions, context: int) -> int:
    """Weights, KV cache and buffers of a drafter that reads hidden states, and those that it keeps.

    Args:
        drafter: The drafter.
        target: The served model.
        options: Options of the draft model.
        context: Positions of each session whose hidden states it keeps.

    Raises:
        ClusterError: If the KV cache cannot have the requested format with its head size.
    """
    header, prefix = drafter.header, drafter.header.architecture
    n_embd = header.integer(f"{prefix}.embedding_length")
    n_layers = header.integer(f"{prefix}.block_count")
    heads = header.per_layer(f"{prefix}.attention.head_count", n_layers, 1)[-1] or 1
    heads_kv = header.per_layer(f"{prefix}.attention.head_count_kv", n_layers, heads)[-1] or 1
    key = header.integer(f"{prefix}.attention.key_length", n_embd // heads)
    value = header.integer(f"{prefix}.attention.value_length", n_embd // heads)
    check_kv_type(options.kv_type, drafter.path.name, (key, value), option="--draft-kv-type")
    kv_type = KV_TYPES[options.kv_type]
    position_bytes = kv_type.num_bytes(heads_kv * key) + kv_type.num_bytes(heads_kv * value)
    position_bytes *= drafter.num_drafting_layers
    # The cache that all sessions share, llama.cpp's record of each position, and the mask of a batch.
    position_bytes += CELL_BYTES + MAX_ROWS * MASK_BYTES
    cache_bytes = position_bytes * options.ctx_size * options.num_sessions
    feature_bytes = 4 * len(drafter.layers) * drafter.n_embd * context * options.num_sessions
    # Logits and states of a batch, and as much again for what llama.cpp computes between them.
    embedding = header.tensors.get(EMBEDDING) or read_header(target).tensors.get(EMBEDDING)
    n_vocab = 1 if embedding is None else embedding.shape[-1]
    buffer_bytes = 2 * 4 * MAX_ROWS * (n_vocab + 8 * n_embd)
    # Logits of all sessions, on their way to the head.
    buffer_bytes += 4 * options.num_sessions * min(drafter.most_drafted, options.draft_max) * n_vocab
    return loadable_bytes(drafter, target) + cache_bytes + feature_bytes + buffer_bytes
