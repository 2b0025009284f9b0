"""What the user of `mesh serve` says about speculation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from spanmesh_proto.errors import ClusterError
from speculative.controller import ControllerOptions
from speculative.draft.context import DraftOptions
from stages.runtime.kv_types import KV_TYPES

if TYPE_CHECKING:
    from pathlib import Path

    from mesh.engine import SpeculationMode

_NEEDS_DRAFT: Final = (
    "--speculate draft needs a draft model: name one with --draft; `mesh draft make` makes one from the model"
)
_NEEDS_REPLAY: Final = "--speculate replay needs recorded answers: name their file with --replay-file"


@dataclass(frozen=True)
class SpeculationOptions:
    """Who proposes, and how much of it flies.

    Attributes:
        mode: Who may propose.
        width: Always propose this many tokens in a window; None leaves it to the controller.
        depth: Always keep this many windows in flight; None leaves it to the controller.
        cancels: Whether stages are told at once of windows that a rejection voided.
        draft_path: The draft model's GGUF, or None to go without.
        draft_max: How many tokens it drafts beyond those in flight.
        draft_min: Fewer than this many are not worth offering.
        p_min: A drafted line stops at a token that the draft thinks less likely than this.
        draft_threads: Its threads; they spin, so no more than cores that no stage uses.
        draft_gpu_layers: Its layers on the GPU; -1 for all.
        draft_kv_type: Format of its KV cache.
        replay_path: Recorded answers, or None.
        keeps_history: Whether earlier answers to the same API key are proposed again.

    Raises:
        ClusterError: If options contradict one another; `param` names one.
    """

    mode: SpeculationMode = "auto"
    width: int | None = None
    depth: int | None = None
    cancels: bool = True
    draft_path: Path | None = None
    draft_max: int = 8
    draft_min: int = 1
    p_min: float = 0.0
    draft_threads: int = 1
    draft_gpu_layers: int = -1
    draft_kv_type: str = "f16"
    replay_path: Path | None = None
    keeps_history: bool = False

    def __post_init__(self) -> None:
        if self.mode == "draft" and self.draft_path is None:
            raise ClusterError(_NEEDS_DRAFT, param="--draft")
        if self.mode == "replay" and self.replay_path is None:
            raise ClusterError(_NEEDS_REPLAY, param="--replay-file")
        if self.draft_kv_type not in KV_TYPES:
            raise ClusterError(
                f"--draft-kv-type is {self.draft_kv_type}: it must be one of {', '.join(KV_TYPES)}",
                param="--draft-kv-type",
            )
        self.draft_options(ctx_size=2, num_slots=1)
        self.controller_options()

    @property
    def needs_draft(self) -> bool:
        """Whether a draft model is to be loaded."""
        return self.draft_path is not None and self.mode in {"auto", "draft"}

    def draft_options(self, *, ctx_size: int, num_slots: int) -> DraftOptions:
        """As the draft model takes them.

        Args:
            ctx_size: Positions of one session.
            num_slots: Sessions at once.
        """
        try:
            return DraftOptions(
                draft_max=self.draft_max,
                draft_min=self.draft_min,
                p_min=self.p_min,
                ctx_size=ctx_size,
                num_sessions=num_slots,
                num_threads=self.draft_threads,
                num_gpu_layers=self.draft_gpu_layers,
                kv_type=self.draft_kv_type,
            )
        except ValueError as error:
            raise _refusal(error) from None

    def controller_options(self) -> ControllerOptions:
        """As each session's controller takes them."""
        try:
            return ControllerOptions(fixed_width=self.width, fixed_depth=self.depth)
        except ValueError as error:
            raise _refusal(error) from None


def _refusal(error: ValueError) -> ClusterError:
    """The error in the user's words: `draft_max is 0: …` comes from `--draft-max 0`."""
    field, _, rest = str(error).partition(" ")
    option = "--" + field.replace("_", "-")
    return ClusterError(f"{option} {rest}", param=option)
