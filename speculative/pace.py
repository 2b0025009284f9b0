"""Expected tokens per millisecond of windows in flight, and the widths that make it highest.

A run lasts from one rejection to the next. Its first window takes the whole way, T; each one that follows
brings its tokens a *beat* later, since it flew behind. With acceptance `a` per token, `front` proposed tokens
in the first window and `width` in each other one, a run commits 1 / (1 - a) tokens and takes
T + beat · a^(front + 1) / (1 - a^width).

Several candidates per position (a tree in one batch) were weighed by the same account and left out. A second
candidate helps only where the first is wrong and it is right, (1 - a)·r of the time, and then brings one
token more than the verdict's own correction does; it costs a row always. At a = 0.8 and r = 0.5 that is 0.1
token for a row that costs 0.06 tokens at 20 ms one way, 0.17 at 5 ms and 0.42 at 0.1 ms (`row_price`, three
stages of 4.3 ms a row on two cores): five rows a run would win 0.2 of 5 tokens at best, and lose elsewhere.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from speculative.timing import Timing

_WIDTHS: Final = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 24, 32)
# Certainty makes runs endless; answers are not.
_MAX_ACCEPTANCE: Final = 0.99
# Windows under way for each that would fill the ring if all beats were alike. They are not: stages that share
# cores stumble, and a late window must not leave the next stage without work. What waits is soon cancelled.
_DEPTH_SLACK: Final = 3.0


@dataclass(frozen=True)
class Pace:
    """A way to send windows, and what it should bring.

    Attributes:
        front: Proposed tokens of a window that nothing flies ahead of.
        width: Proposed tokens of one that flies behind others.
        depth: Windows under way that keep the ring full.
        tokens_per_s: Expected.
    """

    front: int
    width: int
    depth: int
    tokens_per_s: float


def best_pace(
    timing: Timing, acceptance: float, *, max_width: int, max_depth: int, token_ms: float = 0.0
) -> Pace:
    """The widths with the most expected tokens per second.

    Args:
        timing: What is known of the ring; nothing known gives a moderate guess.
        acceptance: Chance of each proposed token, in [0, 1].
        max_width: Most proposed tokens in a window.
        max_depth: Most windows under way; 1 for windows in step.
        token_ms: What a proposed token takes to come about: a draft model's are made one after the other.

    Raises:
        ValueError: If `max_width` is below 1.
    """
    network_ms = timing.network_ms
    if network_ms is None:
        return Pace(min(4, max_width), min(4, max_width), max_depth, 0.0)
    acceptance = min(max(acceptance, 0.0), _MAX_ACCEPTANCE)
    widths = [width for width in _WIDTHS if width <= max_width]
    whole_ms = {rows: sum(timing.stages_ms(rows, is_alone=True)) for rows in [1, *(w + 1 for w in widths)]}
    best: Pace | None = None
    for width in widths:
        crowded_ms = timing.stages_ms(width, is_alone=False)
        beat_ms = max(1e-3, *crowded_ms)
        # Fewer windows than fill the ring would leave a hole in each beat.
        num_to_fill = (network_ms + sum(crowded_ms)) / beat_ms
        depth = min(max_depth, math.ceil(_DEPTH_SLACK * num_to_fill))
        beat_ms = max(beat_ms, width * token_ms, (network_ms + sum(crowded_ms)) / max(1, depth))
        tail = 0.0 if max_depth == 1 else beat_ms / (1.0 - acceptance**width)
        for front in [0, *widths]:
            run_ms = network_ms + whole_ms[front + 1] + tail * acceptance ** (front + 1)
            num_tokens = 1.0 / (1.0 - acceptance)
            if max_depth == 1:
                num_tokens = (1.0 - acceptance ** (front + 1)) / (1.0 - acceptance)
            tokens_per_s = 1000.0 * num_tokens / run_ms
            if best is None or tokens_per_s > best.tokens_per_s * 1.005:
                best = Pace(front, width, depth, tokens_per_s)
    if best is None:
        raise ValueError(f"max_width is {max_width}; it must be 1 or more")
    return best
