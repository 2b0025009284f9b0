"""Windows that are sent while their own prompt is still read: they say nothing of what other prompts cost."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from mesh.coordinator.coordinator import Coordinator
from mesh.coordinator.options import CoordinatorOptions
from mesh.engine import GenerationRequest
from speculative.controller import ControllerOptions
from tests.support.fake_stage import FakeRuntime, plain_answer
from tests.support.gated_ring import GatedRing, watched
from tests.support.gates import StillLoop
from tests.support.proposers import Oracle
from tests.support.ring_harness import collect

if TYPE_CHECKING:
    from collections.abc import Sequence

    import pytest

    from speculative.proposer import Proposer

PLAIN = GenerationRequest((5, 6, 7, 8), 30)
# Long enough for several chunks, of whose answer the beginning is known.
KNOWN = GenerationRequest(tuple(range(1, 61)), 20)
OPTIONS = CoordinatorOptions(
    128,
    2,
    FakeRuntime.max_rows,
    64,
    controller=ControllerOptions(fixed_width=2, fixed_depth=8),
    ping_interval_s=1e9,
    ping_timeout_s=1e9,
)


def answer(request: GenerationRequest) -> list[int]:
    return plain_answer(request.prompt, request.max_tokens, lambda logits, _position: int(logits.argmax()))


def proposers(request: GenerationRequest) -> Sequence[Proposer]:
    return [Oracle([*KNOWN.prompt, *answer(KNOWN)[:8]])] if request is KNOWN else []


async def ask_both(made: list[GatedRing]) -> tuple[float, list[int]]:
    """Ask one after the other; each message and each batch takes a millisecond.

    Returns:
        Load by prompts that may be beside others in the end, and numbers of windows of the second request
        that were ahead of each of its windows.
    """
    ring = GatedRing(num_slots=2)
    made.append(ring)
    coordinator = ring.coordinator = Coordinator(
        await ring.fill(),
        OPTIONS,
        mesh_id=ring.mesh_id,
        mesh_key=ring.mesh_key,
        make_proposers=proposers,
        clock_s=asyncio.get_running_loop().time,
    )
    await coordinator.start()
    num_ahead: list[int] = []
    for request in (PLAIN, KNOWN):
        asked = asyncio.create_task(collect(coordinator, request))
        await ring.quiet()
        while choices := ring.choices():
            for session in coordinator._sessions.values():
                if request is KNOWN:
                    num_ahead += [
                        each.num_ahead for each in session._in_flight_windows if not each.window.is_prompt
                    ]
            await choices[0].happen()
            await ring.quiet()
        tokens, _ = await asked
        assert tokens == answer(request)
    share = coordinator._active_ring.prefill_pace._share
    assert coordinator._active_ring.prefill_pace._alone_ms
    await coordinator.stop()
    await ring.close()
    await ring.quiet()
    return share, num_ahead


def test_windows_behind_their_own_prompt_do_not_make_the_chunks_of_others_smaller(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    loop = StillLoop()
    made: list[GatedRing] = []
    with watched(monkeypatch, lambda: made[-1] if made else None):
        share, num_ahead = loop.run_until_complete(ask_both(made))
    loop.run_until_complete(loop.shutdown_default_executor())
    loop.close()
    assert max(num_ahead) > 1
    assert share == 1.0
