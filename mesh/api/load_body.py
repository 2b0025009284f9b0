"""The body of `POST /mesh/load`."""

from __future__ import annotations

from typing import Annotated, Final, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from stages.runtime.kv_types import KV_TYPES

_MOST_CHARS: Final = 4096
_MOST_LAYERS: Final = 4096


def _known(kv_type: str) -> str:
    if kv_type not in KV_TYPES:
        raise ValueError(f"must be one of {', '.join(KV_TYPES)}")
    return kv_type


_KvType = Annotated[str, AfterValidator(_known), Field(json_schema_extra={"enum": list(KV_TYPES)})]
_Path = Annotated[str, Field(min_length=1, max_length=_MOST_CHARS)]


class LoadBody(BaseModel):
    """What `mesh load` asks for. The fields are the options of that command, which tells what they mean."""

    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False, frozen=True)

    model: _Path = Field(description="A GGUF file on the head's host, by its whole path.")
    name: str | None = Field(None, max_length=128, description="What clients are to call it.")
    ctx_size: int | None = Field(None, ge=16, le=2**31)
    parallel: int = Field(4, ge=1, le=64)
    kv_type: _KvType = "f16"
    wire: Literal["f32", "f16", "q8", "auto"] = "f32"
    max_waiting: int = Field(64, ge=1, le=2**20)
    exact: bool = False
    stages: int | None = Field(None, ge=1, le=_MOST_LAYERS)
    split: list[Annotated[int, Field(ge=1, le=_MOST_LAYERS)]] | None = Field(
        None, min_length=1, max_length=_MOST_LAYERS
    )
    threads: int | None = Field(None, ge=1, le=1024)
    speculate: Literal["auto", "off", "ngram", "draft", "replay"] = "auto"
    draft_path: _Path | None = None
    draft_max: int = Field(8, ge=1, le=1024)
    draft_min: int = Field(1, ge=1, le=1024)
    p_min: float = Field(0.0, ge=0, le=1)
    draft_threads: int = Field(1, ge=1, le=1024)
    draft_gpu_layers: int = Field(-1, ge=-1, le=_MOST_LAYERS)
    draft_kv_type: _KvType = "f16"
    keeps_history: bool = False
    width: int | None = Field(None, ge=0, le=1024)
    depth: int | None = Field(None, ge=1, le=1024)
    cancels: bool = True
    replay_path: _Path | None = None
