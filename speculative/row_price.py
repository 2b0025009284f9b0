"""What one more row costs, as a share of a token: the likelihood below which it is not worth sending.

A stage that computes a row computes nothing else meanwhile, so `n` sessions that would commit tokens at the
plain rate lose rate × the time that the row adds to a beat. While the wire is slow that is next to nothing;
where stages have no idle time it comes near a whole token, and only what is nearly certain pays.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from speculative.timing import Timing

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
    with_row = timing.stages_ms(num_rows, is_alone=False)
    without_row = timing.stages_ms(num_rows - 1, is_alone=False) if num_rows > 1 and not is_new_window else ()
    added_ms = max(with_row, default=0.0) - max(without_row, default=0.0)
    return min(max(plain_tokens_per_ms * added_ms, _MIN_PRICE), _MAX_PRICE)
