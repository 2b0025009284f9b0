"""Ids of rows: those of tokens, and above them those of rows that are no tokens.

A row that is no token, such as a part of a picture, has an id that stands for its content: prefixes,
replicas and blocks on disk compare ids of both kinds alike. Its values come from a plug of the first stage.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np
    from numpy.typing import NDArray

FIRST_ROW_ID: Final = 2**31
"""Ids from here on, up to 32 bits, are those of rows that are no tokens."""


def stray_id(ids: Sequence[int], n_vocab: int, *, may_be_rows: bool = False) -> int | None:
    """The first id that is no token's; None if there is none.

    Args:
        ids: The ids.
        n_vocab: Number of token ids.
        may_be_rows: Whether those of rows that are no tokens count as well.
    """
    if not ids or (max(ids) < n_vocab and min(ids) >= 0):
        return None
    rows_from = FIRST_ROW_ID if may_be_rows else 2**32
    return next((each for each in ids if not (0 <= each < n_vocab or each >= rows_from)), None)


def has_rows(ids: Sequence[int]) -> bool:
    """Whether any are those of rows that are no tokens."""
    return bool(ids) and max(ids) >= FIRST_ROW_ID


def num_alike(ids: Sequence[int]) -> int:
    """Number of first ids that are all of tokens, or all of rows that are none."""
    if not has_rows(ids):
        return len(ids)
    is_row = ids[0] >= FIRST_ROW_ID
    return next((index for index, each in enumerate(ids) if (each >= FIRST_ROW_ID) != is_row), len(ids))


def num_before_rows(ids: Sequence[int]) -> int:
    """Number of first ids that are of tokens."""
    if not has_rows(ids):
        return len(ids)
    return next(index for index, each in enumerate(ids) if each >= FIRST_ROW_ID)


def tokens_among(ids: NDArray[np.int64]) -> NDArray[np.int64]:
    """The ids of tokens, in order."""
    return ids[ids < FIRST_ROW_ID]
