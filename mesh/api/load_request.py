"""Load request: body of `POST /mesh/load`, as `mesh load` sends it and the head state keeps it."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Final, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from mesh.util import session_defaults
from spanmesh_proto.errors import InvalidRequest
from speculative.draft import defaults as draft_defaults
from stages.gguf.reader import model_name
from stages.runtime.kv_types import KV_TYPES

_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:/@+-]{0,127}")
_DEFAULT: Final = "default"
_MOST_CHARS: Final = 4096
# Options of embedding models; the others are of models that generate text.
_OF_EMBEDDINGS: Final = frozenset({"model", "name", "embeddings", "ctx_size", "threads", "max_waiting"})
_MOST_LAYERS: Final = 4096


def _known(kv_type: str) -> str:
    if kv_type not in KV_TYPES:
        raise ValueError(f"must be one of {', '.join(KV_TYPES)}")
    return kv_type


_KvType = Annotated[str, AfterValidator(_known), Field(json_schema_extra={"enum": list(KV_TYPES)})]
_Path = Annotated[str, Field(min_length=1, max_length=_MOST_CHARS)]


class LoadRequest(BaseModel):
    """Model to be served beside the others, and its options, named as those of `mesh load`."""

    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False, frozen=True)

    model: _Path = Field(
        description="A GGUF file on the head's host, as an absolute path, or a name in the library."
    )
    name: str | None = Field(None, max_length=128, description="Name of the model in the API.")
    ctx_size: int | None = Field(None, ge=16, le=2**31)
    parallel: int = Field(session_defaults.NUM_SLOTS, ge=1, le=64)
    kv_type: _KvType = session_defaults.KV_TYPE
    checkpoints: int = Field(session_defaults.NUM_CHECKPOINTS, ge=0, le=64)
    wire: Literal["f32", "f16", "q8", "auto"] = session_defaults.WIRE
    max_waiting: int = Field(session_defaults.MAX_WAITING, ge=1, le=2**20)
    exact: bool = False
    stages: int | None = Field(None, ge=1, le=_MOST_LAYERS)
    split: list[Annotated[int, Field(ge=1, le=_MOST_LAYERS)]] | None = Field(
        None, min_length=1, max_length=_MOST_LAYERS
    )
    threads: int | None = Field(None, ge=1, le=1024)
    speculate: Literal["auto", "off", "ngram", "draft", "replay"] = "auto"
    draft_path: _Path | None = None
    draft_head: bool = True
    draft_max: int = Field(draft_defaults.DRAFT_MAX, ge=1, le=1024)
    draft_min: int = Field(draft_defaults.DRAFT_MIN, ge=1, le=1024)
    p_min: float = Field(draft_defaults.P_MIN, ge=0, le=1)
    draft_threads: int = Field(draft_defaults.NUM_THREADS, ge=1, le=1024)
    draft_gpu_layers: int = Field(draft_defaults.NUM_GPU_LAYERS, ge=-1, le=_MOST_LAYERS)
    draft_kv_type: _KvType = draft_defaults.KV_TYPE
    draft_context: int = Field(draft_defaults.CONTEXT, ge=1, le=2**20)
    draft_wire: Literal["f32", "f16", "q8"] = draft_defaults.WIRE
    keeps_history: bool = False
    width: int | None = Field(None, ge=0, le=1024)
    depth: int | None = Field(None, ge=1, le=1024)
    cancels: bool = True
    evictable: bool = Field(
        default=False, description="Whether it is unloaded when it idles and its memory is wanted."
    )
    replay_path: _Path | None = None
    replay_rates: list[Annotated[float, Field(ge=0, le=1)]] = Field(default_factory=list, max_length=64)
    embeddings: bool = Field(default=False, description="Serve an embedding model, on one host.")

    def require_consistent(self) -> None:
        """Check that no options contradict one another.

        Raises:
            InvalidRequest: Naming the one to leave out.
        """
        if self.stages is not None and self.split is not None:
            raise InvalidRequest("split gives the number of stages: leave out stages", param="stages")
        if not self.embeddings:
            return
        for name, field in type(self).model_fields.items():
            default = field.get_default(call_default_factory=True)
            if name not in _OF_EMBEDDINGS and getattr(self, name) != default:
                raise InvalidRequest(f"{name} does not apply to an embedding model: leave it out", param=name)

    @property
    def served_name(self) -> str:
        """Model name for clients.

        Raises:
            InvalidRequest: If it cannot be a name, or means the first model.
        """
        name = model_name(Path(self.model)) if self.name is None else self.name
        if name == _DEFAULT or not _NAME.fullmatch(name):
            raise InvalidRequest(
                f"a model cannot be called {name!r}: `{_DEFAULT}` means the first one, and a name is 1 to "
                "128 letters, digits and any of ._:/@+-, the first a letter or a digit; choose one with "
                "--name",
                param="name",
            )
        return name
