"""What a ring's times add up to."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mesh.forecast.cost_model import (
    HANDLING_MS,
    StageForecast,
    forecast,
    parts_to_profile,
    position_ms,
    rows_ms,
    stage_timing,
)
from mesh.placement.host_capacity import HostCapacity
from mesh.placement.memory_estimate import StageSizes
from mesh.placement.planner import plan
from stages.host.profile_request import StageTiming
from stages.layers import LayerRange
from tests.mesh.placement.test_planner import MIB, WORKLOAD, model

TIMING = StageTiming(row_ms=2.0, chunk_ms=65.0, chunk_rows=64)


def hops(source: str, target: str) -> float:
    return 0.0 if source == target else 5.0


def test_a_token_visits_every_stage_and_crosses_every_link() -> None:
    stages = [StageForecast(host, TIMING) for host in ("a", "b", "c")]
    found = forecast(stages, "head", hops, prompt_tokens=1, most_positions=2048)
    assert (found.compute_ms, found.wire_ms) == (6.0, 20.0)
    assert found.handling_ms == pytest.approx(4 * HANDLING_MS)
    assert found.tokens_per_s == pytest.approx(1e3 / (26 + 4 * HANDLING_MS))
    # A prompt of one token takes as long as a token.
    assert found.ttft_ms == pytest.approx(found.token_ms)


def test_the_heads_own_stage_is_no_hop_away() -> None:
    assert (
        forecast([StageForecast("a", TIMING)], "a", hops, prompt_tokens=1, most_positions=2048).wire_ms == 0.0
    )


def test_chunks_of_a_prompt_follow_one_another_through_the_stages() -> None:
    slow = StageTiming(row_ms=4.0, chunk_ms=130.0, chunk_rows=64)
    stages = [StageForecast("a", TIMING), StageForecast("b", slow)]
    one = forecast(stages, "head", hops, prompt_tokens=64, most_positions=2048).ttft_ms
    three = forecast(stages, "head", hops, prompt_tokens=192, most_positions=2048).ttft_ms
    assert one == pytest.approx(65 + 130 + 15 + 3 * HANDLING_MS)
    assert three == pytest.approx(one + 2 * 130)


def test_positions_cost_tokens_and_prompts() -> None:
    stages = [StageForecast(host, TIMING, position_ms=0.001) for host in ("a", "b")]
    found = forecast(stages, "head", hops, prompt_tokens=1, most_positions=8000)
    assert found.last_token_ms == pytest.approx(found.token_ms + 2 * 0.001 * 8000)
    assert found.ttft_ms == pytest.approx(found.token_ms)
    few, none = (
        forecast([StageForecast("a", TIMING, each)], "a", hops, prompt_tokens=6400, most_positions=8000)
        for each in (0.001, 0.0)
    )
    # Each row reads half of the prompt.
    assert few.ttft_ms - none.ttft_ms == pytest.approx(0.65 * 0.001 * 6400 * 3199.5)


def test_what_a_position_costs_follows_caches_speeds_and_kernels() -> None:
    sizes = StageSizes(model(layer_mib=10), WORKLOAD)
    own = HostCapacity("a", 4000 * MIB, 20.0, attention_version=116)
    hosts = (own, replace(own, name="b", attention_version=0), replace(own, name="c", speed_gb_per_s=10.0))
    placed = plan(sizes.model, hosts, WORKLOAD, split=(10, 10, 10)).stages
    costs_ms = [position_ms(sizes, stage, host) for stage, host in zip(placed, hosts, strict=True)]
    values = sum(sizes.model.kv_widths[:10])
    assert costs_ms == pytest.approx([2 * values / each / 1e6 for each in (0.45 * 20, 0.15 * 20, 0.45 * 10)])


@given(st.integers(1, 64))
def test_rows_lie_between_one_and_a_full_window(num_rows: int) -> None:
    assert 2.0 <= rows_ms(TIMING, num_rows) <= 65.0


def test_a_small_stage_is_timed_as_it_is() -> None:
    sizes = StageSizes(model(layer_mib=10), WORKLOAD)
    parts = parts_to_profile(sizes, LayerRange(0, 10))
    assert [(part.layers, part.times) for part in parts] == [(LayerRange(0, 10), 1.0)]


def test_of_a_large_one_a_part_stands_for_all_and_the_head_for_itself() -> None:
    sizes = StageSizes(model(layer_mib=100, head_mib=300), WORKLOAD)
    (body,) = parts_to_profile(sizes, LayerRange(0, 10))
    assert body.layers == LayerRange(0, 5)
    assert body.times == pytest.approx(2.0)
    parts = parts_to_profile(sizes, LayerRange(10, 30))
    assert [part.layers for part in parts] == [LayerRange(10, 15), LayerRange(29, 30)]
    assert [part.times for part in parts] == pytest.approx([19 / 5, 1.0])
    timings = {part.layers: TIMING for part in parts}
    assert stage_timing(parts, timings).row_ms == pytest.approx(2.0 * (19 / 5 + 1))


def test_a_model_that_cannot_be_cut_is_timed_whole() -> None:
    sizes = StageSizes(model(layer_mib=100, cuts=()), WORKLOAD)
    (part,) = parts_to_profile(sizes, LayerRange(0, 30))
    assert (part.layers, part.times) == (LayerRange(0, 30), 1.0)


@given(st.integers(0, 28), st.integers(1, 30), st.integers(1, 2000))
def test_parts_never_stand_for_less_than_the_stage_reads(start: int, length: int, most_mib: int) -> None:
    sizes = StageSizes(model(layer_mib=50, head_mib=70), WORKLOAD)
    layers = LayerRange(start, min(30, start + length))
    parts = parts_to_profile(sizes, layers, most_mib * MIB)
    read = sum(part.times * sizes.read_bytes(part.layers) for part in parts)
    assert read == pytest.approx(sizes.read_bytes(layers))
