"""Features of windows, through real servers around a fake model."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import grpc
import numpy as np
import pytest

from mesh.coordinator.feature_plug import decoded
from mesh.coordinator.feature_store import FeatureNeeds
from mesh.engine import GenerationRequest
from spanmesh_proto import PROTOCOL_VERSION
from spanmesh_proto import windows_pb2 as wire
from spanmesh_proto import windows_pb2_grpc as rpc
from spanmesh_proto.errors import ProtocolError
from speculative.controller import ControllerOptions
from stages.runtime.spans import Span
from stages.serving import feature_outlet
from stages.serving.feature_outlet import FeatureStream
from stages.transport.channels import CLIENT_OPTIONS, key_metadata
from stages.transport.hidden_codec import HiddenType
from tests.support.fake_stage import FakeRuntime, fake_ring, plain_answer
from tests.support.proposers import Oracle
from tests.support.ring_harness import (
    MESH_ID,
    MESH_KEY,
    collect,
    feature_streams,
    running_coordinator,
    running_services,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

# Layer 0 is the first stage's, layer 1 the second's, 3 the head state of the third.
NEEDS = FeatureNeeds((1, 0, 3), 3, 1, HiddenType.F32, context=8)
REQUEST = GenerationRequest(tuple(range(3, 23)), 100)


class Reader(Oracle):
    """Proposes known text, with errors, and records the features of its session."""

    def __init__(self, text: Sequence[int]) -> None:
        super().__init__(text, [False, False, True])
        self.found: dict[int, NDArray[np.float32]] = {}

    def take_features(self, start: int, rows: NDArray[np.float32]) -> None:
        for position, row in enumerate(rows, start):
            assert position not in self.found
            self.found[position] = row


def expected(tokens: Sequence[int]) -> list[list[float]]:
    """Features of every position of a text, computed at once."""
    stages = fake_ring()
    for stage in stages:
        stage.tap_features(NEEDS.layers)
    rows: dict[int, list[list[float]]] = {layer: [] for layer in NEEDS.layers}
    for position, token in enumerate(tokens):
        hidden = None
        for stage in stages:
            hidden = stage.decode([Span(0, position, [token], hidden, num_outputs=1)], is_tapped=True)[0]
            for layer, part in zip(stage._feature_layers, stage.features(0), strict=True):
                rows[layer] += part.tolist()
    sides = [rows[layer] for layer in NEEDS.layers]
    return [[*first, *second, *third] for first, second, third in zip(*sides, strict=True)]


@pytest.mark.parametrize("most_carried", [0, feature_outlet.MOST_CARRIED_BYTES], ids=["streamed", "carried"])
@pytest.mark.parametrize(("width", "depth"), [(4, 1), (2, 4)])
async def test_a_proposer_gets_the_features_of_what_was_committed(
    width: int, depth: int, most_carried: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(feature_outlet, "MOST_CARRIED_BYTES", most_carried)
    prompt = list(REQUEST.prompt)
    plain = plain_answer(prompt, REQUEST.max_tokens, lambda logits, _position: int(logits.argmax()))
    reader = Reader([*prompt, *plain])
    async with (
        running_services(fake_ring()) as stages,
        running_coordinator(
            stages,
            context_length=128,
            num_slots=4,
            max_rows=FakeRuntime.max_rows,
            n_vocab=64,
            make_proposer=lambda: reader,
            controller=ControllerOptions(fixed_width=width, fixed_depth=depth),
            feature_needs=NEEDS,
        ) as coordinator,
    ):
        streams = feature_streams(coordinator)
        assert streams is not None
        while streams.why_off is not None:  # noqa: ASYNC110 - connecting
            await asyncio.sleep(0.001)
        tokens, last = await collect(coordinator, REQUEST)
    assert last.stats.num_proposed > last.stats.num_accepted > 0
    assert tokens == plain
    text = [*prompt, *tokens]
    wanted = expected(text)
    # The prompt's end and the answer without its end: features that come after the last verdict find no
    # session, and may be late by some windows.
    assert set(range(len(prompt) - NEEDS.context, len(text) - 60)) <= reader.found.keys()
    assert all(0 <= position < len(text) - 1 for position in reader.found)
    for position, row in reader.found.items():
        assert row.tolist() == wanted[position]


async def open_features(address: str, **request: Any) -> tuple[grpc.aio.Channel, Any]:
    channel = grpc.aio.insecure_channel(address, options=CLIENT_OPTIONS)
    hello = wire.Hello(protocol_version=PROTOCOL_VERSION, mesh_id=MESH_ID, sender="a test")
    call = rpc.StageStub(channel).Features(
        wire.FeatureRequest(hello=hello, **request), metadata=key_metadata(MESH_KEY)
    )
    return channel, call


async def test_a_stage_names_the_layers_that_it_gives() -> None:
    async with running_services(fake_ring()) as stages:
        given = []
        for stage in stages:
            channel, call = await open_features(stage.address.address, layers=[0, 1, 2, 3])
            given.append(list((await call.read()).layers))
            await channel.close(None)
    assert given == [[0], [1], [3]], "the last layer's output is computed for few rows"


@pytest.mark.parametrize("request_", [{"layers": [4]}, {"layers": [1], "type": 9}])
async def test_unknown_layers_and_formats_are_refused(request_: dict[str, Any]) -> None:
    async with running_services(fake_ring()) as stages:
        channel, call = await open_features(stages[0].address.address, **request_)
        with pytest.raises(grpc.aio.AioRpcError, match="the model has 3 layers"):
            await call.read()
        await channel.close(None)


async def test_a_second_stream_ends_the_first_and_a_rejoin_the_second() -> None:
    async with running_services(fake_ring()) as stages:
        first, one = await open_features(stages[0].address.address, layers=[0])
        await one.read()
        second, other = await open_features(stages[0].address.address, layers=[0])
        await other.read()
        assert not isinstance(await one.read(), wire.FeatureBundle)
        await stages[0].service.rejoin(0, "another ring", "key", 1)
        assert not isinstance(await other.read(), wire.FeatureBundle)
        await first.close(None)
        await second.close(None)


async def test_of_streams_that_open_at_once_one_stays() -> None:
    ring = fake_ring()
    async with running_services(ring) as stages:
        opened = [await open_features(stages[1].address.address, layers=[layer]) for layer in (0, 1) * 4]

        async def layers_of_last(call: Any) -> list[int]:
            """Of a stream's first message, once it is known to be the only one left."""
            first = await call.read()
            rest = asyncio.ensure_future(call.read())
            done, _ = await asyncio.wait([rest], timeout=1)
            if done:
                raise EOFError
            rest.cancel()
            return list(first.layers)

        found = await asyncio.gather(*(layers_of_last(call) for _, call in opened), return_exceptions=True)
        (layers,) = [each for each in found if not isinstance(each, EOFError)]
        assert layers == list(ring[1]._feature_layers)
        for channel, _ in opened:
            await channel.close(None)


