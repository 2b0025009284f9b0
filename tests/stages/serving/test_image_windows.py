"""Images that break the rules of the protocol: each fails its session alone, and the stages go on."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import numpy as np
import pytest

from spanmesh_proto import windows_pb2 as wire
from spanmesh_proto.row_ids import FIRST_ROW_ID
from stages.runtime.stage_runtime import RuntimeOptions
from stages.sampling.session_spec import SessionSpec, chunk_to_wire
from stages.serving.image_input import ImageInput
from tests.stages.serving.test_stage_server import Peer
from tests.support.fake_stage import FakeRuntime
from tests.support.ring_harness import RunningStage, running_stages
from tests.support.tiny_vision import (
    MOST_AT_ONCE,
    Part,
    WholeModel,
    chunks_of,
    image,
    positions_of,
    prompt_of,
    text,
    write_vision,
)

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence
    from pathlib import Path

pytestmark = pytest.mark.model
OPTIONS: Final = RuntimeOptions(num_slots=2, ctx_size=128, exact=True, most_at_once=MOST_AT_ONCE)
PARTS: Final = {
    # Rows 4 to 15, in three lines of four, or seen at once.
    name: [text(1, 4), image(name, 5, 3, 4), text(2, 3)]
    for name in ("qwen3vl", "gemma3")
}
IDS: Final = {name: PARTS[name][1].ids for name in PARTS}


@pytest.fixture(name="name", params=["qwen3vl", "gemma3"])
def _name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(name="stages")
async def _stages(name: str, tmp_path: Path) -> AsyncIterator[list[RunningStage]]:
    model = write_vision(name, tmp_path / "model.gguf")
    async with running_stages(model, (3,), OPTIONS, tmp_path / "cache") as running:
        yield running


def opening(name: str, session: int, slot: int, **changes: Any) -> wire.Open:
    message = wire.Open(
        session=session,
        slot=slot,
        sampling=wire.Sampling(top_p=1, repetition_penalty=1),
        num_prompt_tokens=len(prompt_of(PARTS[name])),
        images=map(chunk_to_wire, chunks_of(PARTS[name])),
    )
    for field, value in changes.items():
        message.ClearField(field)
        if isinstance(value, list):
            getattr(message, field).extend(value)
        else:
            setattr(message, field, value)
    return message


def rows_of(part: Part) -> bytes:
    assert part.rows is not None
    return part.rows.tobytes()


async def answer(peer: Peer, name: str, session: int, slot: int) -> list[int]:
    """The first token behind the prompt, by windows that keep to the rules."""
    await peer.link.write(wire.Frame(open=opening(name, session, slot)))
    start = 0
    for number, part in enumerate(PARTS[name]):
        rows = b"" if part.rows is None else rows_of(part)
        is_last = number == len(PARTS[name]) - 1
        await peer.window(
            session=session, id=number, start=start, tokens=part.ids, rows=rows, verify_rows=int(is_last)
        )
        start += len(part.ids)
    tokens: Sequence[int] = ()
    for _ in PARTS[name]:
        verdict = await peer.verdict()
        assert verdict.session == session
        tokens = verdict.tokens
    return list(tokens)


def expected(name: str, tmp_path: Path) -> list[int]:
    whole = WholeModel(tmp_path / "model.gguf", OPTIONS)
    (logits,) = whole.logits(PARTS[name], ())
    whole.close()
    return [int(np.argmax(logits))]


def chunk(first_row: int, num_rows: int, columns: int = 0) -> wire.ImageChunk:
    return wire.ImageChunk(first_row=first_row, num_rows=num_rows, columns=columns)


BAD_SESSIONS: Final[list[tuple[dict[str, Any], str]]] = [
    ({"images": [chunk(4, 12), chunk(15, 2)]}, "the image at row 15 begins before row 16"),
    ({"images": [chunk(8, 4), chunk(4, 2)]}, "begins before row 12"),
    ({"images": [chunk(4, 12, 13)]}, "do not fit"),
    ({"images": [chunk(4, 12, 5)]}, "do not fit"),
    ({"images": [chunk(4, 0)]}, "do not fit"),
    ({"images": [chunk(4, 16)]}, "ends at row 20 of a prompt of 19"),
    (
        {"images": [chunk(4, 2**32 - 1)], "num_prompt_tokens": 2**32 - 1},
        "past the last position",
    ),
    ({"cached_tokens": [5, 5, 5, 5, 5]}, "row 4 of a session is a token"),
    ({"cached_tokens": [5, FIRST_ROW_ID]}, "row 1 of a session is no token"),
    ({"images": [], "cached_tokens": [5, FIRST_ROW_ID]}, "row 1 of a session is no token"),
]


async def test_a_session_whose_images_cannot_be_is_refused(
    name: str, stages: list[RunningStage], tmp_path: Path
) -> None:
    async with Peer(stages) as peer:
        for session, (changes, reason) in enumerate(BAD_SESSIONS, 1):
            await peer.link.write(wire.Frame(open=opening(name, session, 0, **changes)))
            failure = await peer.failure()
            assert (failure.session, failure.code) == (session, "invalid_window")
            assert reason in failure.message
        assert await answer(peer, name, 99, 0) == expected(name, tmp_path)


def windows(name: str) -> dict[str, tuple[dict[str, Any], str]]:
    ids, rows = IDS[name], rows_of(PARTS[name][1])
    size = len(rows) // 12
    is_whole = name == "gemma3"
    return {
        "no rows": ({"tokens": ids}, "is outside the vocabulary"),
        "rows are missing": ({"tokens": ids, "rows": rows[:-4]}, f"brings {len(rows) - 4} bytes for 12 rows"),
        "rows too many": ({"tokens": ids, "rows": rows + rows[:size]}, "bytes for 12 rows"),
        "rows of tokens": (
            {"start": 0, "tokens": [5, 6], "rows": rows[: 2 * size]},
            "rows of an image for tokens",
        ),
        "tokens in the image": ({"tokens": [5] * 12}, "has tokens where its session has an image"),
        "an image in the text": (
            {"start": 0, "tokens": ids[:4], "rows": rows[: 4 * size]},
            "has tokens where its session has an image, or the opposite",
        ),
        "both": ({"start": 2, "tokens": [5, 6, *ids[:2]]}, "or the opposite"),
        "beyond its end": (
            {"tokens": [*ids, ids[0]], "rows": rows + rows[:size]},
            "divides the image of rows 4 to 16",
        ),
        "a part": (
            {"tokens": ids[:5], "rows": rows[: 5 * size], "verify_rows": 6},
            "divides the image of rows 4 to 16" if is_whole else "6 rows to verify in a window of 5",
        ),
        "not finite": (
            {"tokens": ids, "rows": np.full(len(rows) // 4, np.nan, "<f4").tobytes()},
            "not finite",
        ),
    }


async def test_a_window_that_breaks_the_rules_fails_its_session(
    name: str, stages: list[RunningStage], tmp_path: Path
) -> None:
    wanted = expected(name, tmp_path)
    async with Peer(stages) as peer:
        for number, (kind, (fields, reason)) in enumerate(windows(name).items()):
            session, slot = 3 * number + 1, number % 2
            await peer.link.write(wire.Frame(open=opening(name, session, slot)))
            await peer.window(session=session, id=0, start=0, tokens=PARTS[name][0].ids)
            await peer.verdict()
            await peer.window(**{"session": session, "id": 1, "start": 4, **fields})
            failure = await peer.failure()
            assert (failure.session, failure.window_id) == (session, 1), kind
            assert reason in failure.message, kind
            for later, other in ((session + 1, 1 - slot), (session + 2, slot)):
                assert await answer(peer, name, later, other) == wanted, kind


async def test_a_slot_does_not_go_back_into_an_image(
    name: str, stages: list[RunningStage], tmp_path: Path
) -> None:
    """Neither by a window nor by what a session begins with."""
    ids, rows = IDS[name], rows_of(PARTS[name][1])
    size = len(rows) // 12
    async with Peer(stages) as peer:
        assert await answer(peer, name, 1, 0) == expected(name, tmp_path)
        await peer.window(session=1, id=3, start=7, tokens=ids[3:], rows=rows[3 * size :])
        failure = await peer.failure()
        assert (failure.session, failure.code) == (1, "invalid_window")
        cached = [*PARTS[name][0].ids, *ids[:3]]
        await peer.link.write(wire.Frame(open=opening(name, 2, 0, cached_tokens=cached)))
        failure = await peer.failure()
        assert (failure.session, failure.code) == (2, "prefix_mismatch")
        # The same rows in other lines are not what the slot holds.
        assert await answer(peer, name, 3, 0) == expected(name, tmp_path)
        cached = [*PARTS[name][0].ids, *ids]
        turned = [chunk(4, 12, 2) if name == "qwen3vl" else chunk(4, 12)]
        await peer.link.write(wire.Frame(open=opening(name, 4, 0, cached_tokens=cached, images=turned)))
        failure = await peer.failure()
        assert (failure.session, failure.code) == (4, "prefix_mismatch")
        assert "has rows that are no tokens elsewhere, behind the first 4" in failure.message


@pytest.mark.parametrize("takes", [True, False])
@pytest.mark.parametrize("hands_on", [True, False])
def test_rows_go_to_the_stages_that_take_them_and_no_further(*, takes: bool, hands_on: bool) -> None:
    runtime = FakeRuntime(1, 3)
    runtime.takes_rows, runtime.hands_on_rows = takes, hands_on
    rows = np.array([[1.5], [2.5]], np.float32)
    window = wire.Window(start=4, tokens=[FIRST_ROW_ID, FIRST_ROW_ID + 1], rows=rows.tobytes())
    found = ImageInput(runtime).input_of(window)  # type: ignore[arg-type]
    assert (found is not None) is takes
    assert found is None or np.array_equal(found, rows)
    assert window.rows == (rows.tobytes() if hands_on else b"")
    assert ImageInput(runtime).input_of(wire.Window(tokens=[5])) is None  # type: ignore[arg-type]


def test_images_of_a_session_pass_the_wire(name: str) -> None:
    spec = SessionSpec(1, 0, num_prompt=19, positions=positions_of(PARTS[name]))
    assert SessionSpec.from_wire(spec.to_wire()) == spec
