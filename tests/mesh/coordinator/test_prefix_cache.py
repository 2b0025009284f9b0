"""Which slot a session takes, and what it begins with."""

from hypothesis import given
from hypothesis import strategies as st

from mesh.coordinator.prefix_cache import PrefixCache, PrefixMatch
from spanmesh_proto.image_chunk import ImageChunk

LONG = tuple(range(100, 140))


def test_a_prompt_begins_with_what_its_slot_holds() -> None:
    prefix_cache = PrefixCache(2)
    prefix_cache.keep(1, "ann", LONG)
    assert prefix_cache.match((*LONG, 7, 8), "ann", {0, 1}) == PrefixMatch(1, 1, 40)


def test_the_last_token_is_left_to_compute() -> None:
    prefix_cache = PrefixCache(1)
    prefix_cache.keep(0, "ann", LONG)
    assert prefix_cache.match(LONG, "ann", {0}) == PrefixMatch(0, 0, 39)


def test_nobody_begins_with_another_client_s_tokens() -> None:
    prefix_cache = PrefixCache(2)
    prefix_cache.keep(1, "ann", LONG)
    for client in ("bob", None):
        assert prefix_cache.match(LONG, client, {0, 1}) == PrefixMatch(0, 0, 0)


def test_what_is_forgotten_of_a_client_is_kept_of_others() -> None:
    prefix_cache = PrefixCache(4)
    for slot, client in enumerate(("ann", "bob", None)):
        prefix_cache.keep(slot, client, LONG)
    prefix_cache.expect(3, "ann", LONG)
    prefix_cache.forget_client("ann")
    assert prefix_cache.match((*LONG, 1), "ann", {0, 3}).num_cached == 0
    assert prefix_cache.match((*LONG, 1), "bob", {1}).num_cached == 40
    assert prefix_cache.match((*LONG, 1), None, {2}).num_cached == 40


def test_no_session_begins_within_a_chunk_but_between_two() -> None:
    """Of images side by side, those before the first that differs are kept."""
    chunks = (ImageChunk(10, 12), ImageChunk(22, 10))
    for num_common, num_cached in ((12, 10), (22, 22), (25, 22), (32, 32), (35, 35)):
        prefix_cache = PrefixCache(1)
        prefix_cache.keep(0, None, LONG)
        prompt = (*LONG[:num_common], 1, 2)
        assert prefix_cache.match(prompt, None, {0}, chunks=chunks).num_cached == num_cached


def test_a_few_tokens_are_not_worth_it() -> None:
    prefix_cache = PrefixCache(1)
    prefix_cache.keep(0, None, LONG)
    assert prefix_cache.match((*LONG[:5], 1, 2), None, {0}) == PrefixMatch(0, 0, 0)


def test_a_common_beginning_is_copied_where_most_would_be_lost() -> None:
    prefix_cache = PrefixCache(3)
    prefix_cache.keep(1, None, LONG)
    assert prefix_cache.match((*LONG[:10], 1, 2), None, {0, 1, 2}) == PrefixMatch(0, 1, 10)
    # What it came from is still whole.
    assert prefix_cache.match((*LONG, 1), None, {1, 2}) == PrefixMatch(1, 1, 40)


def test_a_copy_of_a_long_slot_takes_more_than_a_few_tokens() -> None:
    prefix_cache = PrefixCache(2, context_length=20 * 512)
    prefix_cache.keep(0, None, LONG)
    # Ten tokens are computed in less time than 10,240 positions are copied.
    assert prefix_cache.match((*LONG[:10], 1, 2), None, {1}) == PrefixMatch(1, 1, 0)
    assert prefix_cache.match((*LONG[:19], 1, 2), None, {0, 1}) == PrefixMatch(1, 1, 0)
    assert prefix_cache.match((*LONG[:20], 1, 2), None, {1}) == PrefixMatch(1, 0, 20)
    # In the slot that is used anyhow, nothing is copied, however much of it is lost.
    assert prefix_cache.match((*LONG[:10], 1, 2), None, {0}) == PrefixMatch(0, 0, 10)
    prefix_cache.keep(0, None, LONG)
    # What stays in its slot is not copied.
    prefix_cache.keep(1, None, LONG[:16])
    assert prefix_cache.match((*LONG[:16], 1, 2), None, {1}) == PrefixMatch(1, 1, 16)
    # A shorter beginning there is better than a longer one that is not worth its copy.
    prefix_cache.keep(1, None, LONG[:9])
    assert prefix_cache.match((*LONG[:15], 1, 2), None, {1}) == PrefixMatch(1, 1, 9)


def test_a_slot_in_use_can_be_copied_from() -> None:
    prefix_cache = PrefixCache(2)
    prefix_cache.keep(0, None, LONG)
    assert prefix_cache.match((*LONG, 1), None, {1}) == PrefixMatch(1, 0, 40)


