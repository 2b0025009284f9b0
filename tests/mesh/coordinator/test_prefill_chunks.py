"""How a prompt is cut into chunks, alone and among others."""

from hypothesis import given
from hypothesis import strategies as st

from mesh.coordinator.prefill_pace import PrefillPace
from speculative.outcome import StageMeasure


def chunks(pace: PrefillPace, num_tokens: int) -> list[int]:
    left, found = num_tokens, []
    while left:
        found.append(min(left, pace.rows(num_tokens)))
        left -= found[-1]
    return found


@given(num_tokens=st.integers(1, 5000), num_stages=st.integers(1, 6), max_rows=st.integers(1, 128))
def test_chunks_are_even_and_fit(num_tokens: int, num_stages: int, max_rows: int) -> None:
    sizes = chunks(PrefillPace(num_stages, max_rows), num_tokens)
    assert sum(sizes) == num_tokens
    assert max(sizes) <= max_rows
    # As even as whole tokens allow, but where one stage has nothing to wait for.
    if num_stages > 1:
        assert max(sizes) - min(sizes) < len(sizes)


def test_alone_a_prompt_keeps_every_stage_busy() -> None:
    pace = PrefillPace(num_stages=3, max_rows=128)
    assert chunks(pace, 768) == [64] * 12
    assert chunks(pace, 2048) == [128] * 16
    # Not in crumbs.
    assert chunks(pace, 150) == [75, 75]
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
    assert pace.rows(2048) == 15
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


def test_a_replay_is_not_held_up_by_those_whose_answers_go_on() -> None:
    pace = PrefillPace(3, max_rows=512)
    alone = pace.rows(600)
    pace.num_decoding = 5
    assert pace.rows(600) < alone
    assert pace.rows(600, is_replay=True) == alone
