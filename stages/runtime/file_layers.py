"""Layers of a file as llama.cpp counts them: a stage's own, and those before and behind.

llama.cpp gives layers to devices by their number in the file, from the last one down. A stage's file may have
blank layers besides its own (`stages.slicing.architectures.rule_types.Blanks`), and a whole model layers for
multi-token prediction behind its last.
"""

from __future__ import annotations

import ctypes
import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from spanmesh_proto.errors import InvalidModel
from stages.runtime.llama import ggml_base, init_backend, last_complaint

if TYPE_CHECKING:
    from pathlib import Path

# `enum gguf_type`.
_UINT32: Final = 4


@dataclass(frozen=True)
class FileLayers:
    """Numbers of layers of a GGUF file, in their order."""

    before: int
    """Blank layers."""
    own: int
    """Layers of the stage."""
    after: int
    """Blank layers, or layers for multi-token prediction."""


class _InitParams(ctypes.Structure):
    """`struct gguf_init_params`."""

    _fields_ = (("no_alloc", ctypes.c_bool), ("context", ctypes.c_void_p))


class _Numbers:
    """Integers of a file's metadata; 0 where a key is missing."""

    def __init__(self, gguf: Any, context: int) -> None:
        self._gguf = gguf
        self._context = context

    @property
    def architecture(self) -> str:
        key = self._gguf.gguf_find_key(self._context, b"general.architecture")
        return "" if key < 0 else (self._gguf.gguf_get_val_str(self._context, key) or b"").decode()

    def of(self, name: str) -> int:
        key = self._gguf.gguf_find_key(self._context, name.encode())
        if key < 0 or self._gguf.gguf_get_kv_type(self._context, key) != _UINT32:
            return 0
        return int(self._gguf.gguf_get_val_u32(self._context, key))


def read_file_layers(path: Path) -> FileLayers:
    """Read the numbers from a file's metadata.

    Raises:
        InvalidModel: If it is no GGUF.
    """
    init_backend()
    gguf = _gguf()
    context = gguf.gguf_init_from_file(str(path).encode(), _InitParams(no_alloc=True))
    if not context:
        raise InvalidModel(f"llama.cpp does not load {path.name}: {last_complaint()}")
    try:
        numbers = _Numbers(gguf, context)
        count = numbers.of(f"{numbers.architecture}.block_count")
        if not numbers.of("spanmesh.layer_count"):
            after = numbers.of(f"{numbers.architecture}.nextn_predict_layers")
            return FileLayers(0, count - after, after)
        before = numbers.of("spanmesh.blanks_before")
        own = numbers.of("spanmesh.layer_stop") - numbers.of("spanmesh.layer_start")
        return FileLayers(before, own, count - before - own)
    finally:
        gguf.gguf_free(context)


@functools.cache
def _gguf() -> Any:
    """libggml-base, with the used prototypes."""
    library: Any = ggml_base()
    context, key = ctypes.c_void_p, ctypes.c_int64
    prototypes: dict[str, tuple[Any, list[Any]]] = {
        "gguf_init_from_file": (context, [ctypes.c_char_p, _InitParams]),
        "gguf_free": (None, [context]),
        "gguf_find_key": (key, [context, ctypes.c_char_p]),
        "gguf_get_kv_type": (ctypes.c_int, [context, key]),
        "gguf_get_val_u32": (ctypes.c_uint32, [context, key]),
        "gguf_get_val_str": (ctypes.c_char_p, [context, key]),
    }
    for name, (result, arguments) in prototypes.items():
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments
    return library
