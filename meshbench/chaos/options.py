"""Options of `mesh bench chaos`, and the least memory of its hosts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from mesh.placement.host_capacity import HostCapacity
from mesh.placement.planner import plan
from meshbench.shared_options import LabOptions
from spanmesh_proto.errors import ModelDoesNotFit

if TYPE_CHECKING:
    from mesh.placement.memory_estimate import Workload
    from meshbench.chaos.fault_kinds import FaultKind
    from stages.slicing.model_facts import ModelFacts

_STEP_BYTES: Final = 2**20


@dataclass(frozen=True, kw_only=True)
class ChaosOptions(LabOptions):
    """A run of `mesh bench chaos`; see `LabOptions` for the other options."""

    scenarios: tuple[str, ...]
    """Scenarios, in order."""
    num_spares: int
    """Hosts without."""
    num_streams: int
    """Requests under way at any time."""
    num_faults: int
    """How many."""
    kinds: tuple[FaultKind, ...]
    """Among which they are drawn."""
    awaits_replicas: bool
    """Whether a mesh is whole only when its spare hosts have every stage loaded ahead."""
    num_questions: int
    """Different ones."""
    answer_tokens: tuple[int, ...]
    """Lengths of answers, of which each question gets one."""
    whole_timeout_s: float
    """A mesh that is not whole again so long after a fault has failed."""


def least_memory_bytes(model: ModelFacts, workload: Workload, num_hosts: int) -> int:
    """Memory of each of several equal hosts, in whole MiB, for one stage on each."""
    low, high = 0, model.file_bytes + 2**36
    while high - low > _STEP_BYTES:
        middle = (low + high) // 2 // _STEP_BYTES * _STEP_BYTES
        if middle in {low, high}:
            break
        if _fits(model, workload, num_hosts, middle):
            high = middle
        else:
            low = middle
    return -(-high // _STEP_BYTES) * _STEP_BYTES


def _fits(model: ModelFacts, workload: Workload, num_hosts: int, memory_bytes: int) -> bool:
    hosts = [HostCapacity(f"host{index}", memory_bytes, 1.0) for index in range(num_hosts)]
    try:
        plan(model, hosts, workload, num_stages=num_hosts)
    except ModelDoesNotFit:
        return False
    return True
