"""Request and result of the stage profiler, importable without llama.cpp."""

from __future__ import annotations

import base64
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from stages.slicing.stage_writer import BlankStage

if TYPE_CHECKING:
    from collections.abc import Mapping


@dataclass(frozen=True)
class ProfileRequest:
    """A stage to be timed."""

    blank: BlankStage
    """The blank stage."""
    num_threads: int = 1
    """Threads for computing."""
    is_exact: bool = False
    """Numeric mode, see `stages.runtime.numerics`."""
    kv_type: str = "f16"
    """Format of the KV cache."""
    position: int = 128
    """Position of the timed rows: attention visits all before them."""
    num_rounds: int = 20
    """Number of measurements of a row, of which the median is taken."""
    pause_ms: float = 5.0
    """Pause before each, as between two windows in a pipeline."""
    gpu_layers: tuple[tuple[str, int], ...] = ()
    """Devices with their numbers of layers, see `RuntimeOptions`; empty for the processor alone."""
    cpu_moe_layers: int = 0
    """First layers whose experts stay with the processor."""

    def as_dict(self) -> dict[str, Any]:
        """JSON-serialisable."""
        header = base64.b64encode(self.blank.header).decode()
        return asdict(self) | {
            "blank": {"header": header, "num_bytes": self.blank.num_bytes},
            "gpu_layers": [list(each) for each in self.gpu_layers],
        }

    @classmethod
    def from_dict(cls, fields: Mapping[str, Any]) -> ProfileRequest:
        """The request from `as_dict`'s result."""
        blank = fields["blank"]
        header = base64.b64decode(blank["header"], validate=True)
        gpu_layers = tuple((str(name), int(count)) for name, count in fields.get("gpu_layers", ()))
        stage = BlankStage(header, int(blank["num_bytes"]))
        return cls(**{**fields, "blank": stage, "gpu_layers": gpu_layers})


@dataclass(frozen=True)
class StageTiming:
    """Times of one stage on one host."""

    row_ms: float
    """Time of a window of one row, as of a token without speculation."""
    chunk_ms: float
    """Time of a window of `chunk_rows` rows, as of a prefill chunk."""
    chunk_rows: int
    """Most rows of one window."""
