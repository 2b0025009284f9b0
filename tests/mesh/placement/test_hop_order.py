"""The order of the stages that makes a token's round shortest."""

from itertools import permutations, product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mesh.placement.link_choices import LEAST_GAIN, best_order, round_ms

NAMES = tuple("abcdefghijkl")


@st.composite
def distances(draw: st.DrawFn, most: int) -> tuple[tuple[str, ...], str, dict[tuple[str, str], float]]:
    """Hosts, the head (one of them at times), and one-way times, not the same in both directions."""
    hosts = NAMES[: draw(st.integers(1, most))]
    head = draw(st.sampled_from([*hosts, "head"]))
    pairs = product(sorted({*hosts, head}), repeat=2)
    times = {(a, b): 0.0 if a == b else draw(st.floats(0.1, 100.0)) for a, b in pairs}
    return hosts, head, times


@given(distances(6))
def test_no_order_is_clearly_shorter(
    found: tuple[tuple[str, ...], str, dict[tuple[str, str], float]],
) -> None:
    hosts, head, times = found

    def hop_ms(a: str, b: str) -> float:
        return times[a, b]

    best = best_order(hosts, head, hop_ms)
    assert sorted(best) == sorted(hosts)
    best_ms = round_ms(best, head, hop_ms)
    shortest_ms = min(round_ms(order, head, hop_ms) for order in permutations(hosts))
    if best != hosts:
        assert best_ms == pytest.approx(shortest_ms)
    assert best_ms * (1 - LEAST_GAIN) <= shortest_ms + 1e-9


@settings(max_examples=20)
@given(st.permutations(range(12)))
def test_many_hosts_on_a_line_are_visited_there_and_back(places: list[int]) -> None:
    at = {name: float(place) for name, place in zip(NAMES, places, strict=True)} | {"head": -1.0}

    def hop_ms(a: str, b: str) -> float:
        return abs(at[a] - at[b])

    best = best_order(NAMES, "head", hop_ms)
    # The far end is 12 away, so no round is shorter than 24; one that turns back too often is longer.
    assert sorted(best) == sorted(NAMES)
    assert round_ms(best, "head", hop_ms) <= 24.0 / (1 - LEAST_GAIN) + 1e-9


@given(st.permutations(list(NAMES[:8])), st.floats(0.1, 50.0))
def test_the_order_in_which_hosts_came_is_kept_where_nothing_speaks_against_it(
    hosts: list[str], hop: float
) -> None:
    assert best_order(hosts, "head", lambda a, b: 0.0 if a == b else hop) == tuple(hosts)


def test_one_distant_pair_is_not_made_neighbours() -> None:
    slow = {frozenset("ab")}

    def hop_ms(a: str, b: str) -> float:
        return 50.0 if frozenset((a, b)) in slow else 5.0

    best = best_order(("a", "b", "c"), "head", hop_ms)
    assert best[1] == "c"
    assert round_ms(best, "head", hop_ms) == 20.0
    assert best_order((), "head", hop_ms) == ()
