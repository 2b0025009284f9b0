"""What a draft model takes of the coordinator's memory."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mesh.placement.stage_sizes import StageSizes, Workload
from spanmesh_proto.errors import ModelError
from stages.runtime.kv_types import check_kv_type
from stages.slicing.model_facts import read_model_facts

if TYPE_CHECKING:
    from pathlib import Path

    from speculative.draft.context import DraftOptions


def draft_memory_bytes(path: Path, options: DraftOptions) -> int:
    """Weights, KV cache and buffers of a draft model, from its header.

    Args:
        path: The GGUF.
        options: How it drafts and computes.

    Returns:
        Bytes, rather too many than too few; 0 for a file that tells nothing, as loading it will say more.

    Raises:
        ClusterError: If its heads cannot be kept in the format wanted.
    """
    try:
        facts = read_model_facts(path)
    except (ModelError, OSError):
        return 0
    check_kv_type(options.kv_type, path.name, facts.head_widths, option="--draft-kv-type")
    sizes = StageSizes(facts, Workload(options.ctx_size, options.num_sessions, options.kv_type))
    memory = sizes.memory(sizes.whole)
    # The file as it is: nothing is stored twice, as it is for a first stage and a tail.
    return facts.file_bytes + memory.cache_bytes + memory.buffer_bytes
