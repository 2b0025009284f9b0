"""Rows of images in place of token ids, at the first stage and at those that embed again: the plug."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from spanmesh_proto.errors import InvalidWindow
from spanmesh_proto.row_ids import FIRST_ROW_ID
from stages.serving.plugs import StagePlug

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from spanmesh_proto import windows_pb2 as wire
    from stages.runtime.stage_runtime import StageRuntime


class ImageInput(StagePlug):
    """Rows that windows bring from the coordinator; they go on where a later stage uses them.

    Args:
        runtime: The loaded stage.
    """

    def __init__(self, runtime: StageRuntime) -> None:
        self._runtime = runtime

    def input_of(self, window: wire.Window) -> NDArray[np.float32] | None:
        """The rows of a window, float32 (rows, width of the embedding's input); None if this stage uses none.

        Raises:
            InvalidWindow: If their number or size is wrong, or a value is not finite.
        """
        if not window.rows:
            return None
        values, num_rows = window.rows, len(window.tokens)
        if not self._runtime.hands_on_rows:
            # The next stage gets hidden states instead.
            window.ClearField("rows")
        if not self._runtime.takes_rows:
            return None
        width = self._runtime.input_width
        if len(values) != 4 * num_rows * width:
            raise InvalidWindow(
                f"a window at {window.start} brings {len(values)} bytes for {num_rows} rows of an image; "
                f"this model takes {width} values of 4 bytes for each"
            )
        if any(each < FIRST_ROW_ID for each in window.tokens):
            raise InvalidWindow(f"a window at {window.start} brings rows of an image for tokens")
        rows = np.frombuffer(values, "<f4").astype(np.float32, copy=False).reshape(num_rows, width)
        if not np.isfinite(rows).all():
            raise InvalidWindow(f"a window at {window.start} brings rows of an image that are not finite")
        return rows
