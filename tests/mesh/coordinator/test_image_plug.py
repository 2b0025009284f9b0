"""Images at the coordinator: rows are loaded as they are needed, kept within bounds, and fail alone."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mesh.coordinator.image_plug import ImagePlug, KeptRows, RowKey
from mesh.coordinator.options import CoordinatorOptions
from mesh.engine import GenerationRequest, RowInput
from spanmesh_proto.errors import InvalidRequest, InvalidWindow, StageFailed
from stages.sampling.sampler import Sampler, SamplingParams
from tests.support.fake_images import FakeImage, Loads, Part, image_answer, inputs_of, prompt_of
from tests.support.fake_stage import FakeRuntime, plain_answer
from tests.support.repairable_ring import RepairableRing, serving
from tests.support.ring_harness import collect, plugs_for

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from mesh.coordinator.coordinator import Coordinator

NUM_TOKENS = 12
IMAGE = FakeImage(1, 4, 8, "lined")
PARTS: list[Part] = [(5, 6, 7), IMAGE, (8, 9), FakeImage(2, 3, 6, "whole"), (4,)]
OPTIONS = CoordinatorOptions(128, 4, FakeRuntime.max_rows, 64, repair_wait_s=30.0, most_crashes=99)


def expected(parts: list[Part]) -> list[int]:
    return image_answer(parts, NUM_TOKENS, Sampler(SamplingParams()).sample)


def request_of(parts: list[Part], loads: Loads) -> GenerationRequest:
    return GenerationRequest(prompt_of(parts), NUM_TOKENS, inputs=inputs_of(parts, loads))


def kept_of(coordinator: Coordinator) -> KeptRows:
    (plug,) = (plug for plug in coordinator._plugs if isinstance(plug, ImagePlug))
    return plug._kept


@pytest.fixture(name="ring")
async def _ring() -> AsyncIterator[RepairableRing]:
    ring = RepairableRing()
    async with asyncio.timeout(60), serving(ring, OPTIONS, plugs=plugs_for()):
        yield ring


async def test_rows_are_kept_for_as_long_as_their_session(ring: RepairableRing) -> None:
    loads, kept = Loads(), kept_of(ring.coordinator)
    parts = ring.coordinator.generate(request_of(PARTS, loads))
    said = list((await anext(parts)).tokens)
    assert kept.num_bytes == 4 * loads.num_rows == 4 * 50
    # A replay takes them from there.
    await ring.kill(1)
    async for part in parts:
        said += part.tokens
    assert (said, loads.num_rows, ring.num_repairs) == (expected(PARTS), 50, 1)
    assert kept.num_bytes == 0


async def test_dropped_rows_are_loaded_again() -> None:
    ring = RepairableRing()
    plugs = [ImagePlug(100) if isinstance(plug, ImagePlug) else plug for plug in plugs_for()]
    async with asyncio.timeout(60), serving(ring, OPTIONS, plugs=plugs):
        loads, kept = Loads(), kept_of(ring.coordinator)
        parts = ring.coordinator.generate(request_of(PARTS, loads))
        said = list((await anext(parts)).tokens)
        assert (loads.num_rows, kept.num_bytes) == (50, 4 * 18)
        await ring.kill(1)
        async for part in parts:
            said += part.tokens
        assert said == expected(PARTS)
        assert loads.num_rows == 50 + 32


@pytest.mark.parametrize(
    ("failing", "kind", "reason"),
    [
        (InvalidRequest("image 1 is a bomb", param="messages"), InvalidRequest, "image 1 is a bomb"),
        (RuntimeError("no memory"), StageFailed, "the image at row 3 could not be encoded: .*no memory"),
        (
            np.zeros((31, 1), np.float32),
            StageFailed,
            r"rows of shape \(31, 1\) for the 32 rows of an image at 3",
        ),
        (np.zeros(32, np.float32), StageFailed, r"rows of shape \(32,\)"),
        (np.zeros((32, 2), np.float32), InvalidWindow, "this model takes 1 values of 4 bytes"),
    ],
)
async def test_an_image_that_cannot_be_loaded_ends_its_answer_alone(
    ring: RepairableRing, failing: Exception | np.ndarray, kind: type[Exception], reason: str
) -> None:
    async def load() -> np.ndarray:
        await asyncio.sleep(0.01)
        if isinstance(failing, Exception):
            raise failing
        return failing

    good = request_of(PARTS, Loads())
    bad = replace(good, inputs=(RowInput(good.inputs[0].chunk, load), good.inputs[1]))
    other = asyncio.ensure_future(collect(ring.coordinator, good))
    with pytest.raises(kind, match=reason):
        await collect(ring.coordinator, bad)
    assert (await other)[0] == expected(PARTS)
    assert (await collect(ring.coordinator, good))[0] == expected(PARTS)
    assert kept_of(ring.coordinator).num_bytes == 0


async def test_rows_of_another_encoder_are_not_kept_under_the_ids_of_an_image(ring: RepairableRing) -> None:
    others = [replace(each, content=7) if isinstance(each, FakeImage) else each for each in PARTS]
    good, other = request_of(PARTS, Loads()), request_of(others, Loads())
    moved = replace(good.inputs[1], load=other.inputs[1].load, is_carried=lambda: True)
    said, _ = await collect(ring.coordinator, replace(good, inputs=(good.inputs[0], moved)))
    # Its own answer goes on with what was loaded.
    assert said == expected([*PARTS[:3], others[3], *PARTS[4:]]) != expected(PARTS)
    loads = Loads()
    assert (await collect(ring.coordinator, request_of(PARTS, loads)))[0] == expected(PARTS)
    # What is before the image is still known.
    assert loads.num_rows == 18


async def test_what_is_computed_at_once_fits_a_message(ring: RepairableRing) -> None:
    async def load() -> np.ndarray:
        return np.zeros((18, 500_000), np.float32)

    good = request_of(PARTS, Loads())
    bad = replace(good, inputs=(good.inputs[0], RowInput(good.inputs[1].chunk, load)))
    with pytest.raises(StageFailed, match="36000000 bytes exceed a message: give smaller images"):
        await collect(ring.coordinator, bad)
    assert (await collect(ring.coordinator, good))[0] == expected(PARTS)


async def test_a_client_may_leave_while_its_image_is_loading(ring: RepairableRing) -> None:
    """Before, and within the image: what was computed of it is not taken for it by the next."""
    loading, goes_on = asyncio.Event(), asyncio.Event()

    async def load() -> np.ndarray:
        loading.set()
        await goes_on.wait()
        raise AssertionError("its client has left")

    for number in range(2):
        # Images that no slot holds.
        parts = [replace(each, content=5 + number) if isinstance(each, FakeImage) else each for each in PARTS]
        good = request_of(parts, Loads())
        inputs = list(good.inputs)
        inputs[number] = RowInput(inputs[number].chunk, load)
        loading.clear()
        running = asyncio.ensure_future(collect(ring.coordinator, replace(good, inputs=tuple(inputs))))
        await loading.wait()
        await asyncio.sleep(0.05)
        running.cancel()
        await asyncio.wait([running])
        assert kept_of(ring.coordinator).num_bytes == 0
        found, last = await collect(ring.coordinator, good)
        assert found == expected(parts)
        # The image that was loading was not computed.
        assert last.stats.num_cached <= good.inputs[number].chunk.first_row
    goes_on.set()


async def test_others_go_on_and_no_ring_is_given_up_while_an_image_is_loading() -> None:
    """However long it takes, and although a stage is lost meanwhile."""
    ring = RepairableRing()
    options = replace(OPTIONS, still_timeout_s=0.3, ping_interval_s=0.05, ping_timeout_s=30.0)
    goes_on = asyncio.Event()
    good = request_of(PARTS, Loads())
    num_loads = 0

    async def load() -> np.ndarray:
        nonlocal num_loads
        num_loads += 1
        await goes_on.wait()
        return IMAGE.rows

    slow = replace(good, inputs=(RowInput(good.inputs[0].chunk, load), good.inputs[1]))
    text = GenerationRequest(tuple(range(3, 23)), NUM_TOKENS)
    wanted = plain_answer(text.prompt, NUM_TOKENS, Sampler(SamplingParams()).sample)
    async with asyncio.timeout(60), serving(ring, options, plugs=plugs_for()) as coordinator:
        waiting = asyncio.ensure_future(collect(coordinator, slow))
        for _ in range(3):
            assert (await collect(coordinator, text))[0] == wanted
            await asyncio.sleep(0.5)
        assert ring.num_repairs == 0
        await ring.kill(1)
        while not ring.num_repairs:  # noqa: ASYNC110 - a ring tells nobody
            await asyncio.sleep(0.01)
        assert (await collect(coordinator, text))[0] == wanted
        goes_on.set()
        assert (await waiting)[0] == expected(PARTS)
        assert (num_loads, ring.num_repairs) == (1, 1)


@given(
    steps=st.lists(
        st.tuples(st.sampled_from(["add", "get", "sent", "drop"]), st.integers(0, 2), st.integers(0, 3)),
        max_size=40,
    ),
    most=st.sampled_from([0, 8, 20, 100]),
)
def test_kept_rows_keep_to_their_bound(steps: list[tuple[str, int, int]], most: int) -> None:
    """Rows that wait to be sent are never dropped; of the others those that were sent longest ago are."""
    kept = KeptRows(most)
    needed: dict[RowKey, int] = {}
    sent: dict[RowKey, int] = {}
    for step, owner, number in steps:
        key = RowKey(owner, number)
        if step == "add" and key not in needed and key not in sent:
            kept.add(key, np.full((1 + number, 1), number, np.float32))
            needed[key] = 4 * (1 + number)
        elif step == "get":
            rows = kept.get(key)
            assert (rows is None) == (key not in needed and key not in sent)
            if key in sent:
                needed[key] = sent.pop(key)
        elif step == "sent" and key in needed:
            kept.sent(key)
            sent[key] = needed.pop(key)
            while sum(sent.values()) > most:
                del sent[next(iter(sent))]
        elif step == "drop":
            kept.drop(owner)
            for each in [each for each in (*needed, *sent) if each.owner == owner]:
                needed.pop(each, None)
                sent.pop(each, None)
        assert kept.num_bytes == sum(needed.values()) + sum(sent.values())
