"""Hidden states as a window brings them, checked but not yet decoded."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from spanmesh_proto import windows_pb2 as wire
from spanmesh_proto.errors import InvalidWindow
from stages.hidden_codec import HiddenType, decode

if TYPE_CHECKING:
    from collections.abc import Mapping

    import numpy as np
    from numpy.typing import NDArray

TO_WIRE: Final[Mapping[HiddenType, wire.HiddenType]] = {
    HiddenType.F32: wire.HIDDEN_TYPE_F32,
    HiddenType.F16: wire.HIDDEN_TYPE_F16,
    HiddenType.Q8: wire.HIDDEN_TYPE_Q8,
}
_FROM_WIRE: Final = {number: hidden_type for hidden_type, number in TO_WIRE.items()}


@dataclass(frozen=True)
class EncodedHidden:
    """Rows that wait for the thread that computes: decoding many takes milliseconds.

    Attributes:
        data: Of whole rows.
        hidden_type: How they are encoded.
        n_embd: Values of a row.
    """

    data: bytes
    hidden_type: HiddenType
    n_embd: int

    @classmethod
    def of_window(cls, window: wire.Window, n_embd: int) -> EncodedHidden:
        """What a window brings to a stage that is not the first.

        Raises:
            InvalidWindow: If the type is not known here, or the size is not that of the window's rows.
        """
        hidden_type = _FROM_WIRE.get(window.hidden_type)
        if hidden_type is None:
            raise InvalidWindow(
                f"hidden states of type {window.hidden_type} are not known here; known are "
                f"{', '.join(HiddenType)}: install the same spanmesh on every host"
            )
        expected_bytes = len(window.tokens) * hidden_type.row_bytes(n_embd)
        if len(window.hidden) != expected_bytes:
            raise InvalidWindow(
                f"{len(window.tokens)} rows need {expected_bytes} bytes of hidden states as {hidden_type}, "
                f"{len(window.hidden)} came"
            )
        return cls(window.hidden, hidden_type, n_embd)

    def decode(self) -> NDArray[np.float32]:
        """The rows, float32 (rows, n_embd)."""
        return decode(self.data, self.hidden_type, self.n_embd)
