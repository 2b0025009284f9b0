"""Memory of the processes that read what clients send, before they are started.

Measured with the vocabularies that llama.cpp's repository holds, of 30,000 to 262,000 tokens, after every
token had been in an answer: on x86-64 Linux the bounds are 1.07 to 1.34 times what a process took. What a job
needs while it runs is not part of them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from stages.gguf import GgufHeader

# Python, its libraries and llama.cpp's code.
PROCESS_BYTES: Final = 64 * 2**20
# The chat template as a program, and small things.
_BASE_BYTES: Final = 5 * 2**20
# llama.cpp keeps a token by id and by text, and its piece; the process keeps pieces that were in answers.
_TOKEN_BYTES: Final = 340
# Ranks of merges, by the pair of their texts.
_MERGE_BYTES: Final = 176
# Vocabularies of these kinds are searched by a tree with a node for each beginning of a token, of 112 bytes;
# beginnings are shared.
_TREES: Final = frozenset({"t5", "rwkv", "plamo2"})
_TREE_BYTES_PER_BYTE: Final = 44
_LENGTH_BYTES: Final = 8


def vocabulary_bytes(header: GgufHeader) -> int:
    """Bytes that one process for texts takes for a model: its vocabulary, and what is computed from it.

    Args:
        header: Header of the model.

    Returns:
        Bytes, rather too many than too few.
    """
    tokens = header.metadata.get("tokenizer.ggml.tokens")
    merges = header.metadata.get("tokenizer.ggml.merges")
    num_bytes = _BASE_BYTES
    if tokens is not None:
        num_bytes += _TOKEN_BYTES * (tokens.count or 0) + len(tokens.payload)
        if header.text("tokenizer.ggml.model", "") in _TREES:
            text_bytes = len(tokens.payload) - _LENGTH_BYTES * (tokens.count or 0)
            num_bytes += _TREE_BYTES_PER_BYTE * text_bytes
    if merges is not None:
        num_bytes += _MERGE_BYTES * (merges.count or 0)
    return num_bytes
