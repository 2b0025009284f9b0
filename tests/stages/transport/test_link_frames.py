"""What a link sends at one go."""

import asyncio

from hypothesis import given
from hypothesis import strategies as st

from spanmesh_proto import windows_pb2 as wire
from stages.transport.stage_link import frames

MOST_BYTES = 64 * 1024

messages = st.lists(
    st.one_of(
        st.builds(wire.Open, session=st.integers(1, 9)),
        st.builds(
            lambda session, size_bytes: wire.Window(session=session, hidden=bytes(size_bytes)),
            st.integers(1, 9),
            st.sampled_from([0, 2304, 30_000, 70_000]),
        ),
    ),
    min_size=1,
    max_size=20,
)


@given(messages)
async def test_everything_leaves_in_order_and_nothing_waits_for_much(
    sent: list[wire.Open | wire.Window],
) -> None:
    waiting: asyncio.Queue[wire.Vocabulary | wire.Open | wire.Window] = asyncio.Queue()
    for message in sent[1:]:
        waiting.put_nowait(message)
    received: list[wire.Open | wire.Window] = []
    was_window_last = False
    last_bytes = 0
    for frame in frames(sent[0], waiting):
        if frame.HasField("open"):
            received.append(frame.open)
            was_window_last = False
            continue
        windows = list(frame.windows.windows)
        size_bytes = sum(len(window.hidden) for window in windows)
        assert len(windows) == 1 or size_bytes <= MOST_BYTES
        # Two in a row are two because they were too large for one.
        assert not was_window_last or last_bytes + len(windows[0].hidden) > MOST_BYTES
        received += windows
        was_window_last, last_bytes = True, size_bytes
    assert received == sent
    assert waiting.empty()
