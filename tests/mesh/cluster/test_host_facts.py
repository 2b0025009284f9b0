"""What a host says about itself."""

import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mesh.cluster.host_facts import default_num_threads, measure_speed_gb_per_s, parse_size, read_host_facts
from spanmesh_proto.errors import ClusterError
from stages.units import format_size


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


def test_the_measured_speed_is_that_of_memory_not_of_nothing() -> None:
    # Any machine that runs this reads between 0.1 and 10,000 GB/s; a unit mixed up would fall outside.
    assert 0.1 < measure_speed_gb_per_s(1) < 10_000
