"""The body of `POST /mesh/rehearse`."""

from __future__ import annotations

from typing import Final

from pydantic import BaseModel, ConfigDict, Field

_MOST_HOSTS: Final = 64
_MOST_PARTS: Final = 8
# A blank stage: a hole of a file, but loaded all the same.
_MOST_BLANK_BYTES: Final = 8 * 2**30


class BlankBody(BaseModel):
    """A stage without weights."""

    model_config = ConfigDict(extra="forbid")

    header: str = Field(description="Base64: magic, metadata and tensor directory of a GGUF.")
    num_bytes: int = Field(ge=1, le=_MOST_BLANK_BYTES, description="Size of the whole file.")


class OrderBody(BaseModel):
    """What one host is to time; see `stages.host.profile_request`."""

    model_config = ConfigDict(extra="forbid")

    blank: BlankBody
    num_threads: int = Field(1, ge=1, le=1024)
    is_exact: bool = False
    kv_type: str = "f16"
    position: int = Field(128, ge=0, le=2**20)
    num_rounds: int = Field(20, ge=1, le=1000)
    pause_ms: float = Field(5.0, ge=0, le=1000)


class HostOrdersBody(BaseModel):
    """For one host."""

    model_config = ConfigDict(extra="forbid")

    host: str
    orders: list[OrderBody] = Field(min_length=1, max_length=_MOST_PARTS)


class RehearsalBody(BaseModel):
    """What `mesh plan` asks."""

    model_config = ConfigDict(extra="allow")

    hosts: list[HostOrdersBody] = Field(min_length=1, max_length=_MOST_HOSTS)
