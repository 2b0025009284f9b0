"""What a property that fails prints, under this project's settings: on CI as anywhere else."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import pytest

from tests.support.tiny_suites import run_pytest

if TYPE_CHECKING:
    from pathlib import Path

# It takes a fixture of which hypothesis warns that it is long to print, and notes what was drawn.
PROPERTY = """
from pathlib import Path
import pytest
from hypothesis import given, strategies as st

@pytest.fixture(scope="module")
def long():
    return {str(number): "x" * 100 for number in range(1000)}

@pytest.fixture(scope="module")
def drawn():
    found = []
    yield found
    with Path("drawn").open("a") as file:
        file.write(f"{found}\\n")

@given(number=st.integers(0, 2**32))
def test_right(drawn, number):
    drawn.append(number)

@given(number=st.integers(0, 2**32))
def test_wrong(FIXTURE, number):
    assert number < 1000
"""


@pytest.mark.parametrize("is_ci", [False, True])
def test_a_failure_prints_how_to_get_it_again(tmp_path: Path, *, is_ci: bool) -> None:
    (tmp_path / "test_these.py").write_text(PROPERTY.replace("FIXTURE", "long"))
    failed = run_pytest(tmp_path, "-k", "test_wrong", is_ci=is_ci)
    assert failed.returncode == 1
    assert "number=1000" in failed.stdout
    (decorator,) = set(re.findall(r"@reproduce_failure\('[\d.]+', b'[^']+'\)", failed.stdout))
    # And the decorator does so.
    text = PROPERTY.replace("FIXTURE", "long").replace(
        "@given(number=st.integers(0, 2**32))\ndef test_wrong",
        f"@{decorator.removeprefix('@')}\n@given(number=st.integers(0, 2**32))\ndef test_wrong",
    )
    (tmp_path / "test_these.py").write_text("from hypothesis import reproduce_failure\n" + text)
    again = run_pytest(tmp_path, "-k", "test_wrong", is_ci=is_ci)
    assert again.returncode == 1
    assert "number=1000" in again.stdout


def test_ci_draws_other_examples_each_time(tmp_path: Path) -> None:
    (tmp_path / "test_these.py").write_text(PROPERTY.replace("FIXTURE", "drawn"))
    for _ in range(2):
        run = run_pytest(tmp_path, "-k", "test_right", is_ci=True)
        assert run.returncode == 0, run.stdout
    first, second = (tmp_path / "drawn").read_text().splitlines()
    assert first != second