def test_a_slot_that_came_from_disk_may_not_go_back_behind_that() -> None:
    prefix_cache = PrefixCache(3)
    prefix_cache.keep(0, None, LONG, floor=30)
    assert prefix_cache.match((*LONG[:29], 1, 2), None, {1}) == PrefixMatch(1, 1, 0)
    assert prefix_cache.match((*LONG[:30], 1, 2), None, {1}) == PrefixMatch(1, 0, 30, floor=30)
    # A session that begins with it cannot either.
    prefix_cache.expect(1, None, (*LONG, 7, 8), floor=30)
    assert prefix_cache.match((*LONG[:29], 1, 2), None, {2}) == PrefixMatch(2, 2, 0)
    assert prefix_cache.match((*LONG, 7, 8, 9), None, {2}) == PrefixMatch(2, 1, 42, floor=30)


def test_what_came_along_from_another_ring_is_known_as_that() -> None:
    prefix_cache = PrefixCache(3)
    prefix_cache.keep(0, None, LONG, is_carried=True)
    assert prefix_cache.match((*LONG[:30], 1), None, {1}) == PrefixMatch(1, 0, 30, is_carried=True)
    prefix_cache.expect(1, None, (*LONG[:30], 1), is_carried=True)
    assert prefix_cache.match((*LONG[:30], 1, 2), None, {2}) == PrefixMatch(2, 1, 31, is_carried=True)
    # What is computed anew in a slot is not.
    assert prefix_cache.match((1, 2, 3), None, {0}) == PrefixMatch(0, 0, 0)
    prefix_cache.keep(0, None, LONG)
    assert prefix_cache.match((*LONG, 1), None, {0}) == PrefixMatch(0, 0, 40)


def test_what_cannot_be_trimmed_is_taken_up_to_a_return_point() -> None:
    prefix_cache = PrefixCache(2, can_trim=False)
    prefix_cache.keep(1, None, LONG, (12, 25, 40))
    # In use it grows: its return points are not known.
    assert prefix_cache.match((*LONG, 1, 2), None, {0}) == PrefixMatch(0, 0, 0)
    # Most of it is of use: the slot itself goes back.
    assert prefix_cache.match((*LONG[:30], 1, 2), None, {0, 1}) == PrefixMatch(1, 1, 25, (12, 25))
    prefix_cache.keep(1, None, LONG, (12, 40))
    # Little of it is: a copy leaves the rest to others.
    assert prefix_cache.match((*LONG[:30], 1, 2), None, {0, 1}) == PrefixMatch(0, 1, 12, (12,))
    assert prefix_cache.match((*LONG, 1, 2), None, {0, 1}) == PrefixMatch(1, 1, 40, (12,))
    prefix_cache.keep(1, None, LONG)
    assert prefix_cache.match((*LONG, 1, 2), None, {0, 1}) == PrefixMatch(0, 0, 0)


def test_the_slot_used_least_recently_makes_room() -> None:
    prefix_cache = PrefixCache(3)
    for slot in (1, 0, 2):
        prefix_cache.keep(slot, None, [slot] * 20)
    assert prefix_cache.match(LONG, None, {0, 1, 2}).slot == 1
    # It holds nothing that is known until the session says so.
    assert prefix_cache.match([1] * 30, None, {0, 2}).num_cached == 0


def test_what_failed_is_forgotten() -> None:
    prefix_cache = PrefixCache(1)
    prefix_cache.keep(0, None, LONG)
    prefix_cache.forget(0)
    assert prefix_cache.match(LONG, None, {0}) == PrefixMatch(0, 0, 0)


tokens = st.lists(st.integers(0, 2), max_size=24)


@given(
    held=st.dictionaries(st.integers(0, 3), st.tuples(st.sampled_from([None, "ann"]), tokens)),
    prompt=st.lists(st.integers(0, 2), min_size=1, max_size=24),
    client=st.sampled_from([None, "ann"]),
    free=st.sets(st.integers(0, 3), min_size=1),
)
def test_it_never_begins_with_tokens_that_are_not_there(
    held: dict[int, tuple[str | None, list[int]]], prompt: list[int], client: str | None, free: set[int]
) -> None:
    prefix_cache = PrefixCache(4)
    for slot, (whose, those) in held.items():
        prefix_cache.keep(slot, whose, those)
    prefix_match = prefix_cache.match(prompt, client, free)
    assert prefix_match.slot in free
    assert prefix_match.num_cached < len(prompt)
    if prefix_match.num_cached:
        whose, those = held[prefix_match.source_slot]
        assert whose == client
        assert those[: prefix_match.num_cached] == prompt[: prefix_match.num_cached]
