"""Families that cannot be cut anywhere, and why. They run on one host."""

from __future__ import annotations

from typing import TYPE_CHECKING

from stages.cutting.family import Rule
from stages.cutting.rules.totals import every_cut

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from stages.gguf.header import GgufHeader


def in_one_piece(reason: str, applies: Callable[[GgufHeader], bool] = lambda _header: True) -> Rule:
    """The rule of a family that cannot be cut.

    Args:
        reason: Why.
        applies: To which of its models.
    """

    def refused(header: GgufHeader) -> Mapping[int, str]:
        return every_cut(header, reason) if applies(header) else {}

    return Rule("in one piece", reason, refused=refused)
