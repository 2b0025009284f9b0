"""What the user of a draft model may set."""

from __future__ import annotations

from dataclasses import dataclass


class DraftUnusable(Exception):
    """The draft model cannot be loaded, or cannot serve as one; the message says why, in one line."""


@dataclass(frozen=True)
class DraftOptions:
    """How a draft model drafts and computes.

    Attributes:
        draft_max: How many tokens it drafts beyond those in flight.
        draft_min: Fewer than this many are not worth offering, unless fewer were asked for.
        p_min: A line stops at a token that the draft itself thinks less likely than this.
        ctx_size: Positions of one session; beyond them it has nothing to say.
        num_sessions: Sessions at once.
        num_threads: Threads of llama.cpp; they spin, so no more than cores that no stage uses.
        num_gpu_layers: Layers on the GPU, if there is one; -1 for all.
        kv_type: Format of the KV cache, as llama.cpp calls it.
        niceness: How much the thread yields to others on its host, 0 to 18 (Linux only).

    Raises:
        ValueError: If a value is out of its range; the text names it.
    """

    draft_max: int = 8
    draft_min: int = 1
    p_min: float = 0.0
    ctx_size: int = 4096
    num_sessions: int = 1
    num_threads: int = 1
    num_gpu_layers: int = -1
    kv_type: str = "f16"
    niceness: int = 0

    def __post_init__(self) -> None:
        _require("draft_max", self.draft_max, self.draft_max >= 1, "1 or more")
        _require(
            "draft_min",
            self.draft_min,
            1 <= self.draft_min <= self.draft_max,
            f"from 1 to draft_max, {self.draft_max}",
        )
        _require("p_min", self.p_min, 0.0 <= self.p_min <= 1.0, "from 0 (off) to 1")
        _require("ctx_size", self.ctx_size, self.ctx_size >= 2, "2 or more")
        _require("num_sessions", self.num_sessions, self.num_sessions >= 1, "1 or more")
        _require("num_threads", self.num_threads, self.num_threads >= 1, "1 or more")
        _require("num_gpu_layers", self.num_gpu_layers, self.num_gpu_layers >= -1, "-1 (all) or more")
        _require("niceness", self.niceness, 0 <= self.niceness <= 18, "from 0 to 18")


def _require(name: str, value: object, holds: bool, need: str) -> None:  # noqa: FBT001 - reads as an assertion
    if not holds:
        raise ValueError(f"{name} is {value}: it must be {need}")
