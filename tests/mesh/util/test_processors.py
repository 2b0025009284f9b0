"""What the processors of a machine are called, on any system."""

from pathlib import Path

import pytest

from stages import processors


def test_there_is_a_name_even_where_no_file_lists_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processors, "_CPUINFO", tmp_path / "absent")
    assert processors.processor_name().strip()


def test_the_name_is_that_of_the_first_processor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    listed = tmp_path / "cpuinfo"
    listed.write_text("processor\t: 0\nmodel name\t: A Processor 9: fast\nmodel name\t: Another\n")
    monkeypatch.setattr(processors, "_CPUINFO", listed)
    assert processors.processor_name() == "A Processor 9: fast"
