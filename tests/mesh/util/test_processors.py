"""What the processors of a machine are called, on any system."""

from pathlib import Path

import pytest

from stages import process_limits


def test_there_is_a_name_even_where_no_file_lists_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process_limits, "_CPUINFO", tmp_path / "absent")
    assert process_limits.processor_name().strip()


def test_the_name_is_that_of_the_first_processor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    listed = tmp_path / "cpuinfo"
    listed.write_text("processor\t: 0\nmodel name\t: A Processor 9: fast\nmodel name\t: Another\n")
    monkeypatch.setattr(process_limits, "_CPUINFO", listed)
    assert process_limits.processor_name() == "A Processor 9: fast"
