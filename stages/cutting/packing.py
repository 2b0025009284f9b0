"""What weights take more once llama.cpp's kernels for a processor have put them in their own order."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from gguf.constants import GGMLQuantizationType

if TYPE_CHECKING:
    from collections.abc import Iterable

    from stages.gguf.header import TensorInfo

# Bytes of a block in the file, and at most how many come on top: sums and scales that the kernels for AMX
# keep with each block (`get_row_size` in llama.cpp's amx/mmq.cpp). The other kernels add nothing.
_ADDED: Final = {
    GGMLQuantizationType.Q8_0: (34, 4),
    GGMLQuantizationType.Q4_K: (144, 4),
    GGMLQuantizationType.Q5_K: (176, 4),
    GGMLQuantizationType.IQ4_XS: (136, 2),
}


def packing_bytes(tensors: Iterable[TensorInfo]) -> int:
    """How much more these tensors may take in fast mode than in the file."""
    return sum(
        tensor.n_bytes * added // block_bytes
        for tensor in tensors
        for block_bytes, added in [_ADDED.get(tensor.type, (1, 0))]
    )
