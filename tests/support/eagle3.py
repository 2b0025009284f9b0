"""An EAGLE-3 drafter for SmolLM2-135M-Instruct, trained on that model's own answers."""

from __future__ import annotations

from typing import Final

from mesh.tuning.beginning import DEMO_DRAFTER

# Reads hidden states before layers 3, 15 and 28; without an embedding, which is the target's.
DRAFTER: Final = DEMO_DRAFTER
