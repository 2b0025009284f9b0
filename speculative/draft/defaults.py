"""Default options of a draft model: for its context, the head's options, the API and the command line."""

from __future__ import annotations

from typing import Final

DRAFT_MAX: Final = 8
DRAFT_MIN: Final = 1
# Of drafters that read hidden states: acceptance does not grow with more positions of a prompt than these.
CONTEXT: Final = 512
WIRE: Final = "auto"
# Hidden states of more layers travel in half the bytes: a draft waits for those of the newest tokens.
MOST_LAYERS_IN_F16: Final = 3
P_MIN: Final = 0.0
NUM_THREADS: Final = 1
# All layers.
NUM_GPU_LAYERS: Final = -1
KV_TYPE: Final = "f16"
