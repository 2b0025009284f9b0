"""The attention kernel in the build of llama.cpp: it runs, and its numbers depend on a row alone."""

import ctypes
import os
import secrets
import shutil
import subprocess
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

import stages
from mesh.util.child_environment import module_command
from meshbench.lab.llama_cpp_build import unpacked_source
from stages.runtime.llama_libraries import attention_name, attention_version, library_folder, loaded_kernels
from stages.runtime.numerics import numerics_for
from stages.runtime.spans import Span
from stages.runtime.stage_runtime import RuntimeOptions, StageRuntime
from tests.support.short_models import short_smollm2_path  # noqa: F401 - a fixture

SOURCE = Path(__file__).parents[2] / "support" / "attention" / "attention_test.cpp"
TEXT = [1000 + 7919 * index % 3000 for index in range(600)]


@pytest.fixture(scope="module")
def kernels() -> ctypes.CDLL:
    """Kernels of this process, with spanmesh's for attention."""
    found = loaded_kernels()
    if found is None or not attention_version(found):
        pytest.skip("attention is computed by ggml here: this processor has neither AVX2 nor NEON")
    return found


@pytest.fixture
def enable(kernels: ctypes.CDLL) -> Iterator[Callable[[int], None]]:
    """Chooses between spanmesh's kernel and ggml's."""
    yield kernels.attention_rows_enable
    kernels.attention_rows_enable(1)


def logits(path: Path, num_threads: int, widths: Sequence[int], kv_type: str = "f16") -> NDArray[np.float32]:
    """Logits after the last 40 tokens, which are computed in windows of these widths, in turn."""
    options = RuntimeOptions(ctx_size=1024, exact=True, num_threads=num_threads, kv_type=kv_type)
    rows: list[NDArray[np.float32]] = []
    with closing(StageRuntime(path, options)) as runtime:
        first = len(TEXT) - 40
        for start in range(0, first, 40):
            runtime.decode([Span(0, start, TEXT[start : min(start + 40, first)])])
        while len(rows) < 40:
            start = first + len(rows)
            tokens = TEXT[start : start + widths[len(rows) % len(widths)]]
            rows.extend(runtime.decode([Span(0, start, tokens, None, len(tokens))])[0])
    return np.array(rows)


@pytest.mark.model
def test_it_computes_what_the_dispatcher_of_ggml_is_asked_for(
    short_smollm2_path: Path,  # noqa: F811 - the fixture
    enable: Callable[[int], None],
) -> None:
    own = logits(short_smollm2_path, 1, [1])
    enable(0)
    ggml_s = logits(short_smollm2_path, 1, [1])
    assert not np.array_equal(own, ggml_s)
    # ggml's sums are in f16.
    assert np.abs(own - ggml_s).max() < 0.1 * np.abs(own).max()


@pytest.mark.model
@pytest.mark.parametrize("kv_type", ["f16", "bf16", "q8_0"])
def test_a_lone_row_is_the_same_with_any_number_of_threads(
    short_smollm2_path: Path,  # noqa: F811 - the fixture
    kernels: ctypes.CDLL,
    kv_type: str,
) -> None:
    alone = logits(short_smollm2_path, 1, [1], kv_type)
    assert np.array_equal(alone, logits(short_smollm2_path, 2, [1], kv_type))
    assert np.array_equal(alone, logits(short_smollm2_path, 2, [9, 1, 5], kv_type))


def test_lone_rows_of_ggml_s_kernel_alone_are_padded() -> None:
    assert [
        numerics_for(exact=True, num_threads=2, attention_version=each).min_rows for each in (0, 116)
    ] == [2, 1]


def test_without_the_kernel_s_symbols_it_is_ggml_s() -> None:
    assert attention_version(None) == 0
    assert attention_version(ctypes.CDLL(None)) in {0, attention_version(loaded_kernels())}
    assert [attention_name(each) for each in (0, 116, 208)] == [
        "ggml",
        "spanmesh 1, 512 bits",
        "spanmesh 2, 256 bits",
    ]


@pytest.mark.parametrize(("wanted", "is_own"), [("ggml", False), ("", True)])
def test_the_environment_may_leave_attention_to_ggml(
    kernels: ctypes.CDLL,
    wanted: str,
    is_own: bool,  # noqa: FBT001 - of the test
) -> None:
    done = subprocess.run(
        module_command("stages.host.processor_fit"),
        env={**os.environ, "SPANMESH_ATTENTION": wanted},
        capture_output=True,
        text=True,
        check=True,
    )
    version = int(done.stdout.splitlines()[1])
    assert version == (attention_version(kernels) if is_own else 0)


