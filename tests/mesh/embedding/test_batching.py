"""Batches hold what fits, clients take turns, and what failed is tried alone."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from mesh.embedding.engine import BatchPart, TextQueue, TextsRequest, texts_of
from stages.embedding.model_file import BatchLimits

LIMITS = BatchLimits(longest=600, most_texts=4)


def texts(*lengths: int) -> list[tuple[int, ...]]:
    return [tuple(range(length)) for length in lengths]


def queue_of(*requests: TextsRequest, limits: BatchLimits = LIMITS) -> TextQueue:
    queue = TextQueue(limits, 100)
    for request in requests:
        queue.add(request)
    return queue


def shares(batch: list[BatchPart]) -> list[tuple[str | None, tuple[int, ...]]]:
    return [(part.request.client, part.indices) for part in batch]


def test_texts_share_a_batch_up_to_its_rows_and_a_long_one_goes_alone() -> None:
    queue = queue_of(TextsRequest(texts(200, 300, 100, 600, 5), "a"))
    assert [shares(queue.next_batch()) for _ in range(4)] == [
        [("a", (0, 1))],
        [("a", (2,))],
        [("a", (3,))],
        [("a", (4,))],
    ]
    assert queue.next_batch() == []
    assert len(queue) == 0


def test_a_batch_has_as_many_texts_as_are_allowed_of_all_requests() -> None:
    queue = queue_of(TextsRequest(texts(1, 1, 1), "a"), TextsRequest(texts(1, 1, 1), "b"))
    first = queue.next_batch()
    assert shares(first) == [("a", (0, 1, 2)), ("b", (0,))]
    assert texts_of(first) == texts(1, 1, 1, 1)
    assert shares(queue.next_batch()) == [("b", (1, 2))]


def test_clients_take_turns_however_many_texts_one_has() -> None:
    queue = queue_of(TextsRequest(texts(*[100] * 20), "a"), TextsRequest(texts(100, 100), "b"))
    assert shares(queue.next_batch()) == [("a", (0, 1, 2, 3))]
    assert shares(queue.next_batch()) == [("b", (0, 1)), ("a", (4, 5))]
    assert shares(queue.next_batch()) == [("a", (6, 7, 8, 9))]


def test_what_failed_is_tried_again_first_and_alone() -> None:
    one, two = TextsRequest(texts(1, 1), "a"), TextsRequest(texts(1), "b")
    queue = queue_of(one, two)
    failed = queue.next_batch()
    assert len(queue) == 0
    queue.put_back(failed)
    queue.add(TextsRequest(texts(1), "c"))
    assert [shares(queue.next_batch()) for _ in range(3)] == [[("a", (0, 1))], [("b", (0,))], [("c", (0,))]]
    assert (one.num_failures, two.num_failures) == (1, 1)


def test_a_request_that_failed_is_not_kept_waiting_by_one_that_never_ends() -> None:
    suspect, endless = TextsRequest(texts(1), "s"), TextsRequest(texts(*[300] * 50), "e")
    suspect.num_failures = 1
    queue = queue_of(endless, suspect)
    assert shares(queue.next_batch())[0][0] == "e"
    assert ("s", (0,)) in [part for _ in range(2) for part in shares(queue.next_batch())]


def test_what_is_discarded_is_in_no_batch() -> None:
    one, two = TextsRequest(texts(1), "a"), TextsRequest(texts(1), "a")
    queue = queue_of(one, two)
    queue.discard(one)
    queue.discard(one)
    assert shares(queue.next_batch()) == [("a", (0,))]
    queue.discard(two)
    assert queue.next_batch() == []


@given(
    requests=st.lists(
        st.tuples(st.sampled_from("abc"), st.lists(st.integers(1, 600), min_size=1, max_size=12)), max_size=8
    ),
    failing=st.sets(st.integers(0, 6)),
)
def test_every_text_is_in_a_batch_that_fits(requests: list[tuple[str, list[int]]], failing: set[int]) -> None:
    made = [TextsRequest(texts(*lengths), client) for client, lengths in requests]
    queue, seen, number = queue_of(*made), Counter[tuple[int, int]](), 0
    while batch := queue.next_batch():
        rows = [len(text) for text in texts_of(batch)]
        assert len(rows) <= LIMITS.most_texts
        assert sum(rows) <= LIMITS.shared_rows or len(rows) == 1
        assert sum(rows) <= LIMITS.most_rows
        assert len(batch) == 1 or not any(part.request.num_failures for part in batch)
        if number in failing:
            queue.put_back(batch)
        else:
            seen.update((made.index(part.request), index) for part in batch for index in part.indices)
        number += 1
    assert seen == Counter(
        {(which, index): 1 for which, request in enumerate(made) for index in range(len(request.texts))}
    )
