"""What a mesh is doing, for `/mesh/status` and for hosts' logs."""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from mesh.placement.host_capacity import format_gpu_layers
from mesh.placement.planner import Plan
from mesh.serve.incidents import Incidents
from mesh.serve.speculation_fit import speculation_refusal
from mesh.serve.transfers import Transfers
from spanmesh_proto import PROTOCOL_VERSION, SOFTWARE_VERSION

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mesh.cluster.link_survey import LinkSurvey
    from mesh.cluster.members import Member, Members
    from mesh.coordinator.coordinator import PendingEngine
    from mesh.engine import SpeculationMode
    from mesh.placement.planner import StagePlacement
    from mesh.serve.departures import Departures
    from mesh.serve.fleet import Fleet
    from mesh.serve.inspection import Inspection
    from mesh.serve.ledger import Ledger
    from mesh.serve.succession import Succession
    from stages.slicing.model_facts import ModelFacts
    from stages.weights.assembly import Transfer


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
        incidents: What went wrong lately.
        fleet: Stages and copies, once requests are answered.
        departures: Hosts that are to leave, likewise.
        inspection: Looks into hosts, once the head is open.
        transfers: What was brought to hosts.
        ledger: What all models hold of the hosts, once the head is open.
        succession: What is written down for a next head, likewise.
    """

    model: ModelFacts
    engine: PendingEngine
    phase: str = "starting"
    members: Members | None = None
    plan: Plan | None = None
    numeric_mode: str = "fast"
    speculation_mode: SpeculationMode = "off"
    survey: LinkSurvey | None = None
    incidents: Incidents = field(default_factory=lambda: Incidents(time.time))
    fleet: Fleet | None = None
    departures: Departures | None = None
    inspection: Inspection | None = None
    transfers: Transfers = field(default_factory=Transfers)
    ledger: Ledger | None = None
    succession: Succession | None = None

    def note_plan(self, stages: Sequence[StagePlacement], reason: str) -> None:
        """Who holds what from now on."""
        self.plan = Plan(tuple(stages), reason)

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
            "hosts": [
                _host_as_dict(
                    member, self._copies_on(member), self.transfers.of(member.name), self._held_bytes(member)
                )
                for member in self.members or ()
            ],
            # Why a next head would not know all that this one does; null while it would.
            "state_not_written": None if self.succession is None else self.succession.failure,
            **self.incidents.as_dict(),
        }
        if coordinator is None:
            return status | {"stages": []}
        status |= coordinator.status()
        status["speculation"] = {
            "mode": self.speculation_mode,
            "reason": speculation_refusal(self.model),
            **status["speculation"],
        }
        return status

    def _held_bytes(self, member: Member) -> int:
        return 0 if self.ledger is None else self.ledger.held_bytes(member)

    def _copies_on(self, member: Member) -> list[str]:
        if self.ledger is not None:
            return self.ledger.copies_on(member.name)
        copies = () if self.fleet is None else self.fleet.copy_list()
        return [str(copy.layers) for copy in copies if copy.host == member.name]


def _host_as_dict(member: Member, copies: list[str], transfer: Transfer, held_bytes: int) -> dict[str, Any]:
    facts = member.facts
    return {
        "name": member.name,
        "address": member.address,
        "ready": member.is_ready,
        "leaving": member.is_leaving,
        "layers": member.layers,
        # Loaded ahead: what a spare host could take over at once.
        "copies": copies,
        # What was brought there since this head was started: what the host had itself, and what was sent.
        "weights": asdict(transfer),
        "memory_bytes": facts.memory_bytes,
        # Of that, by all models: stages, copies, draft models.
        "held_bytes": held_bytes,
        "threads": facts.num_threads,
        "speed_gb_per_s": round(facts.speed_gb_per_s, 1),
        "gpus": [
            {
                "name": gpu.name,
                "description": gpu.description,
                "free_bytes": gpu.free_bytes,
                "total_bytes": gpu.total_bytes,
                "speed_gb_per_s": round(gpu.speed_gb_per_s, 1),
            }
            for gpu in facts.gpus
        ],
        "gpu_layers": format_gpu_layers(facts.gpu_layers),
        "llama_cpp": facts.versions.llama_cpp,
        "platform": facts.versions.platform,
    }
