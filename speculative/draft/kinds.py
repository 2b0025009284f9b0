"""Kinds of drafters and their parts: the context that computes, and the text of a session.

A new kind is a member of `DrafterKind` and a row of `KINDS`, with a context of its own, and a text of its own
if its rows read more than tokens. `mesh.draft.drafter` recognizes its files.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from speculative.draft.context import DraftUnusable, timed_ms_per_token
from speculative.draft.feature_context import Eagle3Context, MtpContext
from speculative.draft.model_context import ModelContext
from speculative.draft.session import DraftSequence, FeatureSequence
from speculative.proposer import DrafterKind

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from speculative.draft.context import Context, ContextSetup, DraftContext, DraftFile, DraftOptions


@dataclass(frozen=True)
class KindParts:
    """Parts of a drafter that depend on its kind."""

    context: type[DraftContext]
    """Loads its file and computes the spans of its sequences."""
    sequence: Callable[[str, DraftOptions, Context], DraftSequence]
    """Makes the text of a session, given the name in its proposals. Of a kind that reads features it is a
    `speculative.proposer.FeatureReader`."""
    most_drafted: int = 1
    """Most tokens that are drafted from one output."""


def load_context(file: DraftFile, setup: ContextSetup, *, abort_flag: Any = None) -> DraftContext:
    """Load a drafter in this process, which llama.cpp may abort, and draft a few tokens with it.

    Args:
        file: The drafter.
        setup: See `ContextSetup`.
        abort_flag: See `DraftContext`.

    Raises:
        DraftUnusable: If the file cannot serve as a drafter of its kind, or there is no memory for its KV
            cache.
    """
    try:
        kind = KINDS[file.kind].context
        context = kind(file, setup, abort_flag=abort_flag)
        try:
            context.ms_per_token = timed_ms_per_token(context, kind.timed_span, setup.clock_s)
        except BaseException:
            context.close()
            raise
    except (ImportError, ValueError) as error:
        raise DraftUnusable(str(error)) from error
    return context


def _sequence(name: str, options: DraftOptions, context: Context) -> DraftSequence:
    return DraftSequence(name, options, context.is_end)


def _eagle3_sequence(name: str, options: DraftOptions, context: Context) -> FeatureSequence:
    return FeatureSequence(name, options, context.is_end)


def _mtp_sequence(name: str, options: DraftOptions, context: Context) -> FeatureSequence:
    zeros = np.zeros(context.feature_width, np.float32)
    return FeatureSequence(name, options, context.is_end, zeros=zeros)


KINDS: Final[Mapping[DrafterKind, KindParts]] = {
    DrafterKind.MODEL: KindParts(ModelContext, _sequence),
    DrafterKind.EAGLE3: KindParts(Eagle3Context, _eagle3_sequence),
    DrafterKind.MTP: KindParts(MtpContext, _mtp_sequence),
}
