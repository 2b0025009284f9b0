"""Tiny models, one per architecture or more.

llama.cpp's test program `test-llama-archs` writes most of them. It is built from the source inside
llama-cpp-python's source package, of the installed version. To have deeper models, and models with layers for
multi-token prediction, a copy of that program is built which multiplies the number of layers and adds such
layers; llama.cpp itself stays as it is. `tests.qualification.own_models` writes those that the program leaves
out.

    python -m tests.qualification.tiny_models DIR --depth 2 --prediction-layers 1
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Final

import click

from meshbench.lab.llama_cpp_build import LLAMA_CPP, PACKAGE, default_cache, do, unpack_source
from spanmesh_proto.errors import MeshError
from stages.files import ModelFile, Region, atomic_write
from stages.gguf import read_header
from stages.process_limits import num_usable
from stages.slicing.layout import StageLayout, StageTensor
from stages.slicing.stage_writer import StageWriter
from stages.slicing.tensor_names import is_per_layer, layer_of
from tests.qualification.own_models import write_own_models

if TYPE_CHECKING:
    from stages.gguf import Value

_PROGRAM: Final = "test-llama-archs"
_SEED: Final = 20_240_613
_DEPTH_SWITCH: Final = "SPANMESH_DEPTH"
_PREDICTION_SWITCH: Final = "SPANMESH_PREDICTION_LAYERS"

# Architectures whose prediction layers the program can write.
WITH_PREDICTION_LAYERS: Final = (
    "bailingmoe3",
    "cohere2moe",
    "deepseek2",
    "deepseek32",
    "glm-dsa",
    "glm4moe",
    "glm5-next",
    "hy_v3",
    "mimo2",
    "qwen35",
    "qwen35moe",
    "qwen3next",
)

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
_LAYERS_WRITTEN: Final = "    ms.add_kv(LLM_KV_BLOCK_COUNT,               n_layer);\n"
_BEFORE_LOADING: Final = "    model_params.progress_callback = silent_model_load_progress;\n"

_HELPERS: Final = f"""\
static uint32_t number(const char * name, uint32_t otherwise) {{
    return getenv(name) ? atoi(getenv(name)) : otherwise;
}}
static const uint32_t depth = number("{_DEPTH_SWITCH}", 1);
static const uint32_t n_prediction = number("{_PREDICTION_SWITCH}", 0);
template <typename T> static std::vector<T> repeated(const std::vector<T> & once) {{
    std::vector<T> all;
    for (uint32_t i = 0; i < depth; i++) {{ all.insert(all.end(), once.begin(), once.end()); }}
    all.insert(all.end(), n_prediction, once.front());
    return all;
}}

