"""An assistant goes where the last stage goes: to its host, its replica, and a host that takes its place."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import numpy as np
import pytest

from mesh.engine import GenerationRequest
from speculative.controller import ControllerOptions
from speculative.remote_drafts import RemoteDrafter, RemoteDraftProposer
from stages.sampling.sampler import SamplingParams
from stages.sampling.verifier import WindowVerifier
from tests.qualification.own_models import OWN_MODELS
from tests.support.assistant_files import write_assistant
from tests.support.ring_harness import collect
from tests.support.serve_harness import Serving, serving

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from numpy.typing import NDArray

PROMPT = tuple(int(token) for token in np.random.default_rng(3).integers(3, 300, 30))
REQUEST = GenerationRequest(PROMPT, 60, sampling=SamplingParams(0.8, seed=4))
HOSTS = dict.fromkeys(("first", "second", "third", "spare"), 1.5)


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, Path]:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    model = OWN_MODELS["gemma4-dense"](10).write(tmp_path / "model.gguf")
    return model, write_assistant(tmp_path / "assistant.gguf")


def assistants(mesh: Serving) -> list[bool]:
    """Whether there is one beside each stage."""
    handles = [stage.handle for stage in mesh.pipeline.stages]
    return [handle is not None and handle.config.second_file is not None for handle in handles]


@pytest.mark.parametrize("has_replicas", [False, True])
async def test_a_tail_that_is_lost_is_replaced_with_its_assistant(
    files: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch, *, has_replicas: bool
) -> None:
    model, assistant = files
    async with serving(model, HOSTS, has_replicas=False) as mesh:
        assert assistants(mesh) == [False, False, False]
        plain, _ = await collect(mesh.coordinator, REQUEST)
    foretell = WindowVerifier.foretell

    def foretold(
        verifier: WindowVerifier, logits: NDArray[np.float32], tokens: Sequence[int], start: int
    ) -> int:
        drawn = foretell(verifier, logits, tokens, start)
        place = start + len(tokens) - len(PROMPT)
        return plain[place] if place % 5 and place < len(plain) else drawn

    monkeypatch.setattr(WindowVerifier, "foretell", foretold)
    async with (
        serving(
            model,
            HOSTS,
            make_proposers=lambda _request: [RemoteDraftProposer(RemoteDrafter(4))],
            has_replicas=has_replicas,
            assistant=assistant,
            # Not by confidences: the assistant's own are of other tokens.
            controller=ControllerOptions(fixed_width=4, fixed_depth=3),
        ) as mesh,
        asyncio.timeout(120),
    ):
        assert assistants(mesh) == [False, False, True]
        tokens, last = await collect(mesh.coordinator, REQUEST)
        assert tokens == plain
        assert last.stats.num_accepted > 10
        if has_replicas:
            await mesh.until(lambda: any(held.config.second_file for held in mesh.pipeline.replicas))
        tokens, before = [], 0
        async for part in mesh.coordinator.generate(REQUEST):
            tokens += part.tokens
            if not before and len(tokens) > 12:
                before = part.stats.num_accepted
                mesh.kill(2)
        assert tokens == plain
        assert part.stats.num_replays == 1
        assert part.stats.num_accepted > before
        assert assistants(mesh) == [False, False, True]
