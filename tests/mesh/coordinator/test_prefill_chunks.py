"""How a prompt is cut into chunks, alone and among others."""

from hypothesis import given
from hypothesis import strategies as st

from mesh.coordinator.prefill_pace import PrefillPace
from speculative.acceptance import StageMeasure


def chunks(pace: PrefillPace, num_tokens: int) -> list[int]:
    left, found = num_tokens, []
    while left:
        found.append(min(left, pace.rows(num_tokens)))
        left -= found[-1]
    return found


@given(num_tokens=st.integers(1, 5000), num_stages=st.integers(1, 6), max_rows=st.integers(1, 128))
def test_chunks_are_even_but_the_last_and_fit(num_tokens: int, num_stages: int, max_rows: int) -> None:
    sizes = chunks(PrefillPace(num_stages, max_rows), num_tokens)
    assert sum(sizes) == num_tokens
    assert max(sizes) <= max_rows
    assert len(set(sizes[:-1])) <= 1
    assert sizes[-1] <= sizes[0]
    # Kernels take whole tiles, where the stage takes as many rows.
    if len(sizes) > 1 and num_stages > 1:
        assert sizes[0] % 4 == 0 or sizes[0] == max_rows


def test_alone_a_prompt_keeps_every_stage_busy() -> None:
    pace = PrefillPace(num_stages=3, max_rows=128)
    assert chunks(pace, 768) == [64] * 12
    assert chunks(pace, 2048) == [128] * 16
    # Not in crumbs.
    assert chunks(pace, 150) == [80, 70]
    assert chunks(pace, 216) == [64, 64, 64, 24]
    assert chunks(pace, 100) == [100]
    assert chunks(PrefillPace(num_stages=1, max_rows=128), 300) == [128, 128, 44]


def test_among_others_a_chunk_is_as_long_as_they_can_bear() -> None:
    pace = PrefillPace(num_stages=2, max_rows=128)
    pace.num_decoding = 1
    assert pace.rows(2048) == 16
    for _ in range(40):
        pace.learn_chunk([StageMeasure(64, 3.0, 32.0), StageMeasure(64, 3.0, 64.0)], elapsed_ms=112.0)
        # Undisturbed it takes 20 ms; 15 ms more at each of two stages are 1.5 times that.
        pace.learn_window([StageMeasure(1, 40.0, 5.0)] * 2, elapsed_ms=100.0)
    assert pace.rows(2048) == 12
    for _ in range(40):
        pace.learn_chunk([StageMeasure(4, 0.0, 200.0)] * 2, elapsed_ms=410.0)
    assert pace.rows(2048) == 1
    pace.num_decoding = 0
    assert pace.rows(2048) == 128


def test_a_slow_network_takes_more_chunks_under_way() -> None:
    near, far = PrefillPace(3, 128), PrefillPace(3, 128)
    for pace, network_ms in ((near, 1.0), (far, 400.0)):
        assert pace.num_in_flight(32) == 4
        for _ in range(40):
            pace.learn_chunk([StageMeasure(32, 5.0, 32.0)] * 3, elapsed_ms=111.0 + network_ms)
    assert near.num_in_flight(32) == 5
    assert far.num_in_flight(32) == 16
    assert far.num_in_flight(128) == 8


def test_others_wait_less_for_a_prompt_with_rows_that_are_no_tokens() -> None:
    pace = PrefillPace(3, max_rows=512)
    pace.num_decoding = 1
    for _ in range(40):
        pace.learn_chunk([StageMeasure(32, 5.0, 32.0)] * 3, elapsed_ms=111.0)
        pace.learn_window([StageMeasure(1, 0.0, 32.0)] * 3, elapsed_ms=111.0)
    # Half as many, in whole tiles.
    assert (pace.rows(600), pace.rows(600, has_rows=True)) == (52, 24)


def test_a_replay_is_not_held_up_by_those_whose_answers_go_on() -> None:
    pace = PrefillPace(3, max_rows=512)
    alone = pace.rows(600)
    pace.num_decoding = 5
    assert pace.rows(600) < alone
    assert pace.rows(600, is_replay=True) == alone


def decoding(pace: PrefillPace, round_trip_ms: float, times: int) -> None:
    """Windows that compute for 5 ms at each stage, are 10 ms on the network, and wait for the rest."""
    for _ in range(times):
        queue_ms = (round_trip_ms - 20.0) / 2
        pace.learn_window([StageMeasure(1, queue_ms, 5.0)] * 2, elapsed_ms=round_trip_ms)


