"""Which extensions a build of llama.cpp needs, and whether the processor has them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from stages.host.processor_fit import extensions_of, lacking, processor_flags
from stages.runtime.llama import llama_library
from stages.runtime.llama_libraries import attention_version, kernels_folder, loaded_kernels

if TYPE_CHECKING:
    from pathlib import Path

X86 = "processor\t: 0\nflags\t\t: fpu avx avx2 fma\nmodel name\t: A\n\nprocessor\t: 1\nflags\t\t: fpu\n"
ARM = "processor\t: 0\nBogoMIPS\t: 50.00\nFeatures\t: fp asimd asimddp\n"


@pytest.mark.parametrize(
    ("listed", "flags"),
    [(X86, {"fpu", "avx", "avx2", "fma"}), (ARM, {"fp", "asimd", "asimddp"}), ("vendor\t: A\n", set())],
)
def test_flags_are_those_of_the_first_processor(listed: str, flags: set[str], tmp_path: Path) -> None:
    (tmp_path / "cpuinfo").write_text(listed)
    assert processor_flags(tmp_path / "cpuinfo") == flags


def test_where_nothing_is_listed_nothing_is_lacking(tmp_path: Path) -> None:
    flags = processor_flags(tmp_path / "absent")
    assert flags == frozenset()
    assert lacking(["avx512", "amx_int8"], flags) == ()


def test_what_is_lacking_is_told_by_the_kernel_s_names() -> None:
    assert lacking(["avx", "avx512", "amx_int8"], {"avx", "avx2"}) == ("avx512f", "amx_int8")
    assert lacking(["avx", "avx2"], {"avx", "avx2"}) == ()
    # Of a later llama.cpp.
    assert lacking(["avx99"], {"avx"}) == ()


def fit(**environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "stages.host.processor_fit"],
        env=os.environ | environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )


def test_the_installed_build_fits_the_processor_that_it_was_compiled_on() -> None:
    done = fit()
    assert done.returncode == 0, done.stderr
    extensions, version = map(json.loads, done.stdout.splitlines())
    assert lacking(extensions, processor_flags()) == ()
    assert version == attention_version(loaded_kernels())


@pytest.mark.skipif(kernels_folder() is not None, reason="this llama.cpp has kernels for several processors")
def test_extensions_are_those_that_the_kernels_tell() -> None:
    # The library that this process has: a second copy would stay beside it.
    kernels = llama_library("ggml-cpu")
    told = extensions_of(kernels)
    assert json.loads(fit().stdout.splitlines()[0]) == list(told)
    assert ("avx2" in told) == bool(kernels.ggml_cpu_has_avx2())
    assert ("neon" in told) == bool(kernels.ggml_cpu_has_neon())


def test_of_kernels_for_several_processors_only_what_all_need_is_loaded(tmp_path: Path) -> None:
    (tmp_path / "libggml-cpu-zen4.so").touch()
    assert fit(LLAMA_CPP_LIB_PATH=str(tmp_path)).stdout == "[]\n0\n"
    (tmp_path / "libggml-base.so").write_text("no library")
    done = fit(LLAMA_CPP_LIB_PATH=str(tmp_path))
    assert done.returncode != 0
    assert "libggml-base.so" in done.stderr.splitlines()[-1]