@pytest.fixture(scope="module")
def program(kernels: ctypes.CDLL, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The test in C++, with the kernels that are installed."""
    compiler, libraries, source = shutil.which("c++"), library_folder(), unpacked_source()
    if compiler is None or libraries is None or source is None:
        pytest.skip("there is no C++ compiler, or no source of llama.cpp")
    path = tmp_path_factory.mktemp("attention") / "attention_test"
    argv = [
        *(compiler, "-std=c++17", "-O2", str(SOURCE), "-o", str(path)),
        *(f"-I{source / 'ggml' / 'include'}", f"-I{Path(stages.__file__).parent / 'attention'}"),
        *(f"-L{libraries}", f"-Wl,-rpath,{libraries}", "-lggml-cpu", "-lggml-base"),
    ]
    subprocess.run(argv, check=True)
    return path


@pytest.mark.parametrize(
    ("mode", "num_cases"),
    [
        ("invariance", 60),
        ("accuracy", 60),
        pytest.param("invariance", 1000, marks=pytest.mark.sweep),
        pytest.param("accuracy", 1000, marks=pytest.mark.sweep),
    ],
)
def test_random_operations(program: Path, mode: str, num_cases: int) -> None:
    """A row among others equals the row alone; sums are near those of float64."""
    argv = [str(program), mode, str(num_cases), str(secrets.randbelow(2**31))]
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{argv}\n{done.stdout}{done.stderr}"


@pytest.fixture
def ggml(tmp_path: Path) -> Path:
    """What ggml's kernels for processors are built from."""
    source = unpacked_source()
    if source is None or shutil.which("cmake") is None:
        pytest.skip("there is no source of llama.cpp, or no cmake")
    backends = [each.name for each in (source / "ggml" / "src").glob("ggml-*/") if each.name != "ggml-cpu"]
    ignored = shutil.ignore_patterns(*backends)
    project = "cmake_minimum_required(VERSION 3.19)\nproject(kernels C CXX)\nadd_subdirectory(ggml)\n"
    (tmp_path / "CMakeLists.txt").write_text(project)
    return shutil.copytree(source / "ggml", tmp_path / "ggml", ignore=ignored)


def configured(ggml: Path, *options: str) -> tuple[str, str]:
    """What CMake says of added kernels, and the commands that compile ggml."""
    project, build = ggml.parent, ggml.parent / "build"
    argv = [
        *("cmake", "-S", str(project), "-B", str(build), "-DCMAKE_EXPORT_COMPILE_COMMANDS=ON"),
        f"-DCMAKE_PROJECT_INCLUDE={Path(stages.__file__).parent / 'llama_build.cmake'}",
        *options,
    ]
    done = subprocess.run(argv, capture_output=True, text=True, check=True)
    said = [line for line in done.stdout.splitlines() if line.startswith("-- spanmesh:")]
    return "\n".join(said), (build / "compile_commands.json").read_text()


def test_the_build_adds_it_to_ggml_as_it_is(ggml: Path) -> None:
    said, commands = configured(ggml)
    assert said == ""
    assert commands.count("attention_rows.cpp.o -c") == commands.count("attention_rename.h") == 1


@pytest.mark.parametrize(
    ("file", "words", "by", "reason"),
    [
        ("ggml-cpu.c", "ggml_compute_forward_flash_attn_ext(", "ggml_attend(", "ggml-cpu.c lacks"),
        ("ops.cpp", "void ggml_compute_forward_flash_attn_ext(", "void ggml_attend(", "ops.cpp lacks"),
        ("simd-mappings.h", "GGML_CPU_FP16_TO_FP32", "GGML_TO_FP32", "simd-mappings.h lacks"),
        ("ggml-cpu-impl.h", "use_ref", "is_reference", "ggml-cpu-impl.h lacks"),
    ],
)
def test_where_the_sources_have_moved_the_build_goes_on_with_ggml_s(
    ggml: Path, file: str, words: str, by: str, reason: str
) -> None:
    path = ggml / "src" / "ggml-cpu" / file
    path.write_text(path.read_text().replace(words, by))
    said, commands = configured(ggml)
    assert said.startswith("-- spanmesh: attention is left to ggml's own kernel: " + reason)
    assert "\n" not in said
    assert "attention_r" not in commands
    assert "ggml-cpu.c" in commands
