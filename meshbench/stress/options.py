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
    """Load of a run, whatever mesh it is for; see `RunOptions` for the other options.

    Attributes:
        preset: `ramp` loads with more and more requests at once; `acceptance` measures every line of the
            acceptance table.
        lines: Which lines of the acceptance table.
        contexts: Words of the prompts of its line `context`.
        concurrency: Of each step of a ramp.
        num_requests: Of each step; None goes by time, or makes it eight for each that are at once.
        duration_s: Of each step; None goes by number.
        soak_minutes: Of a steady load after all else; 0 leaves it out.
        soak_concurrency: Concurrent requests of that load.
        num_scripts: Different chats.
        with_clients: Whether single requests that share their beginnings take the place of chats, from
            clients of whom some disconnect.
        rounds: Of each paired measurement of the acceptance table.
        slos: Limits for goodput.
    """

    preset: Preset
    lines: tuple[LineName, ...]
    contexts: tuple[int, ...]
    concurrency: tuple[int, ...]
    num_requests: int | None
    duration_s: float | None
    soak_minutes: float
    soak_concurrency: int
    num_scripts: int
    with_clients: bool
    rounds: int
    slos: tuple[Slo, ...]


@dataclass(frozen=True, kw_only=True)
class StressOptions(LabOptions, LoadPlan):
    """A run of `mesh bench stress` in the lab; see `LabOptions` and `LoadPlan` for the other options.

    Attributes:
        num_slots: Concurrent sessions.
        kv_type: Format of the KV caches, as in `mesh serve`.
        num_keys: API keys whose requests share their beginnings, in place of chats; 0 asks chats of a mesh
            without keys.
        with_rpc: Whether llama.cpp RPC takes part.
    """

    num_slots: int
    kv_type: str
    num_keys: int
    with_rpc: bool


@dataclass(frozen=True, kw_only=True)
class RemoteStressOptions(LoadPlan):
    """A run of `mesh bench stress --url`; see `LoadPlan` for the other options.

    Attributes:
        target: The running mesh.
        speculate: Proposers that requests allow.
        fits_slots: Whether steps of more requests than the mesh answers at once are left out.
    """

    target: RemoteTarget
    speculate: str
    fits_slots: bool
