"""Cutting one stage file out of a whole model."""

from __future__ import annotations

from typing import TYPE_CHECKING

from spanmesh_proto.errors import ModelError
from stages.cutting.atomic import atomic_write
from stages.cutting.digest import file_sha256
from stages.cutting.gguf_writer import StageWriter, stage_bytes
from stages.cutting.layout import lay_out
from stages.cutting.model_file import ModelFile
from stages.cutting.self_check import require_exact_cut
from stages.cutting.source_model import read_source

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from stages.cutting.source_model import SourceModel
    from stages.layers import LayerRange


def cut_stage(
    source: Path, layers: LayerRange, output: Path, *, progress: Callable[[int, int], None] | None = None
) -> None:
    """Write the stage file for some layers of a model. It appears whole or not at all.

    A family that the table does not know is compared with the whole model first.

    Args:
        source: The whole model, a GGUF file.
        layers: Which of its layers.
        output: The stage file; replaced if it exists.
        progress: Called with bytes done and bytes in all: hashing the source, then writing the stage.

    Raises:
        InvalidModel: If the source is no GGUF, truncated, or lacks a tensor.
        UncuttableModel: If it has no such layers, or cannot be cut exactly there.
        ModelError: If the output cannot be written.
    """
    model = read_source(source)
    model.check_range(layers)
    require_exact_cut(model, layers)
    counter = ByteCounter(model.header.file_bytes + planned_bytes(model, layers), progress)
    write_stage(model, layers, output, file_sha256(source, counter.add), counter.add)


def planned_bytes(model: SourceModel, layers: LayerRange) -> int:
    """Size of a stage file before it is written. Any hash does: all are of one length."""
    return stage_bytes(lay_out(model, layers, "0" * 64))


def write_stage(
    model: SourceModel, layers: LayerRange, output: Path, source_sha256: str, on_bytes: Callable[[int], None]
) -> str:
    """Write a stage file by the rules, unchecked: `cut_stage` asks first whether they are enough.

    Returns:
        The file's sha256, hex.

    Raises:
        ModelError: If the output cannot be written, or is the source itself.
        InvalidModel: If the source ends early or cannot be read.
    """
    source = model.header.path
    if output.exists() and output.samefile(source):
        raise ModelError(f"the output {output} is the model itself; choose another name")
    layout = lay_out(model, layers, source_sha256)
    with ModelFile(source) as reader, atomic_write(output) as file:
        return StageWriter(reader, file, on_bytes).write(layout)


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
