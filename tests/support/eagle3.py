"""An EAGLE-3 drafter for SmolLM2-135M-Instruct, trained on that model's own answers."""

from __future__ import annotations

from pathlib import Path
from typing import Final

# Reads hidden states before layers 3, 15 and 28; without an embedding, which is the target's.
DRAFTER: Final = Path(__file__).parents[1] / "data" / "smollm2-135m-eagle3.gguf"
