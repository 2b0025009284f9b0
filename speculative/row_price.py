"""What one more row costs, as a share of a token: the likelihood below which it is not worth sending.

A stage that computes a row computes nothing else meanwhile, so `n` sessions that would commit tokens at the
plain rate lose rate × the time that the row adds to a beat. While the wire is slow that is next to nothing;
where stages have no idle time it comes near a whole token, and only what is nearly certain pays.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from speculative.timing import Timing

# A row that is wasted delays others only while it computes; part of the time the ring waits for the wire.
_SHARE_FELT: Final = 0.6
# Not even an idle ring makes a hopeless row worth its bytes, and a certain one is always worth trying.
_MIN_PRICE: Final = 0.02
_MAX_PRICE: Final = 0.95


def row_price(timing: Timing, plain_tokens_per_ms: float, *, num_rows: int, is_new_window: bool) -> float:
    """Tokens that one more row costs, from 0.02 to 0.95.

    Args:
        timing: What is known of the ring.
        plain_tokens_per_ms: What all sessions together commit without speculation.
        num_rows: Rows of the batch with the new one.
        is_new_window: Whether the row makes a batch of its own necessary: then it pays for all of that.
    """
    added_ms = row_ms(timing, 1 if is_new_window else num_rows)
    return min(max(_SHARE_FELT * plain_tokens_per_ms * added_ms, _MIN_PRICE), _MAX_PRICE)


def row_ms(timing: Timing, num_rows: int) -> float:
    """What a row adds to a batch of `num_rows` at the slowest stage; all of it, if it is the only one."""
    batch_ms = max(timing.stages_ms(num_rows, is_alone=False), default=0.0)
    if num_rows == 1:
        return batch_ms
    # The mean step: a single one is small enough to be lost in noise.
    return (batch_ms - max(timing.stages_ms(1, is_alone=False), default=0.0)) / (num_rows - 1)
