"""Endpoint /v1/embeddings, and its body."""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Final, Literal

from fastapi import APIRouter
from pydantic import ConfigDict, Field, PlainValidator
from starlette.requests import Request  # noqa: TC002 - FastAPI reads the annotations
from starlette.responses import Response

from mesh.api.auth import client_of
from mesh.api.backend import DEFAULT_MODEL, backends_of
from mesh.api.bodies import read_body
from mesh.api.errors import json_bytes
from mesh.api.event_stream import ClientGoneError, while_connected
from mesh.api.openapi import EmbeddingList, answers, takes
from mesh.api.protocol import Prompt, parse_several
from mesh.api.rate_limit import reservation_of
from mesh.api.request_parsing import AS_WHOLE, StrictBody, describe
from mesh.api.tokenization import require_ids
from mesh.metrics.tracing import CURRENT_SPAN
from mesh.text.text_service import TextRequest
from spanmesh_proto.errors import InvalidRequest, ModelNotFound, too_long
from stages.embedding.vectors import shortened, to_base64

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np
    from numpy.typing import NDArray

    from mesh.api.backend import Backends
    from mesh.embedding.registry import EmbeddingBackend

router = APIRouter()
MAX_TEXTS: Final = 2048
# A body may hold as much as that of a chat with a context of so many positions: many texts.
_POSITIONS: Final = 65_536
# Texts with more characters per token than this are counted by the longest token of the vocabulary first.
_SUSPICIOUS: Final = 16
_Several = Field(min_length=1, max_length=MAX_TEXTS)

_Ids = Annotated[list[Annotated[int, Field(ge=0), AS_WHOLE]], Field(min_length=1)]

_Input = str | _Ids | Annotated[list[str], _Several] | Annotated[list[_Ids], _Several]


def parse_input(value: Any) -> tuple[Prompt, ...]:
    """The four shapes of the input; see `parse_several`."""
    return parse_several(value, MAX_TEXTS, "input")


class EmbeddingsBody(StrictBody):
    """`POST /v1/embeddings`. `user` is not used."""

    model_config = ConfigDict(json_schema_extra=describe)
    neutral: ClassVar = {
        "add_special_tokens": (True,),
        "embd_normalize": (2,),
        "embed_dtype": ("float32",),
        "endianness": ("native", "little"),
        "input_type": (),
        "instruction": (),
        "late_chunking": (False,),
        "normalize": (True,),
        "output_dtype": ("float",),
        "prompt_name": (),
        "task": (),
    }

    model: str | None = None
    input: Annotated[tuple[Prompt, ...], PlainValidator(parse_input, json_schema_input_type=_Input)]
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Annotated[int, Field(ge=1), AS_WHOLE] | None = None
    user: str | None = None


@router.post(
    "/v1/embeddings",
    response_model=None,
    responses=answers(EmbeddingList, 404, 413),
    openapi_extra=takes(EmbeddingsBody),
)
async def embeddings(request: Request) -> Response:
    """Vectors of one or more texts, each of length 1."""
    backends = backends_of(request)
    # Without an embedding model there is no reason to read much.
    positions = backends.context_length if backends.embeddings.first is None else _POSITIONS
    body = await read_body(request, EmbeddingsBody, backends.unknown_fields, context_length=positions)
    backend = embedding_model(backends, body.model)
    if body.dimensions is not None and body.dimensions > backend.width:
        raise InvalidRequest(
            f"dimensions is {body.dimensions}, and {backend.model_id} makes vectors of {backend.width} "
            f"numbers: send 1 to {backend.width}",
            param="dimensions",
        )
    client = client_of(request.scope)
    texts = await while_connected(request, _tokenised(backend, body.input, client))
    num_tokens = sum(map(len, texts))
    reservation = reservation_of(request.scope)
    if reservation is not None:
        # Texts of one request are one answer; they share batches with those of others.
        reservation.acquire(1, backend.model_id, None)
        reservation.reserve(num_tokens)
    work = backend.embedder.embed(texts, client)
    try:
        rows = await while_connected(request, work)
    except ClientGoneError:
        if reservation is not None:
            reservation.spend(num_tokens)
        raise
    if reservation is not None:
        reservation.spend(num_tokens)
    if (span := CURRENT_SPAN.get()) is not None:
        span.finished("stop", num_prompt_tokens=num_tokens, num_answer_tokens=0)
    is_base64 = body.encoding_format == "base64"
    rows = shortened(rows, body.dimensions)
    written = await asyncio.to_thread(
        _written, backend.model_id, rows, num_tokens=num_tokens, is_base64=is_base64
    )
    return Response(written, media_type="application/json")


