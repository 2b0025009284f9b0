"""What a request must be before it may wait for a slot."""

from __future__ import annotations

from typing import TYPE_CHECKING

from spanmesh_proto.errors import ContextLengthExceeded, InvalidRequest

if TYPE_CHECKING:
    from mesh.coordinator.options import CoordinatorOptions
    from mesh.engine import GenerationRequest


def check_request(request: GenerationRequest, options: CoordinatorOptions) -> None:
    """Check that it can be answered.

    Raises:
        InvalidRequest: If the prompt is empty, no token is wanted, a biased token does not exist, or grammars
            are out of reach.
        ContextLengthExceeded: If prompt + 1 exceeds the context.
    """
    if not request.prompt:
        raise InvalidRequest("the prompt is empty: send at least one token", param="prompt")
    if request.max_tokens < 1:
        raise InvalidRequest(f"max_tokens is {request.max_tokens}; ask for at least 1", param="max_tokens")
    if len(request.prompt) + 1 > options.context_length:
        raise ContextLengthExceeded(
            f"the prompt has {len(request.prompt)} tokens; the context served is {options.context_length}, "
            "and the answer needs at least 1: shorten the prompt or serve with a larger --ctx-size"
        )
    if request.grammar is not None and options.token_texts is None:
        raise InvalidRequest("grammar: answers cannot be held to one here: leave it out", param="grammar")
    request.sampling.require_vocabulary(options.n_vocab)
