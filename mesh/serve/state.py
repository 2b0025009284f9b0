"""What a mesh is doing, for `/mesh/status` and for hosts' logs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from spanmesh_proto import PROTOCOL_VERSION, SOFTWARE_VERSION

if TYPE_CHECKING:
    from mesh.cluster.link_survey import LinkSurvey
    from mesh.cluster.members import Member, Members
    from mesh.engine import SpeculationMode
    from mesh.planner import Plan
    from mesh.serve.pending import PendingEngine
    from stages.cutting import ModelFacts


@dataclass
class MeshState:
    """Filled in as `mesh serve` goes along.

    Attributes:
        model: What is served.
        engine: Answers, once it can.
        phase: What is going on, in a few words.
        members: Hosts, once the head is open.
        plan: Who holds what, once that is known.
        numeric_mode: `fast` or `exact`.
        speculation_mode: Who may propose.
        survey: Measures the links between hosts, once the head is open.
    """

    model: ModelFacts
    engine: PendingEngine
    phase: str = "starting"
    members: Members | None = None
    plan: Plan | None = None
    numeric_mode: str = "fast"
    speculation_mode: SpeculationMode = "off"
    survey: LinkSurvey | None = None

    def as_dict(self) -> dict[str, Any]:
        """Fit for JSON."""
        coordinator = self.engine.coordinator
        status: dict[str, Any] = {
            "version": SOFTWARE_VERSION,
            "protocol_version": PROTOCOL_VERSION,
            "model": {
                "name": self.model.name,
                "architecture": self.model.architecture,
                "layers": self.model.n_layers,
                "file_bytes": self.model.file_bytes,
                "context": self.engine.context_length,
                "numeric_mode": self.numeric_mode,
            },
            "phase": self.phase,
            "ready": self.engine.is_ready,
            "plan": self.plan.reason if self.plan is not None else None,
            "hosts": [_host_as_dict(member) for member in self.members or ()],
        }
        if coordinator is None:
            return status | {"stages": []}
        status |= coordinator.status()
        status["speculation"] = {"mode": self.speculation_mode, **status["speculation"]}
        return status


def _host_as_dict(member: Member) -> dict[str, Any]:
    facts = member.facts
    return {
        "name": member.name,
        "address": member.address,
        "ready": member.is_ready,
        "layers": member.layers,
        "memory_bytes": facts.memory_bytes,
        "threads": facts.num_threads,
        "speed_gb_per_s": round(facts.speed_gb_per_s, 1),
        "llama_cpp": facts.versions.llama_cpp,
        "platform": facts.versions.platform,
    }
