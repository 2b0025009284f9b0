"""Model of llama.cpp: its loading, and its metadata."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from spanmesh_proto.errors import InvalidModel
from stages.layers import LayerRange
from stages.runtime.bindings import llama_cpp
from stages.runtime.devices import read_file_layers
from stages.runtime.llama import last_complaint
from stages.runtime.numerics import CELLS_AT_ONCE
from stages.runtime.process_memory import CopiedPages
from stages.runtime.row_positions import NEED_PARTS

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from stages.runtime.devices import GpuPlacing


@dataclass(frozen=True)
class StageInfo:
    """Facts of the loaded file."""

    layers: LayerRange
    """Its layers of the whole model."""
    n_layers: int
    """Layers of the whole model."""
    n_embd: int
    """Values of a row of hidden states: the model's width, or a multiple with several streams."""
    n_vocab: int
    """Rows of the head; valid at the tail."""
    n_ctx_train: int
    """Positions that the model was trained for."""
    num_bytes: int
    """Size of the weights."""
    can_trim: bool = True
    """Whether a slot can go back to any earlier position. One with recurrent state can only go back to a
    checkpoint, or be emptied."""
    has_windows: bool = False
    """Whether some layers attend to a sliding window only."""
    has_position_parts: bool = False
    """Whether rows that are no tokens have positions in several parts, see `stages.runtime.row_positions`."""

    @classmethod
    def of_model(cls, model: Any, row_width: int) -> StageInfo:
        """Facts of a loaded `llama_model`.

        Args:
            model: The model.
            row_width: Values of a row of hidden states.
        """
        n_layers_here = llama_cpp.llama_model_n_layer(model)
        start, stop, count = (
            read_metadata(model, f"spanmesh.layer_{each}") for each in ("start", "stop", "count")
        )
        return cls(
            layers=LayerRange(int(start or 0), int(stop or n_layers_here)),
            n_layers=int(count or n_layers_here),
            n_embd=row_width,
            n_vocab=llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(model)),
            n_ctx_train=llama_cpp.llama_model_n_ctx_train(model),
            num_bytes=llama_cpp.llama_model_size(model),
            can_trim=not (
                llama_cpp.llama_model_is_recurrent(model) or llama_cpp.llama_model_is_hybrid(model)
            ),
            has_windows=llama_cpp.llama_model_n_swa(model) > 0,
            has_position_parts=num_position_parts(model) > 1,
        )

    @cached_property
    def is_first(self) -> bool:
        """Whether it takes token ids as input."""
        return self.layers.start == 0

    @cached_property
    def is_tail(self) -> bool:
        """Whether it returns logits."""
        return self.layers.stop == self.n_layers


def load_model(
    path: Path,
    placing: GpuPlacing,
    progress: Callable[[float], None] | None,
    *,
    use_repacked_weights: bool,
    num_cpu_moe: int = 0,
    has_prediction: bool = False,
) -> Any:
    """Load a file; returns the `llama_model`.

    Args:
        path: The file.
        placing: Devices of its layers.
        progress: Called with the loaded share, 0 to 1.
        use_repacked_weights: See `Numerics`.
        num_cpu_moe: First layers whose experts the processor keeps.
        has_prediction: Whether layers for multi-token prediction are loaded, too.

    Raises:
        InvalidModel: If llama.cpp cannot load it.
    """
    params = llama_cpp.llama_model_default_params()
    params.use_extra_bufts = use_repacked_weights
    params.load_mtp = has_prediction
    # llama.cpp counts all layers of the file.
    layers = read_file_layers(path) if placing.counts or num_cpu_moe else None
    placing.apply(params, layers, num_cpu_moe=num_cpu_moe)
    pages = CopiedPages(path, on_gpu=placing.has_gpu)

    # ctypes keeps no reference: the callback must exist until the end of the call.
    @llama_cpp.llama_progress_callback  # type: ignore[untyped-decorator]
    def on_progress(share: float, _data: Any) -> bool:
        pages.loaded(share)
        if progress is not None:
            progress(share)
        return True

    params.progress_callback = on_progress
    model = llama_cpp.llama_model_load_from_file(str(path).encode(), params)
    if model is None:
        raise InvalidModel(f"llama.cpp does not load {path.name}: {last_complaint()}")
    pages.loaded(1.0)
    return model


def read_metadata(model: Any, key: str) -> str | None:
    """A value of the model's metadata, as text; None if it has none of this name."""
    buffer = ctypes.create_string_buffer(128)
    length = llama_cpp.llama_model_meta_val_str(model, key.encode(), buffer, len(buffer))
    return buffer.value.decode() if length >= 0 else None


def may_scale_rotations(model: Any, ctx_size: int) -> bool:
    """Whether the model's rotations may depend on the size of the context.

    Args:
        model: The `llama_model`.
        ctx_size: Positions of each sequence.
    """
    architecture = read_metadata(model, "general.architecture")
    original = read_metadata(model, f"{architecture}.rope.scaling.original_context_length")
    return original is not None or ctx_size + CELLS_AT_ONCE > llama_cpp.llama_model_n_ctx_train(model)


def num_position_parts(model: Any) -> int:
    """Parts of the position of a row that is no token."""
    kinds = (llama_cpp.LLAMA_ROPE_TYPE_MROPE, llama_cpp.LLAMA_ROPE_TYPE_IMROPE)
    return 4 if llama_cpp.llama_model_rope_type(model) in kinds else 1


def ends_on_rows(model: Any) -> bool:
    """Whether llama.cpp ends the process if rows of a model go in as embeddings."""
    return read_metadata(model, "general.architecture") in NEED_PARTS and num_position_parts(model) == 1
