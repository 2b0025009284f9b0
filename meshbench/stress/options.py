"""Options of `mesh bench stress`, importable without the run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from meshbench.shared_options import LabOptions, RunOptions

if TYPE_CHECKING:
    from meshbench.serving_metrics import Slo
    from meshbench.under_test.options import RemoteTarget

Preset = Literal["ramp", "acceptance"]
LineName = Literal["crowd", "limit", "wider", "prefill", "second-turn", "itl", "context", "memory"]


@dataclass(frozen=True, kw_only=True)
class LoadPlan(RunOptions):
    """Load of a run, whatever mesh it is for; see `RunOptions` for the other options."""

    preset: Preset
    """`ramp` loads with more and more requests at once; `acceptance` measures every line of the acceptance
    table."""
    lines: tuple[LineName, ...]
    """Which lines of the acceptance table."""
    contexts: tuple[int, ...]
    """Words of the prompts of its line `context`."""
    concurrency: tuple[int, ...]
    """Of each step of a ramp."""
    num_requests: int | None
    """Of each step; None goes by time, or makes it eight for each that are at once."""
    duration_s: float | None
    """Of each step; None goes by number."""
    soak_minutes: float
    """Of a steady load after all else; 0 leaves it out."""
    soak_concurrency: int
    """Concurrent requests of that load."""
    num_scripts: int
    """Different chats."""
    with_clients: bool
    """Whether single requests that share their beginnings take the place of chats, from clients of whom some
    disconnect."""
    rounds: int
    """Of each paired measurement of the acceptance table."""
    slos: tuple[Slo, ...]
    """Limits for goodput."""


@dataclass(frozen=True, kw_only=True)
class StressOptions(LabOptions, LoadPlan):
    """A run of `mesh bench stress` in the lab; see `LabOptions` and `LoadPlan` for the other options."""

    num_slots: int
    """Concurrent sessions."""
    kv_type: str
    """Format of the KV caches, as in `mesh serve`."""
    num_keys: int
    """API keys whose requests share their beginnings, in place of chats; 0 asks chats of a mesh without keys.
    """
    with_rpc: bool
    """Whether llama.cpp RPC takes part."""


@dataclass(frozen=True, kw_only=True)
class RemoteStressOptions(LoadPlan):
    """A run of `mesh bench stress --url`; see `LoadPlan` for the other options."""

    target: RemoteTarget
    """The running mesh."""
    speculate: str
    """Proposers that requests allow."""
    fits_slots: bool
    """Whether steps of more requests than the mesh answers at once are left out."""
