"""What a stage kept of its hidden states is what it sent, or nothing; and never more than it may keep."""

from hypothesis import given
from hypothesis import strategies as st

from stages.serving.sent_rows import LEAST_SENT_BYTES, SentHiddenStates, max_sent_bytes

NUM_SLOTS = 3
ROW_BYTES = 4

steps = st.lists(
    st.one_of(
        st.tuples(
            st.just("keep"),
            st.integers(0, NUM_SLOTS - 1),
            st.integers(0, 6),
            st.binary(min_size=1, max_size=5),
        ),
        st.tuples(st.just("trim"), st.integers(0, NUM_SLOTS - 1), st.integers(0, 8), st.just(b"")),
        st.tuples(
            st.just("copy"),
            st.integers(0, NUM_SLOTS - 1),
            st.integers(0, 8),
            st.sampled_from([b"0", b"1", b"2"]),
        ),
    ),
    max_size=40,
)


@given(steps, st.integers(0, 60))
def test_rows_are_found_as_they_left_or_not_at_all(
    steps: list[tuple[str, int, int, bytes]], most_bytes: int
) -> None:
    sent = SentHiddenStates(NUM_SLOTS, most_bytes)
    # What left for each slot, by position, up to where it was cut off.
    truth: list[list[bytes]] = [[] for _ in range(NUM_SLOTS)]
    for kind, slot, number, data in steps:
        if kind == "keep":
            start = min(number, len(truth[slot]))
            rows = [bytes([value]) * ROW_BYTES for value in data]
            sent.keep(slot, start, b"".join(rows), ROW_BYTES)
            truth[slot] = truth[slot][:start] + rows
        elif kind == "trim":
            sent.trim(slot, number)
            truth[slot] = truth[slot][:number]
        elif int(data) != slot:
            sent.copy(int(data), slot, number)
            truth[slot] = truth[int(data)][:number]
        kept = 0
        for each, rows in enumerate(truth):
            held = [at for at in range(len(rows)) if sent.find(each, at, 1, ROW_BYTES) is not None]
            assert held == list(range(len(held))), "a gap"
            if held:
                assert sent.find(each, 0, len(held), ROW_BYTES) == b"".join(rows[: len(held)])
            kept += len(held) * ROW_BYTES
        assert sent.num_bytes == kept <= most_bytes


def test_whoever_sent_last_is_kept_and_the_others_make_room() -> None:
    sent = SentHiddenStates(NUM_SLOTS, 4 * ROW_BYTES)
    for slot, byte in ((0, b"a"), (1, b"b"), (2, b"c"), (0, b"d"), (1, b"e")):
        sent.keep(slot, 1 if byte in b"de" else 0, byte * ROW_BYTES, ROW_BYTES)
    assert sent.find(2, 0, 1, ROW_BYTES) is None
    assert sent.find(0, 0, 2, ROW_BYTES) == b"aaaadddd"
    assert sent.find(1, 0, 2, ROW_BYTES) == b"bbbbeeee"


def test_rows_of_another_wire_type_are_no_use() -> None:
    sent = SentHiddenStates(1, 1000)
    sent.keep(0, 0, b"abcdefgh", 4)
    assert sent.find(0, 0, 2, 2) is None
    assert sent.find(0, 0, 2, 4) == b"abcdefgh"
    sent.keep(0, 2, b"ab", 2)
    assert sent.find(0, 0, 1, 4) is None
    assert sent.num_bytes == 0


def test_there_is_room_for_a_share_of_the_cache() -> None:
    assert max_sent_bytes(0) == LEAST_SENT_BYTES
    assert max_sent_bytes(64 * LEAST_SENT_BYTES) == 2 * LEAST_SENT_BYTES
