"""Topology file: a locked placement in TOML.

A mesh with a topology fails closed: it waits for a missing host, and never places that host's layers
elsewhere, neither at first nor in a recovery.
"""

from __future__ import annotations

import re
import tomllib
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from mesh.placement.host_assignment import never
from mesh.placement.planner import Plan, StagePlacement
from mesh.placement.replanner import NewStage, Replan
from spanmesh_proto.errors import ClusterError, ModelDoesNotFit, NotEnoughHosts, UncuttableModel
from stages.layers import LayerRange
from stages.units import format_size

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Sequence
    from pathlib import Path

    from mesh.placement.host_capacity import HostCapacity
    from mesh.placement.memory_estimate import StageSizes
    from mesh.placement.replanner import Replica
    from stages.slicing.model_facts import ModelFacts

_LAYERS: Final = re.compile(r"(\d{1,6}):(\d{1,6})")
_OPTION: Final = "--topology"
_EXAMPLE: Final = '[[stage]] with host = "alpha" and layers = "0:12"'


@dataclass(frozen=True)
class LockedStage:
    """One stage of a topology."""

    host: str
    """Name of its only host."""
    layers: LayerRange
    """Its layers."""


@dataclass(frozen=True)
class Topology:
    """All stages, in pipeline order; together they hold every layer once."""

    stages: tuple[LockedStage, ...]
    """At least one."""

    @property
    def hosts(self) -> tuple[str, ...]:
        """Names of the hosts, in pipeline order, each once."""
        return tuple(dict.fromkeys(stage.host for stage in self.stages))

    def check(self, model: ModelFacts) -> None:
        """Check that a model can be cut like that.

        Raises:
            UncuttableModel: If it has more or fewer layers, or no cut is allowed at one of the places.
        """
        stop = self.stages[-1].layers.stop
        if stop != model.n_layers:
            raise UncuttableModel(
                f"{_OPTION} places {stop} layers; {model.name} has {model.n_layers}", param=_OPTION
            )
        for stage in self.stages[1:]:
            if stage.layers.start not in model.allowed_cuts:
                raise UncuttableModel(
                    f"{_OPTION}: {model.name} ({model.architecture}) cannot be cut at layer "
                    f"{stage.layers.start}",
                    param=_OPTION,
                )
        for stage in self.stages:
            if not model.may_be_stage(stage.layers):
                raise UncuttableModel(
                    f"{_OPTION}: no stage of {model.name} can have {len(stage.layers)} layers: "
                    f"{model.refused_lengths[len(stage.layers)]}",
                    param=_OPTION,
                )

    def missing(self, present: Iterable[str]) -> tuple[str, ...]:
        """Hosts of the topology that are not among these."""
        names = set(present)
        return tuple(host for host in self.hosts if host not in names)

    def plan(self, sizes: StageSizes, hosts: Sequence[HostCapacity]) -> Plan:
        """The plan of the topology.

        Args:
            sizes: Sizes of the model's stages.
            hosts: Present hosts.

        Raises:
            NotEnoughHosts: If a host of the topology is missing.
            ModelDoesNotFit: If a host has too little memory.
        """
        everything = [
            StagePlacement(stage.host, stage.layers, sizes.memory(stage.layers)) for stage in self.stages
        ]
        self._require(everything, (), hosts)
        return Plan(tuple(everything), f"locked by {_OPTION}")

    def replan(
        self,
        sizes: StageSizes,
        stages: Sequence[StagePlacement],
        lost: Collection[int],
        hosts: Sequence[HostCapacity],
        replicas: Iterable[Replica] = (),
        *,
        may_start_over: bool = True,  # noqa: ARG002 - called in the place of `mesh.placement.replanner.replan`
        is_time_up: Callable[[], bool] = never,  # noqa: ARG002 - likewise
    ) -> Replan:
        """Place lost stages on their own hosts, or fail; see `mesh.placement.replanner.replan`.

        Raises:
            NotEnoughHosts: If the host of a lost stage is missing.
            ModelDoesNotFit: If it has too little memory now.
        """
        back = [
            StagePlacement(stages[index].host, stages[index].layers, sizes.memory(stages[index].layers))
            for index in sorted(lost)
        ]
        staying = [stage for index, stage in enumerate(stages) if index not in lost]
        self._require(back, staying, hosts)
        new = tuple(
            NewStage(stage) if index in lost else NewStage(stage, kept=index)
            for index, stage in enumerate(stages)
        )
        moved = ", ".join(f"{stage.layers} again on {stage.host}" for stage in back)
        return Replan(new, tuple(replicas), f"layers {moved}" if moved else "nothing moved")

    def _require(
        self,
        placed: Sequence[StagePlacement],
        beside: Sequence[StagePlacement],
        hosts: Sequence[HostCapacity],
    ) -> None:
        capacities = {host.name: host for host in hosts}
        for stage in placed:
            if stage.host not in capacities:
                raise NotEnoughHosts(
                    f"{_OPTION} locks layers {stage.layers} to host {stage.host}, which is not ready: "
                    f"bring it back with `mesh join --name {stage.host}`, or start `mesh serve` again "
                    f"without {_OPTION}"
                )
        needed = Counter[str]()
        for stage in (*placed, *beside):
            needed[stage.host] += stage.memory.total_bytes
        for name in dict.fromkeys(stage.host for stage in placed):
            if needed[name] > capacities[name].memory_bytes:
                raise ModelDoesNotFit(
                    f"{_OPTION} locks layers to host {name} that need {format_size(needed[name])} there; "
                    f"free are {format_size(capacities[name].memory_bytes)}; lower --ctx-size or --parallel, "
                    "or lock fewer layers there",
                    param=_OPTION,
                )


def read_topology(path: Path) -> Topology:
    """A topology from a TOML file.

    Raises:
        ClusterError: If it cannot be read, or does not place each layer once, in order.

    Example:
        ::

            [[stage]]
            host = "alpha"
            layers = "0:12"

            [[stage]]
            host = "beta"
            layers = "12:30"
    """
    try:
        fields = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise _wrong(path, error.strerror or str(error)) from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise _wrong(path, f"it is not TOML: {error}") from error
    unknown = [key for key in fields if key != "stage"]
    if unknown:
        raise _wrong(path, f"it has {unknown[0]!r}; there is only {_EXAMPLE}")
    entries = fields.get("stage")
    if not isinstance(entries, list) or not entries:
        raise _wrong(path, f"it names no stage; write {_EXAMPLE}")
    stages = tuple(_stage(path, number, entry) for number, entry in enumerate(entries))
    start = 0
    for stage in stages:
        if stage.layers.start != start:
            raise _wrong(path, f"layers {stage.layers} of {stage.host} must start at {start}")
        start = stage.layers.stop
    return Topology(stages)


def _stage(path: Path, number: int, entry: Any) -> LockedStage:
    who = f"stage {number}"
    if not isinstance(entry, dict) or set(entry) != {"host", "layers"}:
        raise _wrong(path, f"{who} must have host and layers and nothing else, as in {_EXAMPLE}")
    host, layers = entry["host"], entry["layers"]
    match = _LAYERS.fullmatch(layers) if isinstance(layers, str) else None
    if not isinstance(host, str) or not host or match is None or int(match[1]) >= int(match[2]):
        raise _wrong(path, f"{who} has host {host!r} and layers {layers!r}; write it like {_EXAMPLE}")
    return LockedStage(host, LayerRange(int(match[1]), int(match[2])))


def _wrong(path: Path, reason: str) -> ClusterError:
    return ClusterError(f"the topology {path} cannot be used: {reason}", param=_OPTION)
