"""A run and the folder that says it."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from mesh.bench.stress.lines import as_markdown
from mesh.bench.stress.plots import draw_plots

if TYPE_CHECKING:
    from pathlib import Path

    from mesh.bench.stress.check import Check
    from mesh.bench.stress.clients import ClientCounts
    from mesh.bench.stress.footprint import Footprint
    from mesh.bench.stress.growth import Growth
    from mesh.bench.stress.line import Line
    from mesh.bench.stress.step import Step
    from mesh.lab.memory_watch import MemorySample


@dataclass(frozen=True)
class RoleMemory:
    """All processes of one role on one host, over the run.

    Attributes:
        host: Its number.
        role: See `memory_watch.Role`.
        num_processes: Most at once.
        max_bytes: Most that they took together.
        growth: Of each steady load's processes of this role, one after the other; none if it was too short.
    """

    host: int
    role: str
    num_processes: int
    max_bytes: int
    growth: tuple[Growth, ...]


@dataclass(frozen=True)
class Report:
    """A run, worked out.

    Attributes:
        circumstances: How it was made, by name.
        steps: Of the ramp, the soak last.
        has_ramp: Whether there were several steps of a ramp.
        saturation: Concurrency after which more brings nothing; None if there is none.
        lines: Of the acceptance table.
        checks: What must hold.
        footprints: Of every stage.
        stages: What `/mesh/status` says of them at the end: times and counts of the whole run.
        memory: By host and role.
        samples: What the memory figures are made of.
        failures: What could not be measured, and why.
        clients: What became of them, if some were to hang up.
    """

    circumstances: dict[str, Any]
    steps: tuple[Step, ...]
    has_ramp: bool
    saturation: int | None
    lines: tuple[Line, ...]
    checks: tuple[Check, ...]
    footprints: tuple[Footprint, ...]
    stages: tuple[dict[str, Any], ...]
    memory: tuple[RoleMemory, ...]
    samples: tuple[MemorySample, ...]
    failures: tuple[str, ...]
    clients: ClientCounts | None = None

    @property
    def is_good(self) -> bool:
        """Whether nothing failed: neither a check, nor a measurement. A line that was missed is a figure."""
        return not self.failures and all(check.holds is not False for check in self.checks)


def as_dict(report: Report) -> dict[str, Any]:
    """For JSON."""
    return {
        "circumstances": report.circumstances,
        "good": report.is_good,
        "steps": [
            {
                "concurrency": step.concurrency,
                "tokens_per_s": step.tokens_per_s,
                "peer_tokens_per_s": step.peer_tokens_per_s,
                "ratio": step.ratio,
                "fork_rate": step.judgement.fork_rate,
                "problems_by_kind": step.judgement.by_kind,
                "figures": asdict(step.figures),
                "judgement": asdict(step.judgement),
            }
            for step in report.steps
        ],
        "saturation": report.saturation,
        "lines": [{**asdict(line), "verdict": line.verdict} for line in report.lines],
        "checks": [asdict(check) for check in report.checks],
        "footprints": [
            {**asdict(each), "overhead_bytes": each.overhead_bytes, "is_within": each.is_within}
            for each in report.footprints
        ],
        "stages": list(report.stages),
        "memory": [asdict(each) for each in report.memory],
        "failures": list(report.failures),
        "clients": None if report.clients is None else asdict(report.clients),
    }


def as_json(report: Report, *, with_samples: bool = False) -> str:
    """The report for programs.

    Args:
        report: What to say.
        with_samples: Whether every look at every process is told of too.
    """
    fields = as_dict(report)
    if with_samples:
        fields["samples"] = [asdict(sample) for sample in report.samples]
    return json.dumps(_plain(fields), indent=1, ensure_ascii=False, allow_nan=False)


def write_report(report: Report, folder: Path) -> None:
    """Write `report.md`, `report.json` and the pictures.

    Args:
        report: What to say.
        folder: Made if it is not there.
    """
    folder.mkdir(parents=True, exist_ok=True)
    plots = draw_plots(report, folder)
    (folder / "report.md").write_text(as_markdown(report, plots), encoding="utf-8")
    (folder / "report.json").write_text(as_json(report, with_samples=True) + "\n", encoding="utf-8")


def _plain(value: Any) -> Any:
    """JSON knows neither numbers that are none nor names that are numbers."""
    if isinstance(value, dict):
        return {str(name): _plain(inner) for name, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(inner) for inner in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value
