"""Default options of served models: for `mesh serve`, `mesh load` and the API's `/mesh/load`."""

from __future__ import annotations

from typing import Final

NUM_SLOTS: Final = 4
MAX_WAITING: Final = 64
KV_TYPE: Final = "f16"
# Checkpoints of each session's recurrent state, in models that have one.
NUM_CHECKPOINTS: Final = 8
# Format of the hidden states that stages send.
WIRE: Final = "f32"
# Of models that requests load: how long one stays at least, and how long a request whose answer is not
# streamed waits for one.
MIN_STAY_S: Final = 60
LOAD_WAIT_S: Final = 120
