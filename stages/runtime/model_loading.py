"""Loading of a model file by llama.cpp, with progress and the return of mapped pages."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import llama_cpp

from spanmesh_proto.errors import InvalidModel
from stages.runtime.llama import last_complaint
from stages.runtime.process_memory import CopiedPages

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from stages.runtime.devices import GpuPlacing


def load_model(
    path: Path,
    placing: GpuPlacing,
    *,
    use_repacked_weights: bool,
    progress: Callable[[float], None] | None = None,
) -> Any:
    """Load a file; its caller frees the model.

    Args:
        path: The GGUF file, the first one if there are several.
        placing: Devices of its layers.
        use_repacked_weights: llama.cpp's `use_extra_bufts`.
        progress: Called with the loaded share, 0 to 1.

    Returns:
        llama.cpp's model.

    Raises:
        InvalidModel: If llama.cpp cannot load it.
    """
    params = llama_cpp.llama_model_default_params()
    params.use_extra_bufts = use_repacked_weights
    placing.apply(params)
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
