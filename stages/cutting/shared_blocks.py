"""Stage files that can share blocks with the model, on file systems that let files share them (XFS, Btrfs).

Blocks are shared whole: what is copied must lie alike in both files within a block. Layers that follow one
another in the model do so in the stage, too; so it is enough to begin them at the same place within a block.
What it takes is put into the header, as a value that nobody reads.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Final

from stages.cutting.gguf_writer import encode_header, padded
from stages.cutting.tensors import layer_of
from stages.gguf.file_io import BLOCK_BYTES
from stages.gguf.header import Value, ValueType

if TYPE_CHECKING:
    from stages.cutting.layout import StageLayout

_KEY: Final = "spanmesh.padding"
# Smaller ones are no matter.
_LEAST_BYTES: Final = 64 * 1024


def with_shared_blocks(layout: StageLayout) -> StageLayout:
    """The same stage, with its first large tensor of a layer where the model has it within a block."""
    at = 0
    for tensor in layout.tensors:
        is_large = tensor.n_bytes >= _LEAST_BYTES and layer_of(tensor.name) is not None
        if is_large and tensor.source is not None:
            bare = _with_padding(layout, 0)
            missing = (tensor.source.start - len(encode_header(bare)) - at) % BLOCK_BYTES
            # A multiple of the alignment, unless the model is aligned otherwise than it says.
            return layout if missing % layout.alignment else _with_padding(layout, missing)
        at += padded(tensor.n_bytes, layout.alignment)
    return layout


def _with_padding(layout: StageLayout, num_bytes: int) -> StageLayout:
    padding = Value.of(ValueType.STRING, " " * num_bytes)
    return replace(layout, metadata={**layout.metadata, _KEY: padding})
