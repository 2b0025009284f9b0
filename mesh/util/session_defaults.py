"""Default options of a served model's sessions: for `mesh serve`, `mesh load` and the API's `/mesh/load`."""

from __future__ import annotations

from typing import Final

NUM_SLOTS: Final = 4
MAX_WAITING: Final = 64
KV_TYPE: Final = "f16"
# Checkpoints of each session's recurrent state, in models that have one.
NUM_CHECKPOINTS: Final = 8
# Format of the hidden states that stages send.
WIRE: Final = "f32"
