"""Requantisation of a GGUF in a child process.

llama.cpp does it, in a process of its own: it takes minutes for a large model, during which Ctrl-C should be
heard, and it aborts on some malformed files.
"""

from __future__ import annotations

import ctypes
import re
from typing import TYPE_CHECKING, Any, Final

from spanmesh_proto.errors import InvalidModel
from stages.files import atomic_write
from stages.gguf import read_header
from stages.isolated import ProcessEnded, call
from stages.runtime.bindings import llama_cpp
from stages.runtime.llama import llama_library
from stages.runtime.llama_libraries import load_best_kernels

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

QUANT_TYPES: Final = (
    *("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "IQ4_NL", "IQ4_XS"),
    *("Q2_K", "Q3_K_S", "Q3_K_M", "Q3_K_L", "Q4_K_S", "Q4_K_M", "Q5_K_S", "Q5_K_M", "Q6_K"),
    *("F16", "BF16"),
)
"""Those of llama.cpp's types that need no importance matrix."""

# With four bits everywhere SmolLM2 (Q4_1) says 78 % of its own greedy tokens in chat and coding, with these
# more precise 86 %, for some 5 % more time. Elsewhere llama.cpp's own mixes spend their bits alike.
_SPARED: Final = {r"\.attn_(v|output)\.": "Q8_0", r"\.ffn_down\.": "Q4_1"}
_SPARING_TYPES: Final = ("Q4_0", "IQ4_NL")

_TENSOR_LINE: Final = re.compile(r"\[ *(\d+)/ *(\d+)\]")
_ERROR_LEVEL: Final = 4


def requantise(
    model: Path,
    quant_type: str,
    output: Path,
    *,
    is_plain: bool = False,
    progress: Callable[[float], None] | None = None,
) -> None:
    """Write `model` with its weights in another type. The file appears whole or not at all.

    Args:
        model: A GGUF, of any type; its first file if there are several.
        quant_type: One of `QUANT_TYPES`.
        output: Where to; what is there is replaced.
        is_plain: Leave it to llama.cpp which weights get more bits. If not, Q4_0 and IQ4_NL spare those that
            suffer most: attention's values and output, and the way down out of the feed-forward network.
        progress: Called with the share of tensors that are done, 0 to 1.

    Raises:
        InvalidModel: If llama.cpp cannot read or requantise the model.
        ModelError: If `output` cannot be written.
    """
    read_header(model)
    with atomic_write(output) as file:
        wanted = (str(model), quant_type, file.name, is_plain)
        try:
            complaint = call(_requantise, *wanted, progress=progress)
        except ProcessEnded as end:
            complaint = f"it aborts with exit code {end.exit_code}"
        if complaint is not None:
            raise InvalidModel(f"llama.cpp cannot requantise {model} to {quant_type}: {complaint}")


def _requantise(
    model: str,
    quant_type: str,
    output: str,
    is_plain: bool,  # noqa: FBT001 - goes by position
    report: Callable[[float], None],
) -> str | None:
    """Work of the process; returns the reason of a failure, or None."""
    complaints: list[str] = []

    @llama_cpp.llama_log_callback  # type: ignore[untyped-decorator]
    def on_log(level: int, text: bytes, _user_data: Any) -> None:
        line = text.decode(errors="replace").strip()
        if match := _TENSOR_LINE.match(line):
            report(int(match[1]) / int(match[2]))
        elif level == _ERROR_LEVEL and line:
            complaints.append(line)

    llama_cpp.llama_log_set(on_log, ctypes.c_void_p(0))
    load_best_kernels(llama_library("ggml"))
    llama_cpp.llama_backend_init()
    params = llama_cpp.llama_model_quantize_default_params()
    params.ftype = getattr(llama_cpp, f"LLAMA_FTYPE_MOSTLY_{quant_type}")
    params.allow_requantize = True
    overrides = _overrides() if quant_type in _SPARING_TYPES and not is_plain else None
    params.tt_overrides = overrides
    status = llama_cpp.llama_model_quantize(model.encode(), output.encode(), ctypes.byref(params))
    return (complaints or ["no reason given"])[-1] if status else None


def _overrides() -> Any:
    """`_SPARED` as llama.cpp takes it: an array that ends with an empty entry."""
    overrides = (llama_cpp.llama_model_tensor_override * (len(_SPARED) + 1))()
    for override, (pattern, quant_type) in zip(overrides, _SPARED.items(), strict=False):
        override.pattern = pattern.encode()
        override.type = getattr(llama_cpp, f"GGML_TYPE_{quant_type}")
    return overrides