def features(num_rows: int) -> wire.Features:
    return wire.Features(session=1, window_id=2, start=3, num_rows=num_rows, rows=[bytes(4 * num_rows)])


async def test_a_slow_link_drops_the_oldest() -> None:
    stream = FeatureStream(most_queued_bytes=40)
    stream.put([features(9)])
    stream.open([0])
    stream.put([features(num_rows) for num_rows in (1, 2, 3, 4, 5)])
    assert stream.num_dropped_rows == 1 + 2 + 3
    bundles = stream.bundles()
    assert list((await anext(bundles)).layers) == [0]
    assert [each.num_rows for each in (await anext(bundles)).features] == [4, 5]
    stream.close()
    with pytest.raises(StopAsyncIteration):
        await anext(bundles)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        ({"type": wire.HIDDEN_TYPE_F16}, "in format 1"),
        ({"rows": [bytes(8), bytes(8)]}, "of 2 layers"),
        ({"rows": [bytes(12)]}, "12 bytes for 2 rows, not 8"),
        ({"rows": [b""], "num_rows": 0}, "0 bytes for 0 rows"),
        ({"window_rows": [1, 2]}, "2 rows for windows of"),
        ({"window_rows": [2, 0]}, "2 rows for windows of"),
        ({"rows": [np.array([1, np.nan], "<f4").tobytes()]}, "values beyond 1e"),
        ({"rows": [np.array([1, 2e6], "<f4").tobytes()]}, "values beyond 1e"),
        ({"rows": [np.array([-np.inf, 1], "<f4").tobytes()]}, "values beyond 1e"),
    ],
)
def test_hostile_features_are_refused(damage: dict[str, Any], message: str) -> None:
    message_ = features(2)
    for name in damage.keys() & {"rows", "window_rows"}:
        del getattr(message_, name)[:]
        getattr(message_, name).extend(damage[name])
    for name in damage.keys() - {"rows", "window_rows"}:
        setattr(message_, name, damage[name])
    with pytest.raises(ProtocolError, match=message):
        decoded(message_, (0,), NEEDS)
