"""Waits of llama.cpp's threads: what libgomp is told, and by whom."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from stages.openmp_tuning import SPIN_COUNT, spin_count

if TYPE_CHECKING:
    from collections.abc import Mapping

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="llama.cpp uses libgomp on Linux")


def told(given: Mapping[str, str], program: str) -> str:
    """What libgomp prints of its settings in a new process."""
    environment = {name: value for name, value in os.environ.items() if name != SPIN_COUNT}
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={**environment, "OMP_DISPLAY_ENV": "VERBOSE", **given},
        capture_output=True,
        text=True,
        check=True,
    )
    (count,) = re.findall(rf"{SPIN_COUNT} = '(\w+)'", done.stderr)
    return str(count)


def test_a_wait_is_a_number_of_steps_that_take_as_long_on_each_processor() -> None:
    # From 200 ns to 0.2 ns each.
    assert 250 <= spin_count() <= 250_000


@pytest.mark.parametrize(
    "program",
    ["import stages.runtime.llama", "import mesh.text.tokenizer", "import speculative.draft.context"],
)
def test_libgomp_knows_it_in_every_process_of_a_mesh(program: str) -> None:
    assert 250 <= int(told({}, f"import mesh; {program}")) <= 250_000
    # Children have it from their parents, whatever they import first.
    assert told({SPIN_COUNT: "777"}, program) == "777"


def test_what_the_user_sets_stays() -> None:
    program = "import stages.runtime.llama"
    assert told({SPIN_COUNT: "12"}, program) == "12"
    assert told({"OMP_WAIT_POLICY": "active"}, program) not in ("", str(spin_count()))
    assert told({"OMP_WAIT_POLICY": "passive"}, program) == "0"
