"""Host assignment: read times of every possible stage, and the search for the hosts of a model's stages.

Two searches by dynamic programming, each over what distinguishes hosts, not over every order of them:

- which sets of hosts can hold all layers in any order at all. Hosts that have room for the same stages are
  interchangeable there, so a set is no more than a number of hosts of each class (Held and Karp's programme
  over sets, 1962, with multisets); what such a set reaches is computed for all sets of one size at once.
- the layers of each host in one order, see `StageTable.balance`.

The sets that the first search finds are tried with the second, fast hosts first; the fastest result is taken.

Edges are the layers where a stage may start and stop: 0, the allowed cuts, and the number of layers. A matrix
has a row for each edge where a stage starts and a column for each where it stops, so that one step of a
search over stages is one operation of numpy, whatever rules forbid a stage. The dynamic programmes here hold
for any matrices, also where a longer stage fits and a shorter one does not.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Final, TypeAlias

import numpy as np

from mesh.placement.gpu_layers import SLOWEST_GB_PER_S, memory_on, read_time
from stages.layers import LayerRange

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from numpy.typing import ArrayLike, NDArray

    from mesh.placement.host_capacity import HostCapacity
    from mesh.placement.memory_estimate import StageSizes

# Sums of floats in another order differ by less.
_ROUNDING: Final = 1e-9
Matrix: TypeAlias = "NDArray[np.float64]"
# Number of sets of hosts of which the fastest is taken.
_MAX_SETS: Final = 64
# Least gain of one host more than the fewest, as it costs a hop, too.
_LEAST_GAIN: Final = 0.05
# Multisets of classes that the search over sets looks at. If there are more, similar classes become one.
_MAX_STATES: Final = 4096


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


@dataclass(frozen=True)
class HostAssignment:
    """Hosts of the stages, with their layers."""

    hosts: tuple[HostCapacity, ...]
    """One host for each stage, in pipeline order, with the memory that the stage may use."""
    layers: tuple[LayerRange, ...]
    """Layers of each."""
    round_ns: float
    """Time to read the weights of all stages, one after the other: the delay of one session."""
    slowest_ns: float
    """Time to read the weights of the slowest stage: the delay in a full pipeline."""
    is_in_order: bool = True
    """Whether the hosts are in the order in which they joined."""
    least_stages: int = 1
    """The fewest hosts that can hold all layers."""

    def beats(self, other: HostAssignment) -> bool:
        """Whether it is faster for one session and not slower for many."""
        return self.round_ns < other.round_ns and self.slowest_ns <= other.slowest_ns


@dataclass(frozen=True)
class _Class:
    """Hosts with room for the same stages, or at least for these."""

    members: tuple[int, ...]
    """Indices of the hosts, ascending."""
    fits: dict[int, NDArray[np.bool_]]
    """By number of stages in a row on one host: from which edge to which they can reach."""

    def merged(self, other: _Class) -> _Class:
        """Both classes, with the stages that fit on either."""
        members = tuple(sorted(self.members + other.members))
        return _Class(members, {share: fits & other.fits[share] for share, fits in self.fits.items()})

    @property
    def num_fits(self) -> int:
        return sum(int(fits.sum()) for fits in self.fits.values())


class _Fits:
    """Sets of hosts that can hold all layers: as many hosts as stages are requested, or as few as possible.

    Args:
        table: Stage table of the model.
        hosts: All hosts.
        num_stages: Number of stages; None for one each on as few hosts as possible.

    Attributes:
        is_rough: Whether similar hosts count as equal, so that sets may be missed.
    """

    def __init__(
        self,
        table: StageTable,
        hosts: Sequence[HostCapacity],
        num_stages: int | None,
        *,
        at_least: int = 1,
    ) -> None:
        self._table = table
        self._hosts = hosts
        self._num_stages = num_stages
        most_hosts = min(len(hosts), len(table.edges) - 1 if num_stages is None else num_stages)
        self._shares = [1] * most_hosts if num_stages is None else _shares(most_hosts, num_stages)
        classes = _classes(table, hosts, sorted(set(self._shares)))
        self.is_rough = len(classes) > len(classes := _few(classes))
        self._classes = classes
        self._class_of = {index: number for number, each in enumerate(classes) for index in each.members}
        sizes = [len(each.members) + 1 for each in classes]
        self._strides = [math.prod(sizes[:number]) for number in range(len(sizes))]
        states = np.arange(math.prod(sizes))
        self._counts = np.stack(
            [states // stride % size for stride, size in zip(self._strides, sizes, strict=True)], axis=1
        )
        # Row by multiset, column by edge: whether all of it, in some order, reaches the end from there.
        self._leads = np.zeros((len(states), len(table.edges)), bool)
        self._leads[0, -1] = True
        least = max(at_least, table.least_hosts(hosts)) if num_stages is None else most_hosts
        self._found = self._search(least, most_hosts, is_count_free=num_stages is None)

    def _search(self, least: int, most: int, *, is_count_free: bool) -> NDArray[np.intp]:
        """Multisets of one size that reach the end from the first edge: the smallest size, or the largest."""
        if least > most:
            return np.empty(0, np.intp)
        sizes = self._counts.sum(axis=1)
        for size in range(1, most + 1):
            share = 1 if is_count_free else self._shares[most - size]
            states = np.flatnonzero(sizes == size)
            for number, (each, stride) in enumerate(zip(self._classes, self._strides, strict=True)):
                begun = states[self._counts[states, number] > 0]
                begun = begun[self._leads[begun - stride].any(axis=1)]
                # A host of this class comes first, and the rest continues from where it reaches.
                rest = self._leads[begun - stride].astype(np.float32)
                self._leads[begun] |= rest @ each.fits[share].T.astype(np.float32) > 0
            whole: NDArray[np.intp] = states[self._leads[states, 0]]
            if size == most or (is_count_free and size >= least and whole.size):
                return whole
        return np.empty(0, np.intp)

    def sets(self) -> Iterator[tuple[int, ...]]:
        """Indices of hosts, each set once, those with the fastest hosts first.

        Among hosts that are equal in everything, the first to join are taken.
        """
        by_speed = sorted(range(len(self._hosts)), key=lambda index: -self._hosts[index].fastest_gb_per_s)
        numbers = [self._class_of[index] for index in by_speed]
        left = np.zeros((len(numbers) + 1, len(self._classes)), int)
        for place in reversed(range(len(numbers))):
            left[place] = left[place + 1]
            left[place, numbers[place]] += 1
        # Depth first: decisions for the fastest hosts so far, and multisets that are still possible.
        ways: list[tuple[int, tuple[int, ...], frozenset[HostCapacity], NDArray[np.intp]]] = [
            (0, (), frozenset(), self._found)
        ]
        while ways:
            place, chosen, left_out, found = ways.pop()
            if not found.size:
                continue
            if place == len(by_speed):
                yield chosen
                continue
            index, number, kind = by_speed[place], numbers[place], self._hosts[by_speed[place]].kind
            taken = sum(self._class_of[each] == number for each in chosen)
            wanted = self._counts[found, number]
            can_do_without = wanted <= taken + left[place + 1, number]
            ways.append((place + 1, chosen, left_out | {kind}, found[can_do_without]))
            if kind not in left_out:
                ways.append((place + 1, (*chosen, index), left_out, found[wanted > taken]))

    def assigned(self, chosen: Sequence[int]) -> HostAssignment | None:
        """Stages on the hosts of a set, in the order of joining unless only others are possible."""
        as_come = [self._hosts[index] for index in sorted(chosen)]
        found = _assigned(self._table, as_come, self._num_stages)
        if found is not None:
            return found
        found = _assigned(self._table, self.reordered(chosen), self._num_stages)
        return None if found is None else replace(found, is_in_order=False)

    def reordered(self, chosen: Sequence[int]) -> list[HostCapacity]:
        """Hosts of a set in the first order, by that of joining, in which they can hold all layers."""
        waiting, order = sorted(chosen), []
        state = sum(self._strides[self._class_of[index]] for index in chosen)
        reached = np.zeros(self._leads.shape[1], bool)
        reached[0] = True
        for share in self._shares[: len(chosen)]:
            for index in waiting:
                number = self._class_of[index]
                beyond = reached @ self._classes[number].fits[share]
                if (beyond & self._leads[state - self._strides[number]]).any():
                    break
            waiting.remove(index)
            order.append(self._hosts[index])
            state, reached = state - self._strides[number], beyond
        return order


def never() -> bool:
    """A search that is not to stop early."""
    return False


def find_assignment(
    table: StageTable,
    hosts: Sequence[HostCapacity],
    num_stages: int | None = None,
    is_time_up: Callable[[], bool] = never,
) -> HostAssignment | None:
    """Assign a model to as few hosts as can hold it.

    Args:
        table: Stage table of the model.
        hosts: In the order in which they joined. It is kept unless they can hold the model in others only;
            then the first of these in lexicographic order of joining.
        num_stages: Exactly this many stages; hosts take several in a row if there are fewer hosts.
        is_time_up: Called between two sets of hosts: whether to stop with the best one so far.

    Returns:
        None if the hosts are too small.
    """
    fits = _Fits(table, hosts, num_stages)
    best = _best_of(fits, is_time_up)
    if fits.is_rough:
        chosen = _fewest_in_order(table, hosts) if num_stages is None else _roomiest(hosts, num_stages)
        if chosen is not None and (best is None or len(chosen) < len(best.hosts)):
            best = _assigned(table, chosen, num_stages) or best
    if best is None:
        return None
    if num_stages is None and not best.is_in_order:
        # The choice among interchangeable hosts may decide whether the order can be kept.
        best = _first_in_order(table, hosts, len(best.hosts), is_time_up) or best
    least = len(best.hosts)
    if num_stages is None and not best.is_in_order and not is_time_up():
        # So few hosts have little room to spare; where that takes another order, one more may be faster.
        more = _best_of(_Fits(table, hosts, None, at_least=least + 1), is_time_up)
        if more is not None and more.beats(best) and more.round_ns < best.round_ns * (1 - _LEAST_GAIN):
            best = more
    return replace(best, least_stages=least)


def _best_of(fits: _Fits, is_time_up: Callable[[], bool]) -> HostAssignment | None:
    """The fastest of the sets that are tried; in the order of joining if one of them can be."""
    tried = []
    for chosen in itertools.islice(fits.sets(), _MAX_SETS):
        found = fits.assigned(chosen)
        if found is not None:
            tried.append(found)
        if is_time_up() and tried:
            break
    best = None
    for found in sorted(tried, key=lambda found: not found.is_in_order):
        if best is None or found.beats(best):
            best = found
    return best


def _first_in_order(
    table: StageTable, hosts: Sequence[HostCapacity], num_hosts: int, is_time_up: Callable[[], bool]
) -> HostAssignment | None:
    """The first so many hosts that can hold all layers in their order, among a few that are tried."""
    for chosen in itertools.islice(itertools.combinations(hosts, num_hosts), _MAX_SETS):
        if is_time_up():
            break
        if (found := _assigned(table, chosen)) is not None:
            return found
    return None


def assign_all(table: StageTable, hosts: Sequence[HostCapacity]) -> HostAssignment | None:
    """Assign all hosts, in this order if possible; None if they are too small."""
    found = _assigned(table, hosts)
    if found is not None or table.least_hosts(hosts) > len(hosts):
        return found
    fits = _Fits(table, hosts, len(hosts))
    all_hosts = next(fits.sets(), None)
    return None if all_hosts is None else _assigned(table, fits.reordered(all_hosts))


def _assigned(
    table: StageTable, hosts: Sequence[HostCapacity], num_stages: int | None = None
) -> HostAssignment | None:
    """Stages on these hosts in this order."""
    shares = _shares(len(hosts), num_stages)
    of_stages = tuple(
        part
        for host, share in zip(hosts, shares, strict=True)
        for part in itertools.repeat(host.divided(share), share)
    )
    layers = table.balance(of_stages)
    if layers is None:
        return None
    times_ns = [table.time_ns(part, host) for part, host in zip(layers, of_stages, strict=True)]
    return HostAssignment(of_stages, layers, sum(times_ns), max(times_ns))


def _shares(num_hosts: int, num_stages: int | None) -> list[int]:
    """Number of stages of each host, in pipeline order."""
    num_stages = num_stages or num_hosts
    return [(num_stages + num_hosts - 1 - index) // num_hosts for index in range(num_hosts)]


def _fewest_in_order(table: StageTable, hosts: Sequence[HostCapacity]) -> tuple[HostCapacity, ...] | None:
    """As few of these hosts as can hold all layers in this order; None if they cannot."""
    counts = np.full(len(table.edges), np.inf)
    counts[0] = 0.0
    ways: list[tuple[NDArray[np.bool_], NDArray[np.intp]]] = []
    for host in hosts:
        reached = counts[:, None] + np.where(np.isfinite(table.times(host)), 1.0, np.inf)
        is_used = reached.min(axis=0) < counts
        ways.append((is_used, reached.argmin(axis=0)))
        counts = np.minimum(counts, reached.min(axis=0))
    if not np.isfinite(counts[-1]):
        return None
    chosen, edge = [], len(table.edges) - 1
    for host, (is_used, way) in zip(reversed(hosts), reversed(ways), strict=True):
        if is_used[edge]:
            chosen.append(host)
            edge = int(way[edge])
    return tuple(reversed(chosen))


def _roomiest(hosts: Sequence[HostCapacity], count: int) -> list[HostCapacity]:
    """So many of the hosts with the most memory, in this order."""
    by_room = sorted(range(len(hosts)), key=lambda index: -hosts[index].all_bytes)
    return [hosts[index] for index in sorted(by_room[:count])]


def _classes(table: StageTable, hosts: Sequence[HostCapacity], shares: Sequence[int]) -> list[_Class]:
    """Classes of hosts, by the stages that fit on them."""
    members: dict[tuple[bytes, ...], list[int]] = {}
    fits_of: dict[tuple[bytes, ...], dict[int, NDArray[np.bool_]]] = {}
    for index, host in enumerate(hosts):
        fits = {share: _in_a_row(np.isfinite(table.times(host.divided(share))), share) for share in shares}
        key = tuple(each.tobytes() for each in fits.values())
        members.setdefault(key, []).append(index)
        fits_of[key] = fits
    return [_Class(tuple(indices), fits_of[key]) for key, indices in members.items()]


def _in_a_row(fits: NDArray[np.bool_], count: int) -> NDArray[np.bool_]:
    """From which edge to which so many stages in a row can reach."""
    led = fits
    for _ in range(count - 1):
        led = led.astype(np.float32) @ fits.astype(np.float32) > 0
    return led


def _few(classes: list[_Class]) -> list[_Class]:
    """The same hosts in so few classes that all multisets of them can be searched."""
    classes = sorted(classes, key=lambda each: each.num_fits)
    while math.prod(len(each.members) + 1 for each in classes) > _MAX_STATES:
        merged = [left.merged(right) for left, right in itertools.pairwise(classes)]
        lost = [
            len(left.members) * (left.num_fits - both.num_fits)
            + len(right.members) * (right.num_fits - both.num_fits)
            for (left, right), both in zip(itertools.pairwise(classes), merged, strict=True)
        ]
        place = lost.index(min(lost))
        classes[place : place + 2] = [merged[place]]
    return classes
