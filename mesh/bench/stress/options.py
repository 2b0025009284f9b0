"""Options of `mesh bench stress`, importable without the run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from pathlib import Path

Preset = Literal["ramp", "acceptance"]
LineName = Literal["crowd", "limit", "prefill", "second-turn", "itl", "memory"]


@dataclass(frozen=True)
class StressOptions:
    """A run of `mesh bench stress`.

    Attributes:
        model: A GGUF.
        preset: `ramp` loads with more and more requests at once; `acceptance` measures every line of the
            acceptance table.
        lines: Which lines of the acceptance table.
        num_stages: Hosts with layers; one more is the head.
        delay_ms: One-way delay between any two hosts.
        concurrency: Of each step of a ramp.
        num_requests: Of each step; None goes by time, or makes it eight for each that are at once.
        duration_s: Of each step; None goes by number.
        soak_minutes: Of a steady load after all else; 0 leaves it out.
        soak_concurrency: Concurrent requests of that load.
        num_scripts: Different chats.
        is_short: Whether messages and answers are short ones.
        seed: Of chats and sampling.
        exact: Numeric mode; then every text must be the one that was given alone.
        ctx_size: Positions of a session.
        num_slots: Concurrent sessions.
        kv_type: Format of the KV caches, as in `mesh serve`.
        num_threads: Of each stage.
        speculate: Allowed proposers, as in `mesh serve`.
        serve_options: Further options of `mesh serve`.
        num_keys: API keys whose requests share their beginnings, in place of chats; 0 asks chats of a mesh
            without keys.
        hang_up_share: Of those requests, how many have a client that hangs up, 0 to 1.
        with_rpc: Whether llama.cpp RPC takes part.
        rounds: Of each paired measurement of the acceptance table.
        output: Folder for the report.
        logs: Folder for what the servers write; None throws it away.
    """

    model: Path
    preset: Preset
    lines: tuple[LineName, ...]
    num_stages: int
    delay_ms: float
    concurrency: tuple[int, ...]
    num_requests: int | None
    duration_s: float | None
    soak_minutes: float
    soak_concurrency: int
    num_scripts: int
    is_short: bool
    seed: int
    exact: bool
    ctx_size: int
    num_slots: int
    kv_type: str
    num_threads: int
    speculate: str
    serve_options: tuple[str, ...]
    num_keys: int
    hang_up_share: float
    with_rpc: bool
    rounds: int
    output: Path
    logs: Path | None
