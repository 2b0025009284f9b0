"""Functions of llama.cpp's C API that llama-cpp-python lacks, and the routing of its log."""

from __future__ import annotations

import ctypes
import functools
import sys
import threading
from collections import deque
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import structlog
from llama_cpp import _ctypes_extensions

from stages.runtime.bindings import llama_cpp
from stages.runtime.llama_libraries import library_folder, load_best_kernels

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

_LEVELS = {3: "warning", 4: "error"}
_recent_complaints: deque[str] = deque(maxlen=20)
_partial_line: dict[int, str] = {}
_listeners: list[Callable[[str], None]] = []

log = structlog.get_logger()


def llama_library(name: str) -> Any:
    """A library that libllama depends on, `ggml` or `ggml-base`.

    Not loaded by its path: a wheel holds copies where others have links, so that would be a second library
    with devices of its own. Dependencies of libllama are found through libllama, except on Windows, which
    goes by names.
    """
    if sys.platform != "win32":
        return ctypes.CDLL(llama_cpp.llama_cpp._lib._name)  # noqa: SLF001 - the very one
    folder = library_folder()
    assert folder is not None  # noqa: S101 - it was imported above
    return _ctypes_extensions.load_shared_library(name, folder)


@functools.cache
def ggml_base() -> ctypes.CDLL:
    """libggml-base, with the used prototypes."""
    lib: ctypes.CDLL = llama_library("ggml-base")
    lib.ggml_get_name.argtypes = [ctypes.c_void_p]
    lib.ggml_get_name.restype = ctypes.c_char_p
    lib.ggml_nbytes.argtypes = [ctypes.c_void_p]
    lib.ggml_nbytes.restype = ctypes.c_size_t
    lib.ggml_backend_tensor_get.argtypes = [
        ctypes.c_void_p,
        ctypes.c_void_p,
        ctypes.c_size_t,
        ctypes.c_size_t,
    ]
    lib.ggml_backend_tensor_get.restype = None
    lib.ggml_backend_tensor_set.argtypes = lib.ggml_backend_tensor_get.argtypes
    lib.ggml_backend_tensor_set.restype = None
    return lib


@llama_cpp.llama_log_callback  # type: ignore[untyped-decorator]
def _on_log(level: int, text: bytes, _user_data: Any) -> None:
    thread = threading.get_ident()
    line = _partial_line.pop(thread, "") + text.decode(errors="replace")
    if not line.endswith("\n"):
        _partial_line[thread] = line[-4096:]
        return
    line = line.strip()
    if not line:
        return
    for listener in tuple(_listeners):
        listener(line)
    if level not in _LEVELS:
        return
    _recent_complaints.append(line)
    log.debug("llama_cpp", level=_LEVELS[level], text=line)


def route_log(log_set: Callable[[Any, Any], None]) -> None:
    """Route the log of llama.cpp, or of a library of its, to ours.

    Args:
        log_set: The library's function that takes a receiver.
    """
    log_set(_on_log, ctypes.c_void_p(0))


@functools.cache
def init_backend() -> None:
    """Initialise llama.cpp once for this process, and route its log to ours."""
    route_log(llama_cpp.llama_log_set)
    load_best_kernels(llama_library("ggml"))
    llama_cpp.llama_backend_init()


@contextmanager
def heard_log(on_line: Callable[[str], None]) -> Iterator[None]:
    """Give every line of llama.cpp's log to a function as well, for the block.

    Args:
        on_line: Called in the thread that logs; must not raise.
    """
    _listeners.append(on_line)
    try:
        init_backend()
        yield
    finally:
        _listeners.remove(on_line)


def last_complaint() -> str:
    """llama.cpp's latest warning or error with a reason, for our errors."""
    # The last line of a failed load gives no reason.
    reasons = (line for line in reversed(_recent_complaints) if not line.endswith("failed to load model"))
    return next(reasons, "no reason given")
