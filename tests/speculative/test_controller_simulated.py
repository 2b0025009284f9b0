"""The controller in a simulated ring: never worse than plain decoding, near the best fixed setting."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Final

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from speculative.controller import ControllerOptions, SharedMeasures
from tests.support.ring_simulator import RingShape, Text, simulate
from tests.support.simulated_texts import (
    NUM_POSITIONS,
    alternating,
    boasted,
    collapsing,
    drafted,
    known,
    looked_up,
    mistaken,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

# Rows cost nearly their number on a CPU, next to nothing on a GPU.
STEEP: Final = (4.0, 7.5, 10.4, 12.8, 16.8, 19.2)
FLAT: Final = (4.0, 4.2, 4.4, 4.6, 4.8, 5.0)
FLOOR: Final = 0.97

rings = pytest.mark.parametrize("one_way_ms", [0.1, 5.0, 20.0])
hosts = pytest.mark.parametrize("num_cores", [2, None], ids=["shared", "apart"])


def ratio_to_plain(
    shape: RingShape,
    texts: Sequence[Text],
    options: ControllerOptions | None = None,
    shared: SharedMeasures | None = None,
) -> float:
    """Tokens per second of sessions one after the other, over plain decoding."""
    shared = shared or SharedMeasures()
    options = options or ControllerOptions()
    plain_ms = sum(simulate(shape, [text], options=None).elapsed_ms for text in texts)
    return plain_ms / sum(
        simulate(shape, [text], options=options, shared=shared).elapsed_ms for text in texts
    )


@rings
@hosts
@pytest.mark.parametrize(
    "text",
    [
        boasted(random.Random(1), 0.9, 0.0),
        boasted(random.Random(2), 0.9, 0.3),
        boasted(random.Random(3), 0.3, 0.0),
        collapsing(10),
        collapsing(40),
        alternating(1, 1),
        alternating(3, 3),
        alternating(10, 10),
        alternating(4, 20),
        mistaken(8, 0),
        mistaken(16, 1),
        looked_up(random.Random(4), 0.1, 0.2, 4),
        Text(),
    ],
    ids=[
        "never", "rarely", "modest", "collapse 10", "collapse 40", "1-1", "3-3", "10-10", "4-20",
        "lookup never", "lookup one", "lookup rare", "silence",
    ],
)  # fmt: skip
def test_it_is_never_much_slower_than_plain_decoding(
    one_way_ms: float, num_cores: int | None, text: Text
) -> None:
    shape = RingShape(one_way_ms=one_way_ms, num_cores=num_cores)
    assert ratio_to_plain(shape, [text]) >= FLOOR


# A measured bound, not a law: the same examples each time, or it would fail some day for want of luck alone.
@settings(max_examples=100, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
@given(
    drafts=st.lists(
        st.tuples(st.floats(0.0, 1.0), st.booleans(), st.integers(1, 40)), min_size=1, max_size=12
    ),
    one_way_ms=st.sampled_from([0.1, 1.0, 5.0, 20.0]),
    num_cores=st.sampled_from([2, None]),
    stairs=st.sampled_from([STEEP, FLAT]),
    draft_ms=st.floats(0.5, 15.0),
)
def test_no_process_of_acceptance_makes_it_slower(
    drafts: list[tuple[float, bool, int]],
    one_way_ms: float,
    num_cores: int | None,
    stairs: tuple[float, ...],
    draft_ms: float,
) -> None:
    """Stretches of text, each with its own confidence and its own truth."""
    places = [(sure, right) for sure, right, length in drafts for _ in range(length)]
    text = Text(drafts=(places * NUM_POSITIONS)[:NUM_POSITIONS])
    shape = RingShape(staircase_ms=stairs, one_way_ms=one_way_ms, num_cores=num_cores, draft_ms=draft_ms)
    assert ratio_to_plain(shape, [text]) >= FLOOR


def best_fixed(shape: RingShape, text: Text) -> float:
    return max(
        ratio_to_plain(shape, [text], ControllerOptions(fixed_width=width, fixed_depth=depth))
        for width in (1, 4, 16)
        for depth in (1, 4, 16)
    )


@rings
@hosts
@pytest.mark.parametrize(
    ("stairs", "text"),
    [
        (STEEP, drafted(random.Random(12), 0.8)),
        (STEEP, drafted(random.Random(13), 0.95)),
        (STEEP, looked_up(random.Random(14), 0.1, 0.97, 24)),
        (STEEP, known(16)),
        (FLAT, known(16)),
    ],
    ids=["draft 0.8", "draft 0.95", "lookup", "replay", "replay flat"],
)
def test_it_comes_near_the_best_fixed_setting(
    one_way_ms: float, num_cores: int | None, stairs: tuple[float, ...], text: Text
) -> None:
    shape = RingShape(staircase_ms=stairs, one_way_ms=one_way_ms, num_cores=num_cores)
    shared = SharedMeasures()
    ratio_to_plain(shape, [text], shared=shared)  # a server has answered before
    # On a quick wire a mistake early in a short answer costs the account's trust for a good part of it.
    share = 0.9 if one_way_ms >= 5.0 else 0.75
    assert ratio_to_plain(shape, [text], shared=shared) >= share * max(1.0, best_fixed(shape, text))


def test_cold_text_costs_nothing() -> None:
    """Without a proposal worth a row, what is sent is what plain decoding sends."""
    for text in (Text(), looked_up(random.Random(1), 0.5, 0.0, 4)):
        run = simulate(RingShape(), [text], options=ControllerOptions())
        assert run.sessions[0].num_rows <= 1.05 * 128


@pytest.mark.parametrize("num_sessions", [2, 4, 8])
@pytest.mark.parametrize("acceptance", [0.0, 0.8, 0.95])
@hosts
def test_several_sessions_lose_nothing_in_total(
    num_sessions: int, acceptance: float, num_cores: int | None
) -> None:
    shape = RingShape(one_way_ms=5.0, num_cores=num_cores)
    rng = random.Random(5)
    texts = [looked_up(rng, 0.3, acceptance, 8) for _ in range(num_sessions)]
    plain = simulate(shape, texts, options=None).tokens_per_s
    shared = SharedMeasures()
    first = simulate(shape, texts, options=ControllerOptions(), shared=shared).tokens_per_s
    second = simulate(shape, texts, options=ControllerOptions(), shared=shared).tokens_per_s
    assert min(first, second) >= FLOOR * plain


def test_several_sessions_that_gain_do_gain() -> None:
    shape = RingShape(one_way_ms=20.0)
    texts = [known(8) for _ in range(4)]
    plain = simulate(shape, texts, options=None).tokens_per_s
    shared = SharedMeasures()
    simulate(shape, texts, options=ControllerOptions(), shared=shared)
    assert simulate(shape, texts, options=ControllerOptions(), shared=shared).tokens_per_s > 2.0 * plain
