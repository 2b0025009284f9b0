"""Recordings for tests: synthetic ones of tiny models, and features of a real model."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Final

import numpy as np

from mesh.tuning.conversation_file import Conversation, ConversationInfo, write_conversation
from mesh.tuning.recording import RecordingHeader, conversation_path, create_recording, recorded_model
from stages.runtime.spans import Span
from stages.runtime.stage_runtime import RuntimeOptions, StageRuntime
from tests.support.tiny_eagle3 import LAYERS
from tests.support.tiny_models import N_VOCAB

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from numpy.typing import NDArray

N_EMBD: Final = 64
_NUM_PROMPT: Final = 4


def info(number: int, *, start: int = 0, answer_start: int = _NUM_PROMPT) -> ConversationInfo:
    return ConversationInfo(
        start=start,
        answer_start=answer_start,
        api="chat",
        temperature=0.7,
        prompt_id=f"prompt {number}",
        key_digest="",
        time_s=float(number),
    )


def foreseeable(number: int, head: NDArray[np.float32], num_tokens: int = 40) -> Conversation:
    """Random text whose features name the token that is foretold: the third layer's are its row of the head.

    Args:
        number: Of the text.
        head: The model's, [tokens, n_embd].
        num_tokens: Length.
    """
    noise = np.random.default_rng(number)
    token_ids = noise.integers(3, N_VOCAB, num_tokens)
    features = 0.1 * noise.standard_normal((num_tokens, len(LAYERS), N_EMBD))
    features[:-2, 2] += head[token_ids[2:]]
    return Conversation(info(number), token_ids.astype(np.int32), features.astype(np.float16))


def random_conversation(number: int, num_tokens: int = 24, *, start: int = 0) -> Conversation:
    noise = np.random.default_rng(number)
    return Conversation(
        info(number, start=start, answer_start=start + _NUM_PROMPT),
        noise.integers(3, N_VOCAB, num_tokens).astype(np.int32),
        noise.standard_normal((num_tokens - start, len(LAYERS), N_EMBD)).astype(np.float16),
    )


def write_recording(folder: Path, target: Path, conversations: Sequence[Conversation]) -> Path:
    """A recording of a tiny model."""
    create_recording(folder, RecordingHeader(recorded_model(target), LAYERS))
    for number, conversation in enumerate(conversations):
        write_conversation(conversation_path(folder, number), conversation)
    return folder


def greedy_with_features(
    model: Path, prompt: Sequence[int], num_tokens: int, layers: Sequence[int]
) -> tuple[NDArray[np.int32], NDArray[np.float16]]:
    """Prompt and greedy answer of a whole model, and the inputs of some layers at each position but the last.

    Returns:
        Token ids, int32 [T], and features, float16 [T - 1, layers, n_embd].
    """
    with contextlib.closing(StageRuntime(model, RuntimeOptions(ctx_size=512, exact=True))) as runtime:
        runtime.tap_features([layer - 1 for layer in layers])
        tokens, start = list(prompt), 0
        parts: list[NDArray[np.float16]] = []
        for _ in range(num_tokens):
            count = len(tokens) - start
            (logits,) = runtime.decode([Span(0, start, tokens[start:], num_outputs=1)], is_tapped=True)
            rows = runtime.features(0)
            parts.append(
                np.stack([np.array(each[:count]) for each in rows if each is not None], 1).astype("<f2")
            )
            start = len(tokens)
            tokens.append(int(logits[0].argmax()))
    return np.array(tokens, np.int32), np.concatenate(parts)
