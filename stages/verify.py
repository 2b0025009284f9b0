"""Sample-and-match: how the tail judges a window."""

from __future__ import annotations

from typing import TYPE_CHECKING

from spanmesh_proto.errors import InvalidWindow

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import numpy as np
    from numpy.typing import NDArray


def verify(
    rows_logits: Sequence[NDArray[np.float32]] | NDArray[np.float32],
    tokens: Sequence[int],
    start: int,
    choose: Callable[[NDArray[np.float32], int], int],
) -> list[int]:
    """Draw the target's own token after each verified row, for as long as it is the one that was proposed.

    Row `i` of a window tells what follows `tokens[i]`, so its draw has absolute position `start + i + 1` and
    is compared with `tokens[i + 1]`. The first difference voids the rows after it: they were computed on a
    history that was not taken. The last row has nothing to be compared with and is a free prediction.

    With tokens 5 6 7 8 at 40 and all four rows verified, draws 6 7 9 answer `[6, 7, 9]`: two accepted, and 9
    in the place of 8, at position 43.

    Args:
        rows_logits: float32, shape (verify_rows, n_vocab): logits of the window's last rows.
        tokens: All tokens of the window.
        start: Absolute position of its first row.
        choose: The session's own draw: the token for an absolute position, given the row before it.

    Returns:
        The ids drawn, up to and including the first that differs from the proposed token; empty if no row is
        to be verified.

    Raises:
        InvalidWindow: If there are more rows than tokens.
        StageFailed: If a row's logits are not finite.
    """
    first = len(tokens) - len(rows_logits)
    if first < 0:
        raise InvalidWindow(f"window at {start}: {len(rows_logits)} rows to verify, but {len(tokens)} tokens")
    drawn: list[int] = []
    for row, logits in enumerate(rows_logits, first):
        drawn.append(choose(logits, start + row + 1))
        if row + 1 < len(tokens) and drawn[-1] != tokens[row + 1]:
            break
    return drawn
