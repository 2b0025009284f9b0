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
    """What is to be timed.

    Attributes:
        blank: The stage.
        num_threads: Of llama.cpp.
        is_exact: Numeric mode, see `stages.runtime.numerics`.
        kv_type: Format of the KV cache.
        position: Where in a session the timed rows start: attention walks over all before them.
        num_rounds: Times that a row is timed; medians count.
        pause_ms: Before each, as a stage has it while the others compute and the wire is busy.
    """

    blank: BlankStage
    num_threads: int = 1
    is_exact: bool = False
    kv_type: str = "f16"
    position: int = 128
    num_rounds: int = 20
    pause_ms: float = 5.0

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        header = base64.b64encode(self.blank.header).decode()
        return asdict(self) | {"blank": {"header": header, "num_bytes": self.blank.num_bytes}}

    @classmethod
    def from_dict(cls, fields: Mapping[str, Any]) -> ProfileRequest:
        """What `as_dict` gave."""
        blank = fields["blank"]
        header = base64.b64decode(blank["header"], validate=True)
        return cls(**{**fields, "blank": BlankStage(header, int(blank["num_bytes"]))})


@dataclass(frozen=True)
class StageTiming:
    """Of one stage on one host.

    Attributes:
        row_ms: A window of one row, which is what a token without speculation takes.
        chunk_ms: A window of `chunk_rows` rows, as prompts come in.
        chunk_rows: The most that one window may have.
    """

    row_ms: float
    chunk_ms: float
    chunk_rows: int
