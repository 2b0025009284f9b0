"""How many processors there are for a process, and what they are called, on any system."""

import os
from pathlib import Path

import pytest

from mesh.util import processors


def test_as_many_as_this_process_may_use() -> None:
    assert 1 <= processors.num_usable() <= (os.cpu_count() or 1)


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="this system lets nobody choose processors")
def test_fewer_where_the_process_is_bound_to_some() -> None:
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(before)})
    try:
        assert processors.num_usable() == 1
    finally:
        os.sched_setaffinity(0, before)


def test_all_of_them_where_no_process_is_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "sched_getaffinity", raising=False)
    assert processors.num_usable() == (os.cpu_count() or 1)


def test_there_is_a_name_even_where_no_file_lists_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processors, "_CPUINFO", tmp_path / "absent")
    assert processors.processor_name().strip()


def test_the_name_is_that_of_the_first_processor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    listed = tmp_path / "cpuinfo"
    listed.write_text("processor\t: 0\nmodel name\t: A Processor 9: fast\nmodel name\t: Another\n")
    monkeypatch.setattr(processors, "_CPUINFO", listed)
    assert processors.processor_name() == "A Processor 9: fast"
