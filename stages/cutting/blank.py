"""Blank stages: a stage file's header with zeros for weights.

llama.cpp loads one like any other and computes in it for as long as in the real stage, since how long a
matrix product takes does not depend on what the matrix holds. It costs no disk (the file is one hole) and
next to nothing on the wire, so any host can be asked how fast it would be before anything is cut or sent.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from spanmesh_proto.errors import ModelError

if TYPE_CHECKING:
    from pathlib import Path

    from stages.cutting.source_model import SourceModel
    from stages.layers import LayerRange


@dataclass(frozen=True)
class BlankStage:
    """What it takes to make one.

    Attributes:
        header: Magic, metadata and tensor directory.
        num_bytes: Size of the whole file.
    """

    header: bytes
    num_bytes: int

    def write(self, path: Path) -> None:
        """Make the file; all but the header is a hole.

        Raises:
            ModelError: If it cannot be written.
        """
        try:
            with path.open("wb") as file:
                file.write(self.header)
                file.truncate(self.num_bytes)
        except OSError as error:
            raise ModelError(f"cannot write {path}: {error.strerror or error}") from error


def blank_stage(source: SourceModel, layers: LayerRange) -> BlankStage:
    """The stage of these layers without its weights.

    Args:
        source: The whole model.
        layers: Which layers, within the model.

    Raises:
        UncuttableModel: If it has no such layers, or cannot be cut there.
    """
    from stages.cutting.gguf_writer import encode_header, stage_bytes  # noqa: PLC0415
    from stages.cutting.layout import lay_out  # noqa: PLC0415

    source.check_range(layers)
    layout = lay_out(source, layers)
    return BlankStage(encode_header(layout), stage_bytes(layout))