"""


def deepened(source: str) -> str:
    """The program's source with numbers of layers that the environment sets.

    Raises:
        MeshError: If it is not the source that this was written for.
    """
    once = (_BEFORE, _LAYERS_KNOWN, _LAYERS_WRITTEN, _BEFORE_LOADING)
    if any(source.count(line) != 1 for line in once):
        raise MeshError(
            f"{_PROGRAM} of this llama.cpp is another than the one known: its depth cannot be set"
        )
    source = source.replace(_BEFORE, _HELPERS + _BEFORE)
    source = source.replace(_LAYERS_KNOWN, "    n_layer = n_layer * depth + n_prediction;\n" + _LAYERS_KNOWN)
    count = "    if (n_prediction > 0) { ms.add_kv(LLM_KV_NEXTN_PREDICT_LAYERS, n_prediction); }\n"
    source = source.replace(_LAYERS_WRITTEN, _LAYERS_WRITTEN + count)
    source = source.replace(
        _BEFORE_LOADING, _BEFORE_LOADING + "    model_params.load_mtp = n_prediction > 0;\n"
    )
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
    home = (cache or default_cache()) / f"llama-archs-{package_version}-2"
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
    if _PREDICTION_SWITCH not in text:
        code.write_text(deepened(text), encoding="utf-8")
    do([cmake, "-S", str(source / LLAMA_CPP), "-B", str(build), *_OPTIONS], log)
    jobs = str(num_usable())
    do([cmake, "--build", str(build), "--parallel", jobs, "--target", _PROGRAM], log)
    return program


def generate(program: Path, folder: Path, depth: int = 1, n_prediction_layers: int = 0) -> int:
    """Write the models, files of 7 MB: 128 of them, or 12 with layers for multi-token prediction.

    Args:
        program: What `build_generator` gave.
        folder: Where to; made if needed.
        depth: What the usual number of layers is multiplied by.
        n_prediction_layers: Layers for multi-token prediction behind these. Other than 0 writes models of
            `WITH_PREDICTION_LAYERS` only.

    Returns:
        How many there are.

    Raises:
        MeshError: If the program fails.
    """
    folder.mkdir(parents=True, exist_ok=True)
    chosen = [f"^{name}$" for name in WITH_PREDICTION_LAYERS] if n_prediction_layers else [""]
    numbers = {_DEPTH_SWITCH: str(depth), _PREDICTION_SWITCH: str(n_prediction_layers)}
    for architectures in chosen:
        done = subprocess.run(
            [str(program), "--out", str(folder), "--seed", str(_SEED), "--arch", architectures],
            env={**os.environ, **numbers},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            check=False,
        )
        if done.returncode != 0:
            words = done.stderr.decode(errors="replace").strip().split("\n")[-1]
            raise MeshError(f"{program.name} {architectures} ended with code {done.returncode}: {words}")
    models = list(folder.glob("*.gguf"))
    for model in models if n_prediction_layers else ():
        _mend(model, n_prediction_layers)
    return len(models)


def _mend(path: Path, n_prediction_layers: int) -> None:
    """Make llama.cpp load a file that its own program wrote.

    The program writes optional scales of prediction layers, which the loader does not expect without these
    layers, and some lists without an entry for them.
    """
    header = read_header(path)
    architecture = header.architecture
    n_trunk = header.integer(f"{architecture}.block_count") - n_prediction_layers
    tensors = [
        StageTensor(
            tensor.name,
            tensor.shape,
            tensor.type,
            tensor.n_bytes,
            Region(0, tensor.offset_bytes, tensor.n_bytes),
        )
        for name, tensor in header.tensors.items()
        if (layer_of(name) or 0) < n_trunk or not name.endswith("scale")
    ]
    metadata = {
        key: _lengthened(value, n_prediction_layers)
        if is_per_layer(key, value, architecture, n_trunk)
        else value
        for key, value in header.metadata.items()
    }
    with ModelFile(path) as reader, atomic_write(path) as file:
        layout = StageLayout(header.alignment, metadata, tuple(tensors))
        StageWriter(reader, file, lambda _num_bytes: None).write(layout)


def _lengthened(value: Value, count: int) -> Value:
    """A list with its last entry some more times."""
    assert value.count is not None
    entry_bytes = len(value.payload) // value.count
    return replace(
        value, count=value.count + count, payload=value.payload + value.payload[-entry_bytes:] * count
    )


@click.command()
@click.argument("folder", type=click.Path(path_type=Path))
@click.option("--depth", type=click.IntRange(min=1), default=1, show_default=True, help="Times the layers.")
@click.option(
    "--prediction-layers",
    type=click.IntRange(0, 1),
    default=0,
    show_default=True,
    help="Layers for multi-token prediction.",
)
def main(folder: Path, depth: int, prediction_layers: int) -> None:
    """Write tiny models of each architecture that can have one to FOLDER."""
    try:
        generate(build_generator(), folder, depth, prediction_layers)
    except MeshError as error:
        raise click.ClickException(error.message) from error
    write_own_models(folder, depth, prediction_layers)
    sys.stdout.write(f"{len([*folder.glob('*.gguf')])} models in {folder}\n")


if __name__ == "__main__":
    main()
