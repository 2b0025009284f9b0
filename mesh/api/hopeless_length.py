"""Texts that are too long for the context whatever their tokens are: refused before these are counted."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from spanmesh_proto.errors import ContextLengthExceeded

if TYPE_CHECKING:
    from mesh.text.tokenizer import Tokenizer

# Below that many characters per position reading the text costs little, and most texts have fewer.
_SUSPICIOUS: Final = 8


def refuse_hopeless_length(
    tokenizer: Tokenizer, num_chars: int, context_length: int, *, param: str, what: str
) -> None:
    """Check that a text could fit the context, by the longest token that the vocabulary has.

    Nothing that fits is refused: who passes this is counted exactly later.

    Args:
        tokenizer: The served model's.
        num_chars: Of the text.
        context_length: Positions of a session.
        param: The field that the text came from.
        what: Whose length it is, for the error.

    Raises:
        ContextLengthExceeded: With the numbers.
    """
    if num_chars <= _SUSPICIOUS * context_length:
        return
    least_tokens = -(-num_chars // tokenizer.longest_piece_bytes)
    if least_tokens >= context_length:
        raise ContextLengthExceeded(
            f"{what} has {num_chars} characters, which are {least_tokens} tokens or more, and this model's "
            f"context holds {context_length}: send less, or serve it with a larger --ctx-size",
            param=param,
        )
