"""Build of llama.cpp's RPC server.

The source is the one in llama-cpp-python's source package, of the installed version, so that both sides of a
comparison run the same kernels. Run as a program it builds, and prints the paths.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Final

import stages
from mesh.util.child_environment import module_command
from spanmesh_proto.errors import MeshError
from stages.files import user_folder
from stages.process_limits import num_usable

if TYPE_CHECKING:
    from collections.abc import Sequence

PACKAGE: Final = "llama-cpp-python"
LLAMA_CPP: Final = Path("vendor/llama.cpp")
_TARGETS: Final = ("llama-server", "ggml-rpc-server")

_MENDS: Final = sorted(Path(stages.__file__).parent.glob("*.h"))
_FLAGS: Final = " ".join(f"-include '{header}'" for header in _MENDS)

# The best configuration of the peer: optimised for this processor, with every kernel that is on by default,
# and with our own build's corrections. The rest only keeps the build short and offline.
_OPTIONS: Final = (
    "-DCMAKE_BUILD_TYPE=Release",
    "-DBUILD_SHARED_LIBS=OFF",
    "-DGGML_RPC=ON",
    "-DLLAMA_OPENSSL=OFF",
    "-DLLAMA_BUILD_APP=OFF",
    "-DLLAMA_BUILD_EXAMPLES=OFF",
    "-DLLAMA_BUILD_TESTS=OFF",
    "-DLLAMA_BUILD_UI=OFF",
    "-DLLAMA_USE_PREBUILT_UI=OFF",
    f"-DCMAKE_C_FLAGS={_FLAGS}",
    f"-DCMAKE_CXX_FLAGS={_FLAGS}",
)


@dataclass(frozen=True)
class LlamaRpc:
    """Programs of llama.cpp's RPC."""

    server: Path
    """`llama-server`, which holds the model file and answers requests."""
    rpc_server: Path
    """`ggml-rpc-server`, which computes on one host."""
    package_version: str
    """Version of llama-cpp-python whose source they were built from."""


def build_llama_rpc(cache: Path | None = None) -> LlamaRpc:
    """Build the two programs once: about eight minutes on two cores.

    Args:
        cache: Folder of source and build, by default in the user's cache directory.

    Raises:
        MeshError: If a tool is missing or fails; the message names the log.
    """
    package_version = version(PACKAGE)
    home = _home(cache)
    source, build, log = home / "source", home / build_name(), home / "build.log"
    programs = LlamaRpc(build / "bin" / _TARGETS[0], build / "bin" / _TARGETS[1], package_version)
    if programs.server.exists() and programs.rpc_server.exists():
        return programs
    cmake = shutil.which("cmake")
    if cmake is None:
        raise MeshError("cmake is missing, and llama.cpp's servers are built with it: pip install cmake")
    home.mkdir(parents=True, exist_ok=True)
    if not source.exists():
        unpack_source(package_version, source, log)
    do([cmake, "-S", str(source / LLAMA_CPP), "-B", str(build), *_OPTIONS], log)
    jobs = str(num_usable())
    do([cmake, "--build", str(build), "--parallel", jobs, "--target", *_TARGETS], log)
    return programs


def unpacked_source(cache: Path | None = None) -> Path | None:
    """Folder of llama.cpp's source, of the installed version; None if it was never unpacked there.

    Without a cache, `SPANMESH_LLAMA_CPP` may name the folder, as `make test` does.
    """
    named = os.environ.get("SPANMESH_LLAMA_CPP")
    if named and cache is None:
        return Path(named)
    folder = _home(cache) / "source" / LLAMA_CPP
    return folder if folder.is_dir() else None


def _home(cache: Path | None) -> Path:
    return (cache or default_cache()) / f"llama-rpc-{version(PACKAGE)}"


def build_name() -> str:
    """Name of a folder that depends on options and corrections."""
    said = hashlib.sha256(" ".join(_OPTIONS).encode())
    for header in _MENDS:
        said.update(header.read_bytes())
    return f"build-{said.hexdigest()[:8]}"


def default_cache() -> Path:
    """The user's cache directory."""
    return user_folder("XDG_CACHE_HOME", ".cache") / "spanmesh"


def unpack_source(package_version: str, source: Path, log: Path) -> None:
    """Download llama-cpp-python's source package and unpack it, llama.cpp in it, at `source`."""
    with tempfile.TemporaryDirectory(dir=source.parent) as scratch:
        requirement = f"{PACKAGE}=={package_version}"
        only_source = ["--no-deps", "--no-binary", PACKAGE, "--dest", scratch, requirement]
        do(module_command("pip", "download", *only_source), log)
        (archive,) = Path(scratch).glob("*.tar.gz")
        with tarfile.open(archive) as packed:
            packed.extractall(scratch, filter="data")
        (unpacked,) = (entry for entry in Path(scratch).iterdir() if entry.is_dir())
        unpacked.rename(source)  # last, so that an interrupted download leaves no partial folder


def do(argv: Sequence[str], log: Path) -> None:
    """Run a tool, its output into a log.

    Raises:
        MeshError: If it fails; the message names the log.
    """
    with log.open("ab") as out:
        done = subprocess.run(argv, stdin=subprocess.DEVNULL, stdout=out, stderr=out, check=False)
    if done.returncode != 0:
        raise MeshError(f"{Path(argv[0]).name} ended with code {done.returncode}, see the end of {log}")


if __name__ == "__main__":
    found = build_llama_rpc()
    sys.stdout.write(f"{found.server}\n{found.rpc_server}\n")
