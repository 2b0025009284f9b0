"""Cutting one stage file out of a whole model."""

from __future__ import annotations

from typing import TYPE_CHECKING

from spanmesh_proto.errors import ModelError
from stages.cutting.gguf_writer import StageWriter
from stages.cutting.layout import lay_out
from stages.cutting.shared_blocks import with_shared_blocks
from stages.gguf.file_io import ModelFile, atomic_write

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from stages.cutting.source_model import SourceModel
    from stages.layers import LayerRange


def write_stage(
    model: SourceModel, layers: LayerRange, output: Path, on_bytes: Callable[[int], None]
) -> None:
    """Write a stage file by the rules, unchecked: `cut_stage` asks first whether they are enough.

    Raises:
        ModelError: If the output cannot be written, or is the source itself.
        InvalidModel: If the source ends early or cannot be read.
    """
    if output.exists() and any(output.samefile(path) for path in model.header.paths):
        raise ModelError(f"the output {output} is the model itself; choose another name")
    with ModelFile(*model.header.paths) as reader, atomic_write(output) as file:
        StageWriter(reader, file, on_bytes).write(with_shared_blocks(lay_out(model, layers)))


class ByteCounter:
    """Adds up bytes and reports them.

    Args:
        total: Bytes in all.
        progress: Called with bytes done and bytes in all, if given.
    """

    def __init__(self, total: int, progress: Callable[[int, int], None] | None) -> None:
        self._total = total
        self._progress = progress
        self._done = 0

    def add(self, count: int) -> None:
        """Count bytes just done."""
        self._done += count
        if self._progress is not None:
            self._progress(self._done, self._total)
