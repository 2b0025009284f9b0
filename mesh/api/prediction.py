"""The field `prediction`: from text to what proposers read."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mesh.api.hopeless_length import refuse_hopeless_length
from spanmesh_proto.errors import InvalidRequest

if TYPE_CHECKING:
    from mesh.api.schemas import PredictionBody
    from mesh.text.tokenizer import Tokenizer


def encode_prediction(
    tokenizer: Tokenizer, prediction: PredictionBody | None, context_length: int
) -> tuple[int, ...]:
    """Token ids of the expected answer; none if nothing is expected.

    Args:
        tokenizer: The model's own.
        prediction: As the request has it.
        context_length: Positions of a session: no answer is longer.

    Raises:
        InvalidRequest: If it is longer than any answer can be.
        ContextLengthExceeded: If it is so much longer that its tokens need not be counted.
    """
    if prediction is None:
        return ()
    refuse_hopeless_length(
        tokenizer, len(prediction.content), context_length, param="prediction.content", what="the prediction"
    )
    tokens = tokenizer.encode(prediction.content, add_special=False, parse_special=False)
    if len(tokens) > context_length:
        raise InvalidRequest(
            f"prediction.content has {len(tokens)} tokens and this model's context holds {context_length}:"
            " send what the answer will be, or leave it out",
            param="prediction.content",
        )
    return tuple(tokens)
