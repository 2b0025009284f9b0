"""Context choice: positions of a session where the operator names no number.

The placement is made for the fewest positions that are ever chosen. Its layers and hosts stay as they are;
the context grows as long as

- the model was trained for it, and no more than a fixed number of positions,
- KV caches take at most half of what the weights leave of each host and GPU, and everything fits there,
- spares keep room for a replica of each stage of which they could hold one before, and
- layers of a host that is lost, or drained, still fit elsewhere if they did before: sessions and replans keep
  the context that a mesh was started with.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final

from mesh.placement.gpu_layers import resized
from mesh.placement.host_assignment import never
from mesh.placement.planner import Plan
from mesh.placement.replanner import can_replan, replicated_layers
from stages.units import format_size

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from mesh.placement.host_capacity import HostCapacity
    from mesh.placement.memory_estimate import StageSizes
    from mesh.placement.planner import StagePlacement
    from stages.layers import LayerRange
    from stages.runtime.process_memory import StageMemory

LEAST_CTX_SIZE: Final = 4096
"""Fewest positions that are chosen, unless the model was trained for fewer."""
MOST_CTX_SIZE: Final = 131_072
"""Most positions that are chosen."""
EXAMINED_S: Final = 0.3
"""Time after which no further loss of a host is tried; each that was is tried again with a few contexts."""
_STEP: Final = 1024
_TRAINED: Final = "the model was trained for no more"
_MOST: Final = "no larger one is chosen by default"


@dataclass(frozen=True)
class LargerContext:
    """A context larger than the chosen one."""

    ctx_size: int
    """Positions of one session."""
    added_bytes: tuple[tuple[str, int], ...]
    """Name of each host with stages, and the memory that it would take there besides."""

    def __str__(self) -> str:
        added = " and ".join(f"{format_size(size)} more on {host}" for host, size in self.added_bytes)
        return f"--ctx-size {self.ctx_size} would take {added}"


@dataclass(frozen=True)
class ContextChoice:
    """A chosen context."""

    ctx_size: int
    """Positions of one session."""
    num_slots: int
    """Concurrent sessions, each with as many."""
    bound: str
    """Reason why it is no larger."""
    larger: LargerContext | None
    """What a larger one would take; None if the model was not trained for one."""

    def __str__(self) -> str:
        sessions = "one session" if self.num_slots == 1 else f"each of {self.num_slots} sessions"
        larger = "" if self.larger is None else f"; {self.larger}"
        return f"context: {self.ctx_size:,} positions for {sessions}: {self.bound}{larger}"

    def as_dict(self) -> dict[str, Any]:
        """JSON-serialisable."""
        return {
            "positions": self.ctx_size,
            "bound": self.bound,
            "larger": None
            if self.larger is None
            else {"positions": self.larger.ctx_size, "added_bytes": dict(self.larger.added_bytes)},
        }


class _Bounds:
    """Bounds that memory sets to the context of one placement.

    Args:
        sizes: See `choose_context`.
        stages: Stages of the placement.
        hosts: See `choose_context`.
        may_move: Likewise.
        is_time_up: Likewise.
    """

    def __init__(
        self,
        sizes: StageSizes,
        stages: Sequence[StagePlacement],
        hosts: Sequence[HostCapacity],
        *,
        may_move: bool,
        is_time_up: Callable[[], bool],
    ) -> None:
        self._sizes = sizes
        self._stages = stages
        self._hosts = hosts
        # The exact mode adds positions for rows of padding.
        self._empty = tuple(self.stages_with(1 - sizes.workload.numerics.min_rows))
        self._replicated: frozenset[LayerRange] = frozenset()
        if may_move:
            self._replicated = replicated_layers(sizes, stages, hosts)
        # Hosts whose layers can be placed elsewhere, and whether stages of others are given up for that.
        self._movable: dict[str, bool] = {}
        for host in dict.fromkeys(stage.host for stage in stages):
            if not may_move or is_time_up():
                break
            if self._can_lose(host, sizes, stages, may_start_over=False):
                self._movable[host] = False
            elif self._can_lose(host, sizes, stages, may_start_over=True):
                self._movable[host] = True

    def stages_with(self, ctx_size: int) -> Iterator[StagePlacement]:
        """The stages, with the memory that they take with so many positions."""
        return self._resized(self._sizes_with(ctx_size))

    def refusal(self, ctx_size: int) -> str | None:
        """The bound that forbids so many positions; None if none does."""
        sizes = self._sizes_with(ctx_size)
        stages = tuple(self._resized(sizes))
        for host in self._hosts:
            held = [
                (stage.memory, empty.memory)
                for stage, empty in zip(stages, self._empty, strict=True)
                if stage.host == host.name
            ]
            if held and (refusal := _crowded(host, held)) is not None:
                return refusal
        if missing := self._replicated - replicated_layers(sizes, stages, self._hosts):
            return f"a spare keeps room for a replica of layers {min(missing)}"
        for name, may_start_over in self._movable.items():
            if not self._can_lose(name, sizes, stages, may_start_over=may_start_over):
                return f"without {name} its layers have to fit elsewhere"
        return None

    def larger(self, ctx_size: int, larger: int) -> LargerContext:
        """Memory of another context besides one of `ctx_size` positions."""
        added: dict[str, int] = {}
        for now, then in zip(self.stages_with(ctx_size), self.stages_with(larger), strict=True):
            added_bytes = _everywhere(then.memory) - _everywhere(now.memory)
            added[now.host] = added.get(now.host, 0) + added_bytes
        return LargerContext(larger, tuple(added.items()))

    def _sizes_with(self, ctx_size: int) -> StageSizes:
        return replace(self._sizes, workload=replace(self._sizes.workload, ctx_size=ctx_size))

    def _resized(self, sizes: StageSizes) -> Iterator[StagePlacement]:
        return (replace(stage, memory=resized(sizes, stage.layers, stage.memory)) for stage in self._stages)

    def _can_lose(
        self, name: str, sizes: StageSizes, stages: Sequence[StagePlacement], *, may_start_over: bool
    ) -> bool:
        """Whether a host's layers fit on the others."""
        lost = [index for index, stage in enumerate(stages) if stage.host == name]
        others = [host for host in self._hosts if host.name != name]
        return can_replan(sizes, stages, lost, others, may_start_over=may_start_over)


