"""The header that mends GCC's `_tile_loadconfig`, which llama.cpp is built with."""

import shutil
import subprocess
from pathlib import Path

import pytest

import stages

HEADER = Path(stages.__file__).parent / "amx_tile_config.h"
# Byte 48 says how many rows the first tile has. Its value comes from the argument, which GCC holds in %rdi.
SOURCE = """
#include <immintrin.h>
void configure(const unsigned char *rows) {
    unsigned char config[64] __attribute__((aligned(64))) = {1};
    config[48] = *rows;
    _tile_loadconfig(config);
}
"""


def assembly(tmp_path: Path, *options: str) -> str:
    source = tmp_path / "configure.c"
    source.write_text(SOURCE)
    argv = ["cc", "-O3", *options, "-include", str(HEADER), "-S", "-o", "-", str(source)]
    return subprocess.run(argv, capture_output=True, text=True, check=True).stdout


def test_the_whole_configuration_reaches_the_processor(tmp_path: Path) -> None:
    if shutil.which("cc") is None:
        pytest.skip("there is no C compiler here")
    if subprocess.run(["cc", "-mamx-tile", "-E", "/dev/null"], capture_output=True, check=False).returncode:
        pytest.skip("this compiler knows no AMX")
    text = assembly(tmp_path, "-mamx-tile")
    assert "ldtilecfg" in text
    assert "(%rdi)" in text


def test_the_header_is_empty_where_there_is_no_amx(tmp_path: Path) -> None:
    if shutil.which("cc") is None:
        pytest.skip("there is no C compiler here")
    argv = ["cc", "-E", "-P", str(HEADER)]
    assert subprocess.run(argv, capture_output=True, text=True, check=True).stdout.strip() == ""
