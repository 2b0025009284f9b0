"""Lends this machine's processor to llama.cpp as a GPU, so that what needs one can run where there is none.

A plugin for pytest: `pytest -p tests.support.lent_gpu -m gpu tests/gpu/test_gpu_parity.py`. llama.cpp's
RPC backend counts as a GPU with memory of its own; behind it, in another process, its server computes on the
processor. Layers, caches and graphs are then really split between two devices. How a GPU rounds it does not
tell.

The backend is built from the source in llama-cpp-python's source package; LLAMA_CPP_SOURCE names the folder
of llama.cpp in it.
"""

import ctypes
import os
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from stages.runtime.devices import ggml_devices
from stages.runtime.llama import init_backend
from stages.runtime.llama_libraries import library_folder

SOURCE = "LLAMA_CPP_SOURCE"
_SERVE = "from tests.support.lent_gpu import serve; import sys; serve(sys.argv[1], sys.argv[2])"
_running: list[subprocess.Popen[bytes]] = []


def build(folder: Path) -> Path:
    """Compile the RPC backend as a library, against the llama.cpp that is installed."""
    source, libraries = Path(os.environ[SOURCE]) / "ggml", library_folder()
    assert libraries is not None
    library = folder / "libggml-rpc.so"
    defines = ["-DGGML_BACKEND_DL", "-DGGML_BACKEND_SHARED", "-DGGML_BACKEND_BUILD", "-DGGML_SHARED"]
    files = [str(source / "src" / "ggml-rpc" / name) for name in ("ggml-rpc.cpp", "transport.cpp")]
    subprocess.run(
        [
            *("c++", "-std=c++17", "-O1", "-shared", "-fPIC", *defines),
            *(f"-I{source / 'include'}", f"-I{source / 'src'}", *files, "-o", str(library)),
            *(f"-L{libraries}", "-lggml-base", "-lpthread", f"-Wl,-rpath,{libraries}"),
        ],
        check=True,
    )
    return library


def serve(library: str, endpoint: str) -> None:
    """Compute for whoever connects, for ever."""
    init_backend()
    backend = ctypes.CDLL(library)
    start = backend.ggml_backend_rpc_start_server
    start.argtypes = [ctypes.c_char_p, ctypes.c_char_p, ctypes.c_size_t, ctypes.c_size_t, ctypes.c_void_p]
    processor = (ctypes.c_void_p * 1)(ggml_devices().ggml_backend_dev_get(0))
    start(endpoint.encode(), None, 1, 1, processor)


def register(library: Path, endpoint: str) -> None:
    """Have llama.cpp know the server as a device."""
    init_backend()
    backend: Any = ctypes.CDLL(str(library))
    backend.ggml_backend_rpc_add_server.argtypes = [ctypes.c_char_p]
    backend.ggml_backend_rpc_add_server.restype = ctypes.c_void_p
    ggml = ggml_devices()
    ggml.ggml_backend_register.argtypes = [ctypes.c_void_p]
    ggml.ggml_backend_register(backend.ggml_backend_rpc_add_server(endpoint.encode()))


def pytest_configure() -> None:
    """Before any test is looked for."""
    folder = Path(tempfile.mkdtemp(prefix="lent-gpu-"))
    library = build(folder)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        endpoint = f"127.0.0.1:{free.getsockname()[1]}"
    _running.append(subprocess.Popen([sys.executable, "-c", _SERVE, str(library), endpoint]))
    host, _, port = endpoint.partition(":")
    for _ in range(100):
        try:
            socket.create_connection((host, int(port)), 0.2).close()
            break
        except OSError:
            time.sleep(0.1)
    register(library, endpoint)


def pytest_unconfigure() -> None:
    """After the last."""
    for process in _running:
        process.kill()
        process.wait()
