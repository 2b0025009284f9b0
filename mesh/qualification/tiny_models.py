"""Tiny models of llama.cpp, one per architecture.

Its test program `test-llama-archs` writes them. It is built from the source inside llama-cpp-python's source
package, of the installed version. To have deeper models, too, a copy of that program is built which
multiplies the number of layers; llama.cpp itself stays as it is.

    python -m mesh.qualification.tiny_models DIR --depth 2
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Final

import click

from mesh.lab.llama_cpp_build import LLAMA_CPP, PACKAGE, default_cache, do, unpack_source
from spanmesh_proto.errors import MeshError

_PROGRAM: Final = "test-llama-archs"
_SEED: Final = 20_240_613
_DEPTH_SWITCH: Final = "SPANMESH_DEPTH"

# Quick to build: what it computes is random anyway.
_OPTIONS: Final = (
    "-DCMAKE_BUILD_TYPE=Release",
    "-DCMAKE_CXX_FLAGS_RELEASE=-O1",
    "-DBUILD_SHARED_LIBS=OFF",
    "-DGGML_NATIVE=OFF",
    "-DLLAMA_OPENSSL=OFF",
    "-DLLAMA_BUILD_APP=OFF",
    "-DLLAMA_BUILD_EXAMPLES=OFF",
    "-DLLAMA_BUILD_SERVER=OFF",
    "-DLLAMA_BUILD_TOOLS=OFF",
    "-DLLAMA_BUILD_TESTS=ON",
    "-DLLAMA_BUILD_UI=OFF",
    "-DLLAMA_USE_PREBUILT_UI=OFF",
)

# What lists a value for each layer, and is to be repeated with the layers.
_LISTS: Final = re.compile(r"std::vector<(uint32_t|float)>\((\{0, 0, 4, 128\}|\{0\.0f, [45]\.0f\})\)")
_BEFORE: Final = "static gguf_context_ptr get_gguf_ctx("
_LAYERS_KNOWN: Final = "    uint32_t n_head_kv = n_head;\n"
_STACK: Final = "LLM_KV_HRM_LAYERS_PER_STACK, uint32_t(1)"


def deepened(source: str) -> str:
    """The program's source with a number of layers that the environment multiplies.

    Raises:
        MeshError: If it is not the source that this was written for.
    """
    if source.count(_LAYERS_KNOWN) != 1 or _BEFORE not in source:
        raise MeshError(
            f"{_PROGRAM} of this llama.cpp is another than the one known: its depth cannot be set"
        )
    helper = (
        f'static const uint32_t depth = getenv("{_DEPTH_SWITCH}") ? atoi(getenv("{_DEPTH_SWITCH}")) : 1;\n'
        "template <typename T> static std::vector<T> repeated(const std::vector<T> & once) {\n"
        "    std::vector<T> all;\n"
        "    for (uint32_t i = 0; i < depth; i++) { all.insert(all.end(), once.begin(), once.end()); }\n"
        "    return all;\n"
        "}\n\n"
    )
    source = source.replace(_BEFORE, helper + _BEFORE, 1)
    source = source.replace(_LAYERS_KNOWN, "    n_layer *= depth;\n" + _LAYERS_KNOWN)
    source = source.replace(_STACK, "LLM_KV_HRM_LAYERS_PER_STACK, depth")
    return _LISTS.sub(r"repeated<\1>(\2)", source)


def build_generator(cache: Path | None = None) -> Path:
    """Build the program, or find it built: about ten minutes on one core the first time.

    Args:
        cache: Where source and build are kept, by default the user's cache directory.

    Raises:
        MeshError: If a tool is missing or fails; the message names the log.
    """
    package_version = version(PACKAGE)
    home = (cache or default_cache()) / f"llama-archs-{package_version}"
    source, build, log = home / "source", home / "build", home / "build.log"
    program = build / "bin" / _PROGRAM
    if program.exists():
        return program
    cmake = shutil.which("cmake")
    if cmake is None:
        raise MeshError(f"cmake is missing, and {_PROGRAM} is built with it: pip install cmake")
    home.mkdir(parents=True, exist_ok=True)
    if not source.exists():
        unpack_source(package_version, source, log)
    code = source / LLAMA_CPP / "tests" / f"{_PROGRAM}.cpp"
    text = code.read_text(encoding="utf-8")
    if _DEPTH_SWITCH not in text:
        code.write_text(deepened(text), encoding="utf-8")
    do([cmake, "-S", str(source / LLAMA_CPP), "-B", str(build), *_OPTIONS], log)
    jobs = str(len(os.sched_getaffinity(0)))
    do([cmake, "--build", str(build), "--parallel", jobs, "--target", _PROGRAM], log)
    return program


def generate(program: Path, folder: Path, depth: int = 1) -> int:
    """Write the models: about 128 files of 7 MB.

    Args:
        program: What `build_generator` gave.
        folder: Where to; made if needed.
        depth: What the usual number of layers is multiplied by.

    Returns:
        How many there are.

    Raises:
        MeshError: If the program fails.
    """
    folder.mkdir(parents=True, exist_ok=True)
    done = subprocess.run(
        [str(program), "--out", str(folder), "--seed", str(_SEED)],
        env={**os.environ, _DEPTH_SWITCH: str(depth)},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        check=False,
    )
    if done.returncode != 0:
        words = done.stderr.decode(errors="replace").strip().split("\n")[-1]
        raise MeshError(f"{program.name} ended with code {done.returncode}: {words}")
    return len(list(folder.glob("*.gguf")))


@click.command()
@click.argument("folder", type=click.Path(path_type=Path))
@click.option("--depth", type=click.IntRange(min=1), default=1, show_default=True, help="Times the layers.")
def main(folder: Path, depth: int) -> None:
    """Write llama.cpp's tiny model of each architecture to FOLDER."""
    try:
        count = generate(build_generator(), folder, depth)
    except MeshError as error:
        raise click.ClickException(error.message) from error
    sys.stdout.write(f"{count} models in {folder}\n")


if __name__ == "__main__":
    main()