def beside_chunks(pace: PrefillPace, round_trip_ms: float, times: int) -> None:
    """Windows that take `round_trip_ms` while chunks of 16 rows take 16 ms at each stage."""
    for _ in range(times):
        pace.learn_chunk([StageMeasure(16, 0.0, 16.0)] * 2, elapsed_ms=42.0)
        decoding(pace, round_trip_ms, 1)


def test_chunks_are_fewer_then_smaller_where_others_wait_longer_than_foretold() -> None:
    """As where stages share processors, and all that runs beside a chunk takes longer."""
    pace = PrefillPace(2, max_rows=128)
    pace.num_decoding = 1
    decoding(pace, 20.0, 40)
    beside_chunks(pace, 45.0, 10)
    # Half of 1.5 times 20 ms at each of two stages.
    assert (pace.rows(2048), pace.num_in_flight(12)) == (12, 4)
    beside_chunks(pace, 60.0, 6)
    assert (pace.rows(2048), pace.num_in_flight(12)) == (12, 2)
    beside_chunks(pace, 60.0, 100)
    rows = pace.rows(2048)
    assert 0 < rows < 8
    assert pace.num_in_flight(rows) == 1
    # Of a replay, and of prompts that nothing decodes beside, it is no matter.
    assert pace.rows(2048, is_replay=True) == 128
    assert pace.num_in_flight(128, is_replay=True) == 4
    beside_chunks(pace, 45.0, 400)
    assert (pace.rows(2048), pace.num_in_flight(12)) == (12, 4)


def test_what_a_window_waits_for_its_own_session_is_no_delay_by_chunks() -> None:
    """As behind its own prompt, which speculation does not wait for."""
    pace, other = PrefillPace(2, max_rows=128), PrefillPace(2, max_rows=128)
    for each in (pace, other):
        each.num_decoding = 1
        decoding(each, 20.0, 40)
    for _ in range(100):
        pace.learn_chunk([StageMeasure(16, 0.0, 16.0)] * 2, elapsed_ms=42.0)
        pace.learn_window([StageMeasure(1, 90.0, 5.0)] * 2, elapsed_ms=200.0, num_ahead=1)
    assert (pace.rows(2048), pace.num_in_flight(12)) == (12, 4)
    # Nor does it tell how long windows take without chunks.
    for _ in range(40):
        pace.learn_window([StageMeasure(1, 90.0, 5.0)] * 2, elapsed_ms=200.0, num_ahead=2)
    for each in (pace, other):
        beside_chunks(each, 60.0, 6)
    assert pace.num_in_flight(12) == other.num_in_flight(12) == 2


def test_one_window_in_many_may_be_late() -> None:
    pace = PrefillPace(2, max_rows=128)
    pace.num_decoding = 1
    decoding(pace, 20.0, 40)
    for _ in range(40):
        beside_chunks(pace, 60.0, 1)
        beside_chunks(pace, 45.0, 24)
    assert pace.num_in_flight(12) == 4


def test_the_time_without_chunks_is_that_of_as_many_sessions() -> None:
    pace = PrefillPace(2, max_rows=128)
    pace.num_decoding = 1
    decoding(pace, 20.0, 40)
    # With eight of them a window takes longer, chunks or not: nothing is held against that.
    pace.num_decoding = 8
    beside_chunks(pace, 80.0, 100)
    assert pace.num_in_flight(12) == 4
    decoding(pace, 80.0, 100)
    beside_chunks(pace, 210.0, 100)
    assert pace.num_in_flight(12) == 1


def test_chunks_of_other_cost_tell_what_others_were_beside_and_nothing_of_rows() -> None:
    """As those of a picture, or whose every row is scored."""
    pace, other = PrefillPace(2, max_rows=128), PrefillPace(2, max_rows=128)
    for each in (pace, other):
        each.num_decoding = 1
        decoding(each, 20.0, 40)
        beside_chunks(each, 45.0, 10)
    for _ in range(100):
        pace.learn_chunk([StageMeasure(16, 0.0, 160.0)] * 2, elapsed_ms=330.0, is_typical=False)
        decoding(pace, 45.0, 8)
    assert pace.rows(2048) == other.rows(2048) == 12
    for each in (pace, other):
        beside_chunks(each, 60.0, 6)
    assert pace.num_in_flight(12) == other.num_in_flight(12) == 2
