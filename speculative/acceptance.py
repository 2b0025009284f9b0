"""What became of a window: sample-and-match, seen from the coordinator.

The tail draws a token after each row of the window and stops at the first that differs from the proposed
one (`proto/spanmesh_proto/windows.proto`, rule 4). Every token drawn is the target's own, so all of them
are committed, up to a stop.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence


class SpanClass(StrEnum):
    """How far a window held; what it means for the rows that the stages have cached.

    Attributes:
        PLAIN: Nothing was proposed.
        FULL_ACCEPT: Every proposed token was drawn: every row stays.
        TAIL_REJECT: All but the last: one row to trim, which the next window does by its start.
        EARLY_REJECT: Rows after the first difference were computed for nothing.
    """

    PLAIN = "plain"
    FULL_ACCEPT = "full_accept"
    TAIL_REJECT = "tail_reject"
    EARLY_REJECT = "early_reject"


@dataclass(frozen=True)
class Judgement:
    """A window and its verdict, put together.

    Attributes:
        committed: What joins the sequence: one id or more; an end token, if one was drawn, is the last.
        num_proposed: Proposed tokens in the window.
        num_accepted: Those among them that were drawn and committed.
        span: How far the window held.
        has_stop: Whether an end token was drawn inside.
    """

    committed: tuple[int, ...]
    num_proposed: int
    num_accepted: int
    span: SpanClass
    has_stop: bool = False

    @property
    def is_rejected(self) -> bool:
        """Whether the stages hold rows of tokens that did not happen."""
        return self.span in {SpanClass.TAIL_REJECT, SpanClass.EARLY_REJECT}


def judge(
    proposed: Sequence[int],
    sampled: Sequence[int],
    *,
    num_confirmed: int = 0,
    end_tokens: Collection[int] = (),
    max_committed: int | None = None,
) -> Judgement:
    """Match a verdict with what its window proposed.

    With 7 8 9 proposed: `[7, 8, 9, 4]` is a full accept and a free prediction, `[7, 8, 5]` a tail reject and
    `[6]` an early one.

    Args:
        proposed: Proposed tokens of the window that the verdict is about, in order; none for a plain window.
        sampled: The verdict's ids.
        num_confirmed: Tokens before those that were proposed too and are committed already: the first of a
            window that flew behind another one, whose free prediction it was.
        end_tokens: Ids that end the sequence.
        max_committed: At most this many ids may still be committed; None for no limit.

    Raises:
        ValueError: If the verdict cannot belong to the window.
    """
    num_matched = len(sampled) - 1
    is_whole = num_matched == len(proposed)
    if not 0 <= num_matched <= len(proposed) or list(sampled[:-1]) != list(proposed[:num_matched]):
        raise ValueError(
            f"a verdict of {len(sampled)} ids does not continue a window of {len(proposed)} proposed"
        )
    if not is_whole and sampled[-1] == proposed[num_matched]:
        raise ValueError(f"a verdict of {len(sampled)} ids ends early on a token that was proposed there")

    committed = tuple(sampled[:max_committed])
    stop = next((index for index, token in enumerate(committed) if token in end_tokens), None)
    if stop is not None:
        committed = committed[: stop + 1]
    return Judgement(
        committed=committed,
        num_proposed=num_confirmed + len(proposed),
        num_accepted=num_confirmed + min(num_matched, len(committed)),
        span=_span_class(num_confirmed + len(proposed), num_confirmed + num_matched),
        has_stop=stop is not None,
    )


def judge_unread(num_proposed: int) -> Judgement:
    """What became of a window whose first token already differs from the free prediction before it.

    Args:
        num_proposed: Its tokens: a window that flies behind another one has no others.
    """
    return Judgement((), num_proposed, 0, _span_class(num_proposed, 0))


def _span_class(num_proposed: int, num_matched: int) -> SpanClass:
    if num_proposed == 0:
        return SpanClass.PLAIN
    if num_matched == num_proposed:
        return SpanClass.FULL_ACCEPT
    return SpanClass.TAIL_REJECT if num_matched == num_proposed - 1 else SpanClass.EARLY_REJECT
