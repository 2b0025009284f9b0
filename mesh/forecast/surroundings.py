"""The hosts that a model could be placed on, wherever they are known from."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from mesh.placement.host_capacity import HostCapacity
    from mesh.placement.links import Links
    from stages.host.profile_request import RehearsalOrder, StageTiming


@dataclass(frozen=True)
class KnownHost:
    """One host.

    Attributes:
        capacity: As the planner sees it.
        num_threads: For computing.
        absent: Why it can hold nothing now; empty if it can.
    """

    capacity: HostCapacity
    num_threads: int
    absent: str = ""


@dataclass(frozen=True)
class Rehearsed:
    """What a host found out about itself.

    Attributes:
        timings: One for each order; none if it failed.
        failure: Why, or empty.
    """

    timings: tuple[StageTiming, ...] = ()
    failure: str = ""


class Timer(Protocol):
    """Has hosts rehearse."""

    def __call__(self, wanted: Mapping[str, Sequence[RehearsalOrder]]) -> Mapping[str, Rehearsed]:
        """By host: what it was asked, and what came of it."""


@dataclass(frozen=True)
class Surroundings:
    """Where a plan is made.

    Attributes:
        hosts: In the order in which they came.
        head: Name of the coordinator's host; it need not be one of them.
        links: Between all of them.
        timer: Has them rehearse.
        basis: What its timings rest on, for a person.
    """

    hosts: tuple[KnownHost, ...]
    head: str
    links: Links
    timer: Timer
    basis: str
