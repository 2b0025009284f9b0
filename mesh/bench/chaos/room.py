"""How little memory hosts may offer for a model just to fit. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from mesh.placement.host_capacity import HostCapacity
from mesh.placement.planner import plan
from spanmesh_proto.errors import ModelDoesNotFit

if TYPE_CHECKING:
    from mesh.placement.stage_sizes import Workload
    from stages.slicing.model_facts import ModelFacts

_STEP_BYTES: Final = 2**20


def least_memory_bytes(model: ModelFacts, workload: Workload, num_hosts: int) -> int:
    """What each of so many equal hosts must offer, in whole MiB, for one stage on each."""
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
