"""What is done to a mesh, and when. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random
from typing import TYPE_CHECKING, Final, Literal, get_args

if TYPE_CHECKING:
    from collections.abc import Sequence

HarmKind = Literal["first", "middle", "tail", "raylet", "cut-off", "stop", "leave"]
KINDS: Final[tuple[HarmKind, ...]] = get_args(HarmKind)
# In words, for reports.
MEANING: Final[dict[str, str]] = {
    "first": "kill -9 of the first stage's process",
    "middle": "kill -9 of a middle stage's process",
    "tail": "kill -9 of the tail's process",
    "raylet": "kill -9 of a stage host's raylet",
    "cut-off": "every packet of a stage's host lost for some seconds",
    "stop": "SIGSTOP of a stage's process for some seconds",
    "leave": "SIGTERM to `mesh join` of a stage's host, which is started again",
}
# Long enough for streams to flow again, short enough for a hundred; and the same in a hurry.
_WAIT_S: Final = (0.5, 4.0)
_SHORT_WAIT_S: Final = (0.3, 1.0)
# Beyond the time after which a silent stage is given up.
_HOLD_S: Final = (3.0, 8.0)
_SHORT_HOLD_S: Final = (2.5, 3.5)


@dataclass(frozen=True)
class Harm:
    """One of them.

    Attributes:
        number: From 0.
        kind: See `MEANING`.
        wait_s: How long all is well before it, in seconds.
        hold_s: How long a host stays cut off, or a process stopped.
        pick: In [0, 1): which one of several that it may hit.
    """

    number: int
    kind: HarmKind
    wait_s: float
    hold_s: float
    pick: float


def draw_harms(
    count: int, kinds: Sequence[HarmKind], seed: int, *, is_short: bool = False
) -> tuple[Harm, ...]:
    """Every kind as often as the others, within one, in random order, at random moments.

    Args:
        count: How many.
        kinds: Among which, at least one.
        seed: The same seed, the same harms.
        is_short: Whether they follow and pass quickly.
    """
    waits_s = _SHORT_WAIT_S if is_short else _WAIT_S
    holds_s = _SHORT_HOLD_S if is_short else _HOLD_S
    random = Random(seed)  # noqa: S311 - an experiment, not a secret
    deck: list[HarmKind] = []
    harms = []
    for number in range(count):
        if not deck:
            deck = random.sample(list(kinds), len(kinds))
        harms.append(
            Harm(number, deck.pop(), random.uniform(*waits_s), random.uniform(*holds_s), random.random())
        )
    return tuple(harms)


def victim(kind: HarmKind, pick: float, num_stages: int) -> int:
    """Index of the stage that is hit, or whose host is.

    Args:
        kind: Of harm.
        pick: In [0, 1).
        num_stages: At least one.
    """
    if kind == "first":
        return 0
    if kind == "tail":
        return num_stages - 1
    if kind == "middle" and num_stages > 2:
        return 1 + int(pick * (num_stages - 2))
    # A ring of two has no middle; then either is hit.
    return int(pick * num_stages)
