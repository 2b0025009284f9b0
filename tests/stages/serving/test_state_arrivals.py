"""A recurrent state reaches a replica whole, behind its rows, or not at all."""

from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from spanmesh_proto import windows_pb2 as wire
from spanmesh_proto.errors import MeshError, ProtocolError
from stages.certification.certify import cut_stage
from stages.layers import LayerRange
from stages.runtime.spans import Span
from stages.runtime.stage_runtime import RuntimeOptions, StageRuntime
from stages.serving.slot_replication import ReplicationCursor, SlotReplication, StateArrivals, state_messages
from stages.serving.slots import KvSlots
from tests.support.tiny_families import TINY_FAMILIES

TEXT = tuple(range(20, 90))
OPTIONS = RuntimeOptions(num_slots=2, ctx_size=128, exact=True, num_checkpoints=3)


def test_a_state_in_parts_is_put_together() -> None:
    state = np.arange(100, dtype=np.uint8)
    messages = state_messages(1, 5, 40, state, 30)
    assert [(one.start, len(one.state), len(one.tokens)) for one in messages] == [
        (40, 30, 0),
        (40, 30, 0),
        (40, 30, 0),
        (40, 10, 0),
    ]
    arrivals = StateArrivals()
    for one in messages[:-1]:
        assert arrivals.add_state(1, one.state, one.num_state_bytes) is None
    whole = arrivals.add_state(1, messages[-1].state, messages[-1].num_state_bytes)
    assert whole is not None
    assert np.array_equal(whole, state)


@pytest.mark.parametrize(("part", "num_bytes"), [(b"123", 2), (b"1", 2**40)])
def test_more_than_was_announced_or_than_any_state_has_is_refused(part: bytes, num_bytes: int) -> None:
    with pytest.raises(ProtocolError, match=f"bytes of a recurrent state of {num_bytes}"):
        StateArrivals().add_state(0, part, num_bytes)


@pytest.fixture
def stage_file(tmp_path: Path) -> Path:
    whole = TINY_FAMILIES["falcon-h1"].write(tmp_path / "whole.gguf")
    cut_stage(whole, LayerRange(0, 1), tmp_path / "stage.gguf")
    return tmp_path / "stage.gguf"


def slots_of(runtime: StageRuntime) -> KvSlots:
    return KvSlots(runtime, 1 << 20)


def compute(slots: KvSlots, start: int, stop: int, checkpoints: tuple[int, ...], num_committed: int) -> None:
    span = Span(1, start, TEXT[start:stop], checkpoints=checkpoints)
    slots.runtime.decode([span])
    slots.computed(span, num_committed)
    slots.sent_on(span, bytes(4 * (stop - start)))


@pytest.mark.model
def test_a_copy_follows_up_to_committed_checkpoints(stage_file: Path) -> None:
    with closing(StageRuntime(stage_file, OPTIONS)) as one, closing(StageRuntime(stage_file, OPTIONS)) as two:
        stage, copy = slots_of(one), slots_of(two)
        stage_rows, copy_rows = SlotReplication(stage), SlotReplication(copy)
        cursor = ReplicationCursor(2)
        stage_rows.attach_cursor(cursor, [])

        def tell(session: int = 5) -> list[tuple[int, int, bool]]:
            news = stage_rows.updates(1, session, cursor, 4)
            for message in news:
                copy_rows.apply_update(message)
            return [(message.start, len(message.tokens), bool(message.state)) for message in news]

        compute(stage, 0, 30, (), 0)
        assert tell() == []
        compute(stage, 30, 40, (30,), 31)
        assert tell() == [(0, 30, False), (30, 0, True)]
        assert tell() == []
        assert two.memory.return_points(1) == (0, 30)
        # A proposal may be rejected: its checkpoint is not told.
        compute(stage, 40, 44, (30, 40), 31)
        assert tell() == []
        compute(stage, 44, 50, (40, 44), 45)
        assert tell() == [(30, 14, False), (44, 0, True)]
        assert two.memory.length(1) == 44
        # The copy takes the stage's place, and goes on at once.
        copy.begin(1, 1, (), 48, 4)
        assert two.memory.length(1) == 44
        same, further = (runtime.decode([Span(1, 44, TEXT[44:50])])[0] for runtime in (two, one))
        assert np.array_equal(same, further)
        # Of another session's beginning.
        stage.begin(1, 1, TEXT[:40], 0, 4)
        assert tell(session=6) == [(40, 0, True)]


@pytest.mark.model
@pytest.mark.parametrize(
    "change",
    [
        {"start": 29},
        {"start": 31},
        {"state": b"no state at all"},
        {"state": b""},
        {"num_state_bytes": 3},
    ],
)
def test_a_state_that_fits_nothing_leaves_the_slot_empty(stage_file: Path, change: dict[str, Any]) -> None:
    with closing(StageRuntime(stage_file, OPTIONS)) as one, closing(StageRuntime(stage_file, OPTIONS)) as two:
        stage, copy = slots_of(one), slots_of(two)
        stage_rows, copy_rows = SlotReplication(stage), SlotReplication(copy)
        cursor = ReplicationCursor(2)
        stage_rows.attach_cursor(cursor, [])
        compute(stage, 0, 30, (), 0)
        compute(stage, 30, 40, (30,), 31)
        rows, state = stage_rows.updates(1, 5, cursor, 4)
        copy_rows.apply_update(rows)
        fields: dict[str, Any] = {
            "slot": 1,
            "session": 5,
            "start": 30,
            "state": state.state,
            "num_state_bytes": state.num_state_bytes,
        }
        if "state" in change:
            fields["num_state_bytes"] = len(change["state"])
        changed = wire.SlotRows(**{**fields, **change})
        if change.get("state") == b"":
            copy_rows.apply_update(changed)
        else:
            with pytest.raises(MeshError):
                copy_rows.apply_update(changed)
        assert two.memory.length(1) == 0
        two.decode([Span(1, 0, TEXT[:9])])
