"""What a host says about itself."""

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mesh.cluster.host_facts import (
    check_llama_cpp,
    default_num_threads,
    measure_speed_gb_per_s,
    parse_size,
    read_host_facts,
    try_llama_cpp,
)
from spanmesh_proto.errors import ClusterError
from stages.host.processor_fit import processor_flags
from stages.units import format_size
from tests.support.hostile_modules import write_hostile_modules

# Stands for kernels of another processor: says that they need an extension of the other architecture.
FOREIGN = """
int ggml_cpu_has_sve(void) { return NEEDS_SVE; }
int ggml_cpu_has_amx_int8(void) { return NEEDS_AMX; }
"""
ILLEGAL = """
#include <signal.h>
void ggml_cpu_init(void) { signal(SIGILL, SIG_DFL); raise(SIGILL); }
"""
HARMLESS = "void ggml_cpu_init(void) {}\n"
NAME = "libggml-cpu.dylib" if sys.platform == "darwin" else "libggml-cpu.so"


@pytest.mark.parametrize(
    ("text", "size_bytes"),
    [
        ("8G", 8 * 2**30),
        ("8g", 8 * 2**30),
        ("8 GiB", 8 * 2**30),
        ("8GB", 8 * 2**30),
        ("1.5M", 3 * 2**19),
        ("512 kib", 2**19),
        ("1T", 2**40),
        ("1024", 1024),
        (" 7 B ", 7),
    ],
)
def test_sizes_are_read_as_people_write_them(text: str, size_bytes: int) -> None:
    assert parse_size(text) == size_bytes


@pytest.mark.parametrize("text", ["", "G", "8X", "-8G", "0", "0G", "8G8", "1e9", "eight"])
def test_what_is_no_size_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(ClusterError, match="8G"):
        parse_size(text)


@given(st.integers(1, 2**43))
def test_a_size_survives_being_shown_to_within_a_tenth_of_its_unit(size_bytes: int) -> None:
    shown = format_size(size_bytes)
    unit = parse_size("1 " + shown.split()[1])
    if shown.startswith("0.0 "):  # which is no size
        assert size_bytes <= 0.1 * unit
    else:
        assert abs(parse_size(shown) - size_bytes) <= 0.1 * unit + 1


def test_the_user_s_word_counts_more_than_what_is_measured() -> None:
    facts = read_host_facts(memory_bytes=12345, num_threads=1)
    assert (facts.memory_bytes, facts.num_threads) == (12345, 1)
    assert facts.speed_gb_per_s > 0
    assert facts.versions.python.startswith("3.")


def test_threads_are_no_more_than_this_process_may_use() -> None:
    assert 1 <= default_num_threads() <= (os.cpu_count() or 1)


def test_threads_without_an_option_keep_to_a_quota_of_processors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("psutil.cpu_count", lambda logical: 16)
    monkeypatch.setattr("stages.process_limits.num_bound", lambda: 16)
    for quota, num_threads in ((None, 16), (2.5, 2), (0.5, 1)):
        monkeypatch.setattr("stages.process_limits.processor_quota", lambda _root, quota=quota: quota)
        assert default_num_threads() == num_threads


def test_the_measured_speed_is_that_of_memory_not_of_nothing() -> None:
    # Any machine that runs this reads between 0.1 and 10,000 GB/s; a unit mixed up would fall outside.
    assert 0.1 < measure_speed_gb_per_s(1) < 10_000


@pytest.fixture
def libraries(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Folder in place of that of llama.cpp's libraries."""
    monkeypatch.setenv("LLAMA_CPP_LIB_PATH", str(tmp_path))
    try_llama_cpp.cache_clear()
    yield tmp_path
    try_llama_cpp.cache_clear()


def compile_kernels(folder: Path, source: str, *, needs: str = "") -> None:
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        pytest.skip("there is no C compiler")
    (folder / "kernels.c").write_text(source)
    defined = [f"-DNEEDS_{name}={int(name == needs)}" for name in ("SVE", "AMX")]
    subprocess.run(
        [compiler, "-shared", "-fPIC", *defined, "-o", folder / NAME, folder / "kernels.c"], check=True
    )


def test_nothing_is_imported_from_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(write_hostile_modules(tmp_path / "project"))
    monkeypatch.setenv("PYTHONPATH", ":lib")
    try_llama_cpp.cache_clear()
    assert try_llama_cpp().fault is None
    assert measure_speed_gb_per_s(1) > 0


def test_the_installed_llama_cpp_runs_here() -> None:
    assert try_llama_cpp().fault is None
    check_llama_cpp()


def test_a_build_that_ends_with_an_illegal_instruction_is_for_another_processor(libraries: Path) -> None:
    compile_kernels(libraries, FOREIGN + ILLEGAL)
    fault = try_llama_cpp().fault
    assert fault is not None
    assert "another processor" in fault.reason
    with pytest.raises(ClusterError, match=r"llama\.cpp does not run on this host: .*; install"):
        check_llama_cpp()


@pytest.mark.skipif(not processor_flags(), reason="this system does not list the processor's extensions")
def test_the_extension_that_this_processor_lacks_is_named(libraries: Path) -> None:
    name, flag = ("AMX", "amx_int8") if "asimd" in processor_flags() else ("SVE", "sve")
    compile_kernels(libraries, FOREIGN + HARMLESS, needs=name)
    fault = try_llama_cpp().fault
    assert fault is not None
    assert f"a processor with {flag}, which this one lacks" in fault.reason


def test_a_library_that_does_not_load_is_told_with_its_own_remedy(libraries: Path) -> None:
    (libraries / NAME).write_text("no library")
    fault = try_llama_cpp().fault
    assert fault is not None
    assert "cannot be loaded" in fault.reason
    assert NAME in fault.reason


def test_a_host_that_cannot_run_llama_cpp_has_no_facts(libraries: Path) -> None:
    (libraries / NAME).write_text("no library")
    with pytest.raises(ClusterError, match="cannot be loaded"):
        read_host_facts(memory_bytes=1, num_threads=1)