def least_context(n_ctx_train: int) -> int:
    """Positions of one session that the placement is made for.

    Args:
        n_ctx_train: Positions that the model was trained for.
    """
    return min(n_ctx_train, LEAST_CTX_SIZE)


def choose_context(
    sizes: StageSizes,
    plan: Plan,
    hosts: Sequence[HostCapacity],
    *,
    may_move: bool = True,
    is_time_up: Callable[[], bool] = never,
) -> tuple[Plan, ContextChoice]:
    """Choose the context of a placement.

    Args:
        sizes: Sizes of the model's stages with the fewest positions, see `least_context`.
        plan: The placement, made with these sizes.
        hosts: All hosts, with the capacity that the placement was made of.
        may_move: Whether layers may be placed elsewhere later; not if they are locked to their hosts.
        is_time_up: Called between two losses that are tried: whether to leave the others out.

    Returns:
        The same placement with the memory that it takes then, and the choice.
    """
    least, n_ctx_train = sizes.workload.ctx_size, sizes.model.n_ctx_train
    most = max(least, min(n_ctx_train, MOST_CTX_SIZE))
    bounds = _Bounds(sizes, plan.stages, hosts, may_move=may_move, is_time_up=is_time_up)
    bound = _TRAINED if most >= n_ctx_train else _MOST
    low, high = 0, -((least - most) // _STEP)
    while low < high:
        middle = (low + high + 1) // 2
        refusal = bounds.refusal(min(least + middle * _STEP, most))
        if refusal is None:
            low = middle
        else:
            high, bound = middle - 1, refusal
    ctx_size = min(least + low * _STEP, most)
    larger = None
    if ctx_size < n_ctx_train:
        larger = bounds.larger(ctx_size, min(2 * ctx_size, n_ctx_train))
    stages = tuple(bounds.stages_with(ctx_size))
    return Plan(stages, plan.reason), ContextChoice(ctx_size, sizes.workload.num_slots, bound, larger)


def _crowded(host: HostCapacity, held: Sequence[tuple[StageMemory, StageMemory]]) -> str | None:
    """The bound that stages exceed on their host; None if there is none.

    Args:
        host: The host.
        held: Memory of each of its stages, and what it would be without a position.
    """
    left = {host.name: host.memory_bytes} | {gpu.name: gpu.free_bytes for gpu in host.gpus}
    taken = dict.fromkeys(left, 0)
    for memory, empty in held:
        for (device, fixed_bytes, cache_bytes), (_, _, state_bytes) in zip(
            _by_device(host.name, memory), _by_device(host.name, empty), strict=True
        ):
            # Recurrent states are there whatever the context.
            left[device] -= fixed_bytes + state_bytes
            taken[device] += cache_bytes - state_bytes
    for device, cache_bytes in taken.items():
        if cache_bytes and 2 * cache_bytes > left[device]:
            where = device if device == host.name else f"{device} of {host.name}"
            return f"KV caches take at most half of what the weights leave on {where}"
    beside = host
    for memory, _ in held:
        beside = beside.without(memory)
    return f"{host.name} has no room for more" if beside.is_overdrawn else None


def _by_device(host: str, memory: StageMemory) -> Iterator[tuple[str, int, int]]:
    """Name, weights and cache of each device with memory of its own, the host first."""
    shares = [share for share in memory.gpus if not share.shares_host_memory]
    weight_bytes = memory.weight_bytes - sum(share.weight_bytes for share in shares)
    yield host, weight_bytes, memory.cache_bytes - sum(share.cache_bytes for share in shares)
    for share in shares:
        yield share.device, share.weight_bytes, share.cache_bytes


def _everywhere(memory: StageMemory) -> int:
    """Memory of a stage on its host and on GPUs with their own."""
    return memory.total_bytes + sum(
        share.total_bytes for share in memory.gpus if not share.shares_host_memory
    )
