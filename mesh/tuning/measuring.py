"""Drafts of a network on recorded answers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np

from mesh.tuning.acceptance import NUM_DRAFTED, AnswerDrafts, is_degenerate
from mesh.tuning.conversation_file import Conversation, read_conversation
from mesh.tuning.network import make_batch, num_chains
from spanmesh_proto.errors import ModelError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from numpy.typing import NDArray

    from mesh.tuning.answers import RecordedAnswer
    from mesh.tuning.conversation_file import FeatureShape
    from mesh.tuning.network import Lexicon, Network

# Padding costs little among so many of similar length.
_MOST_CHAINS: Final = 1024
_MOST_TOGETHER: Final = 8


def readable(answers: Sequence[RecordedAnswer], shape: FeatureShape) -> Iterator[Conversation]:
    """Conversations of answers with their features; those that are gone meanwhile are left out."""
    for answer in answers:
        try:
            yield read_conversation(answer.path, shape)
        except ModelError:
            continue


def measure(
    network: Network,
    lexicon: Lexicon,
    answers: Sequence[RecordedAnswer],
    shape: FeatureShape,
    token_ids: NDArray[np.int64],
    *,
    progress: Callable[[float], None] | None = None,
    change: Callable[[Conversation], Conversation] | None = None,
) -> list[AnswerDrafts]:
    """What a drafter foretells of answers, each of which gives one entry; none if it is too short.

    Args:
        network: The drafter.
        lexicon: Tokens of the answers.
        answers: The answers.
        shape: Of their recordings.
        token_ids: The model's ids of the drafter's tokens.
        progress: Called with the share of answers that are done, 0 to 1.
        change: Applied to each conversation before it is measured.
    """
    found: dict[int, AnswerDrafts] = {}
    waiting: list[tuple[int, Conversation]] = []
    # Of similar length side by side.
    order = sorted(range(len(answers)), key=lambda index: len(answers[index].token_ids))
    for place, index in enumerate(order):
        answer = answers[index]
        waiting.extend(
            (index, each if change is None else change(each))
            for each in readable([answer], shape)
            if num_chains(each, NUM_DRAFTED)
        )
        is_last = place + 1 == len(order)
        if waiting and (is_last or _is_full([each for _, each in waiting])):
            batch = make_batch([each for _, each in waiting], lexicon, NUM_DRAFTED, network.compute.device)
            for (at, _), num_right in zip(waiting, network.num_right(batch), strict=True):
                found[at] = _drafts(answers[at], num_right, token_ids)
            waiting = []
        if progress is not None:
            progress((place + 1) / len(order))
    return [found[index] for index in sorted(found)]


def with_strange_features(conversation: Conversation) -> Conversation:
    """The same conversation with the features of other positions."""
    moved = np.roll(conversation.features, len(conversation.features) // 2, axis=0)
    return Conversation(conversation.info, conversation.token_ids, moved)


def _is_full(conversations: Sequence[Conversation]) -> bool:
    chains = sum(num_chains(each, NUM_DRAFTED) for each in conversations)
    return len(conversations) >= _MOST_TOGETHER or chains >= _MOST_CHAINS


def _drafts(
    answer: RecordedAnswer, num_right: NDArray[np.int64], token_ids: NDArray[np.int64]
) -> AnswerDrafts:
    return AnswerDrafts(
        name=str(answer.path),
        prompt_id=f"{answer.prompt:08x}",
        api=answer.info.api,
        num_right=num_right,
        num_tokens=len(answer.tokens),
        num_covered=int(np.isin(answer.tokens, token_ids).sum()),
        is_degenerate=is_degenerate(answer.tokens),
    )
