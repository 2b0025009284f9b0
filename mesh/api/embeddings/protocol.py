"""Request body of /v1/embeddings."""

from __future__ import annotations

from typing import Annotated, Any, Final, Literal

from pydantic import Field, PlainValidator

from mesh.api.protocol import Prompt, StrictBody, parse_several

MAX_TEXTS: Final = 2048

_Ids = Annotated[list[Annotated[int, Field(ge=0)]], Field(min_length=1)]
_Several = Field(min_length=1, max_length=MAX_TEXTS)
_Input = str | _Ids | Annotated[list[str], _Several] | Annotated[list[_Ids], _Several]


def parse_input(value: Any) -> tuple[Prompt, ...]:
    """The four shapes of the input; see `parse_several`."""
    return parse_several(value, MAX_TEXTS, "input")


class EmbeddingsBody(StrictBody):
    """`POST /v1/embeddings`. `user` is not used."""

    model: str | None = None
    input: Annotated[tuple[Prompt, ...], PlainValidator(parse_input, json_schema_input_type=_Input)]
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Annotated[int, Field(ge=1)] | None = None
    user: str | None = None
