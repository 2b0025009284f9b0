"""Stage table: read times of every possible stage on every kind of host, as matrices.

Edges are the layers where a stage may start and stop: 0, the allowed cuts, and the number of layers. A matrix
has a row for each edge where a stage starts and a column for each where it stops, so that one step of a
search over stages is one operation of numpy, whatever rules forbid a stage. The dynamic programmes here hold
for any matrices, also where a longer stage fits and a shorter one does not.
"""

from __future__ import annotations

import itertools
from functools import cached_property
from typing import TYPE_CHECKING, Final, TypeAlias

import numpy as np

from mesh.placement.gpu_layers import SLOWEST_GB_PER_S, memory_on, read_time
from stages.layers import LayerRange

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import ArrayLike, NDArray

    from mesh.placement.host_capacity import HostCapacity
    from mesh.placement.memory_estimate import StageSizes

# Sums of floats in another order differ by less.
_ROUNDING: Final = 1e-9

Matrix: TypeAlias = "NDArray[np.float64]"


class StageTable:
    """Stages of one model under one workload, or of some of its layers.

    Args:
        sizes: Sizes of the model's stages.
        part: The layers; all unless given. It starts and stops at edges.

    Attributes:
        sizes: As given.
        edges: Layers where a stage may start or stop, ascending.
    """

    def __init__(self, sizes: StageSizes, part: LayerRange | None = None) -> None:
        part = part or sizes.whole
        self.sizes = sizes
        self.edges = tuple(edge for edge in sizes.edges if part.start <= edge <= part.stop)
        self._times: dict[HostCapacity, Matrix] = {}

    @cached_property
    def _places(self) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
        """Rows and columns of all stages that the model's rules allow."""
        rows, columns = np.triu_indices(len(self.edges), 1)
        may_be = self.sizes.model.may_be_stages(self._layers[rows], self._layers[columns])
        return rows[may_be], columns[may_be]

    @cached_property
    def _layers(self) -> NDArray[np.int64]:
        return np.array(self.edges, np.int64)

    @cached_property
    def _taken_bytes(self) -> Matrix:
        """Memory of each stage on a host without GPUs; infinity where no stage is allowed."""
        rows, columns = self._places
        return self._matrix(self.sizes.total_bytes(self._layers[rows], self._layers[columns]))

    @cached_property
    def read_bytes(self) -> Matrix:
        """Bytes that each stage reads per token; infinity where no stage is allowed."""
        rows, columns = self._places
        return self._matrix(self.sizes.many_read_bytes(self._layers[rows], self._layers[columns]))

    def times(self, host: HostCapacity) -> Matrix:
        """Time for a host to read each stage's weights, in nanoseconds; infinity where it has no room.

        Args:
            host: With the capacity left.
        """
        kind = host.kind
        if kind not in self._times:
            self._times[kind] = self._times_on(kind)
        return self._times[kind]

    def time_ns(self, layers: LayerRange, host: HostCapacity) -> float:
        """Time for a host to read one stage's weights, in ns; infinity if it has no room for it."""
        place = self.edges.index(layers.start), self.edges.index(layers.stop)
        return float(self.times(host)[place])

    def _times_on(self, host: HostCapacity) -> Matrix:
        sizes = self.sizes
        if sizes.workload.is_exact:
            host = host.in_exact_mode
        if not host.uses_gpus:
            times = self.read_bytes / max(host.speed_gb_per_s, SLOWEST_GB_PER_S)
            return np.where(self._taken_bytes <= host.memory_bytes, times, np.inf)
        rows, columns = self._places
        # Finding the shares of GPUs is slow: only for stages that are not too large in any case.
        held_bytes = np.minimum(
            *(
                each.many_layer_bytes(self._layers[rows], self._layers[columns])
                for each in (sizes, sizes.on_gpu)
            )
        )
        times = np.full((len(self.edges),) * 2, np.inf)
        for index in np.flatnonzero(held_bytes <= host.all_bytes):
            row, column = rows[index], columns[index]
            layers = LayerRange(self.edges[row], self.edges[column])
            memory = memory_on(sizes, layers, host)
            if memory is not None:
                times[row, column] = read_time(sizes, layers, memory, host)
        return times

    def _matrix(self, values: ArrayLike) -> Matrix:
        matrix = np.full((len(self.edges),) * 2, np.inf)
        matrix[self._places] = values
        return matrix

    def least_hosts(self, hosts: Sequence[HostCapacity]) -> int:
        """Lower bound of the number of hosts needed; more than there are if all of them cannot suffice.

        By the most that each of them could read as one stage; whether stages fit together is not considered.
        """
        most_bytes = sorted((self._most_read_bytes(host) for host in hosts), reverse=True)
        needed_bytes = self.sizes.read_bytes(LayerRange(self.edges[0], self.edges[-1]))
        return 1 + sum(held_bytes < needed_bytes for held_bytes in itertools.accumulate(most_bytes))

    def _most_read_bytes(self, host: HostCapacity) -> int:
        fitting = self.read_bytes[np.isfinite(self.times(host))]
        return int(fitting.max(initial=0.0))

    def balance(self, hosts: Sequence[HostCapacity]) -> tuple[LayerRange, ...] | None:
        """Layers for these hosts in this order, so that the slowest stage is as fast as possible.

        Among equal solutions, the most even one.

        Args:
            hosts: One host for each stage, with the memory that it may use.

        Returns:
            Layers of each host; None if the hosts are too small, or the model cannot be cut so often.
        """
        matrices = [self.times(host) for host in hosts]
        slowest = self._from_first_edge()
        for times in matrices:
            slowest = np.maximum(slowest[:, None], times).min(axis=0)
        if not np.isfinite(slowest[-1]):
            return None
        limit = slowest[-1] * (1 + _ROUNDING)
        cost, ways = self._from_first_edge(), []
        for times in matrices:
            reached = cost[:, None] + np.where(times <= limit, times * times, np.inf)
            ways.append(reached.argmin(axis=0))
            cost = reached.min(axis=0)
        column, parts = len(self.edges) - 1, []
        for way in reversed(ways):
            row = int(way[column])
            parts.append(LayerRange(self.edges[row], self.edges[column]))
            column = row
        return tuple(reversed(parts))

    def _from_first_edge(self) -> NDArray[np.float64]:
        cost = np.full(len(self.edges), np.inf)
        cost[0] = 0.0
        return cost