def embedding_model(backends: Backends, name: str | None) -> EmbeddingBackend:
    """The embedding model that a request means, if it answers now. One that names none means the first.

    Args:
        backends: Served models.
        name: Its name, or `default`; None if the request has none.

    Raises:
        InvalidRequest: If it is a chat model, with where vectors come from.
        ModelNotFound: Naming those that are served.
        MeshError: While it is loading, or no host can hold it.
    """
    known = backends.embeddings
    found = known.first if name in {None, DEFAULT_MODEL} else known.find(name or "")
    if found is None:
        try:
            chat = backends.named(name)
        except ModelNotFound:
            backends.first.require_ready()
            raise
        others = ", ".join(f"`{other.model_id}`" for other in known)
        remedy = f"name {others}" if others else "load one beside it with `mesh load MODEL --embeddings`"
        raise InvalidRequest(
            f"`{chat.model_id}` is a chat model, and vectors come from an embedding model: {remedy}",
            param="model",
        )
    found.require_ready()
    if (span := CURRENT_SPAN.get()) is not None:
        span.asks(found.model_id)
    return found


async def _tokenised(
    backend: EmbeddingBackend, inputs: Sequence[Prompt], client: str | None
) -> list[tuple[int, ...]]:
    """Token ids of each text.

    Raises:
        InvalidRequest: Naming the first text without a token, with one that does not exist, or that is no
            valid Unicode.
        ContextLengthExceeded: Naming the first text that is too long.
    """
    tokenizer = backend.tokenizer
    params = [f"input[{index}]" if len(inputs) > 1 else "input" for index in range(len(inputs))]
    wanted = []
    for given, param in zip(inputs, params, strict=True):
        if not isinstance(given, str):
            require_ids(tokenizer, given, param=param)
            continue
        if tokenizer.is_lossless and len(given) > _SUSPICIOUS * backend.longest:
            _refuse_long(backend, -(-len(given) // tokenizer.longest_piece_bytes), param, is_least=True)
        wanted.append(TextRequest(given, param))
    of_texts = iter(
        await backend.texts.ids(wanted, most_tokens=backend.longest, client=client) if wanted else ()
    )
    texts: list[tuple[int, ...]] = []
    for given, param in zip(inputs, params, strict=True):
        tokens = tuple(next(of_texts)) if isinstance(given, str) else given
        if not tokens:
            raise InvalidRequest(f"{param} holds no token: send some text", param=param)
        _refuse_long(backend, len(tokens), param)
        texts.append(tokens)
    return texts


def _refuse_long(backend: EmbeddingBackend, num_tokens: int, param: str, *, is_least: bool = False) -> None:
    if num_tokens > backend.longest:
        raise too_long(
            num_tokens,
            backend.longest,
            "divide the text, or load the model with a larger --ctx-size",
            what=param,
            most=backend.longest,
            is_least=is_least,
            param=param,
        )


def _written(model: str, rows: NDArray[np.float32], *, num_tokens: int, is_base64: bool) -> bytes:
    """Body of the answer, one vector at a time: a large list would hold the interpreter lock."""
    vectors = [
        f'"{to_base64(row)}"' if is_base64 else json.dumps(row.tolist(), separators=(",", ":"))
        for row in rows
    ]
    data = ",".join(
        f'{{"object":"embedding","index":{index},"embedding":{vector}}}'
        for index, vector in enumerate(vectors)
    )
    rest = json_bytes({"model": model, "usage": {"prompt_tokens": num_tokens, "total_tokens": num_tokens}})
    return b'{"object":"list","data":[' + data.encode("ascii") + b"]," + rest[1:]
