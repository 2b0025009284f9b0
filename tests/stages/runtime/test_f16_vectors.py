"""The header that keeps ggml from vectors of half precision, which llama.cpp is built with."""

import shutil
import subprocess
from pathlib import Path

import pytest

import stages

HEADER = Path(stages.__file__).parent / "f16_vectors.h"
SOURCE = """
#include <immintrin.h>
#ifdef __AVX512FP16__
#error "would take vectors of half precision"
#endif
__m512 wide(const void *four_lines) { return _mm512_cvtph_ps(_mm256_loadu_si256(four_lines)); }
"""


def test_the_macro_is_gone_and_what_is_taken_instead_compiles(tmp_path: Path) -> None:
    if shutil.which("cc") is None:
        pytest.skip("there is no C compiler here")
    if subprocess.run(["cc", "-mavx512fp16", "-E", "/dev/null"], capture_output=True, check=False).returncode:
        pytest.skip("this compiler knows no AVX512-FP16")
    source = tmp_path / "wide.c"
    source.write_text(SOURCE)
    argv = ["cc", "-O3", "-mavx512fp16", "-mavx512f", "-S", "-o", "-", str(source)]
    without = subprocess.run(argv, capture_output=True, text=True, check=False)
    assert "would take vectors of half precision" in without.stderr
    mended = subprocess.run([*argv, "-include", str(HEADER)], capture_output=True, text=True, check=True)
    assert "vcvtph2ps" in mended.stdout


def test_the_header_is_empty_on_other_processors() -> None:
    if shutil.which("cc") is None:
        pytest.skip("there is no C compiler here")
    argv = ["cc", "-E", "-P", str(HEADER)]
    assert subprocess.run(argv, capture_output=True, text=True, check=True).stdout.strip() == ""
