"""Hostile texts against a real mesh: how they are made, what counts as left behind, and short runs."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from random import Random
from typing import TYPE_CHECKING

import pytest

from mesh.cli.main import run
from meshbench.request_record import Failure, Record
from tests.qualification.fuzz.flood import flood, flood_bodies, pace_of
from tests.qualification.fuzz.head_watch import Footprint
from tests.qualification.fuzz.hostile_texts import RUNS, hostile_text, run_of
from tests.qualification.fuzz.text_fuzz import TextCases

if TYPE_CHECKING:
    from pathlib import Path

MARKS = ("<|im_start|>", "<|im_end|>")
MAX_BYTES = 100_000
AT_REST = Footprint(num_processes=3, num_threads=60, num_files=100, size_bytes=10**9, busy_s=10.0)


def test_a_run_has_its_length_and_its_characters() -> None:
    for name, characters in RUNS.items():
        text = run_of(name, 1001)
        assert len(text) == 1001
        assert set(text) <= set(characters)


def test_there_are_all_shapes_of_texts() -> None:
    random = Random(1)
    found = [hostile_text(random, 500, MARKS) for _ in range(600)]
    assert all(len(one.text) <= 500 for one in found)
    assert set(RUNS) < {one.shape for one in found}
    assert any("\ud800" in one.text for one in found)
    assert any(one.text.count("<|im_end|>") > 10 for one in found)


def test_a_request_depends_on_its_number_and_the_seed_alone_and_is_read() -> None:
    cases, again, other = (TextCases(seed, MARKS, MAX_BYTES) for seed in (7, 7, 8))
    numbers = range(120)
    found = [cases.case(number) for number in numbers]
    assert found == [again.case(number) for number in reversed(numbers)][::-1]
    assert found != [other.case(number) for number in numbers]
    assert all(len(case.body) <= MAX_BYTES for case in found)
    assert any(len(case.body) > MAX_BYTES - 2000 for case in found)
    assert len({case.path for case in found}) == len({case.path for case in cases.usual()})
    assert all(json.loads(case.body) for case in found)
    assert 0 < sum(case.hang_up_s is not None for case in found) < len(found)


@pytest.mark.parametrize(
    ("after", "says"),
    [
        (replace(AT_REST, num_threads=70, num_files=110, size_bytes=10**9 + 10**8), None),
        (replace(AT_REST, num_processes=4), "4 processes where 3 were"),
        (replace(AT_REST, num_threads=90), "90 threads where 60 were"),
        (replace(AT_REST, num_files=200), "200 open files where 100 were"),
        (replace(AT_REST, size_bytes=2 * 10**9), "2000000000 bytes of memory"),
    ],
)
def test_what_is_left_behind_is_named(after: Footprint, says: str | None) -> None:
    found = after.excess_over(AT_REST)
    assert found is None if says is None else says in str(found)


def test_pace_is_that_of_streams_with_tokens() -> None:
    record = Record(0, "", 0.0, 0.0, 1.0, 2.0, parts_s=(1.5, 1.6, 1.8), last_s=1.8)
    refused = replace(record, parts_s=(), failure=Failure("http_429", "no"))
    pace = pace_of([record, refused])
    assert (pace.num_streams, round(pace.first_ms), round(pace.gap_ms)) == (2, 500, 199)
    assert pace_of([refused]).first_ms == float("inf")


async def test_a_flood_sends_bodies_and_hangs_up_whatever_it_is_told() -> None:
    num_bytes = 0
    num_connections = 0

    async def count(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal num_bytes, num_connections
        num_connections += 1
        try:
            while data := await reader.read(65_536):
                num_bytes += len(data)
        except ConnectionError:
            pass
        writer.close()

    server = await asyncio.start_server(count, "127.0.0.1", 0)
    async with server:
        port = server.sockets[0].getsockname()[1]
        await asyncio.to_thread(flood, port, "key", 1, duration_s=0.0, max_bytes=MAX_BYTES, max_hang_up_s=0.5)
    assert 0 < num_connections <= 64
    assert num_bytes > 0
    assert all(MAX_BYTES - 5000 < len(body) <= MAX_BYTES for _, body in flood_bodies(MAX_BYTES))


@pytest.mark.model
@pytest.mark.cluster
@pytest.mark.sociable
@pytest.mark.parametrize(("kind", "num_cases"), [("texts", 16), ("kills", 8)])
def test_a_head_stands_texts_that_are_hard_to_read_and_kills_of_what_reads_them(
    kind: str,
    num_cases: int,
    tmp_path: Path,
    stage_cache_dir: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(stage_cache_dir))
    options = [f"--{kind}", str(num_cases), "--seed", "1", "-o", str(tmp_path / "out"), "--json"]
    code = run(["bench", "fuzz", *options])
    (report,) = json.loads(capsys.readouterr().out)
    assert (code, report["good"], report["kept"]) == (0, True, []), report
    assert report["cases"] == num_cases
