"""Rings that break at any moment, before, within and behind images: one text, as if nothing had happened."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import TYPE_CHECKING

from hypothesis import given
from hypothesis import strategies as st

from mesh.coordinator.image_plug import ImagePlug
from mesh.coordinator.options import CoordinatorOptions
from mesh.engine import GenerationRequest
from speculative.controller import ControllerOptions
from speculative.lookup_proposers import NgramProposer
from stages.sampling.sampler import Sampler, SamplingParams
from tests.support.fake_images import FakeImage, Loads, Part, image_answer, inputs_of, prompt_of
from tests.support.fake_recurrent import FakeRecurrentRuntime
from tests.support.fake_stage import FakeRuntime
from tests.support.proposers import Oracle
from tests.support.repairable_ring import NUM_STAGES, Deaths, RepairableRing, serving
from tests.support.ring_harness import plugs_for
from tests.support.searches import search

if TYPE_CHECKING:
    from collections.abc import Callable

N_VOCAB, NUM_TOKENS = 64, 16
texts = st.lists(st.integers(0, N_VOCAB - 1), min_size=1, max_size=12).map(tuple)
# Few shapes: what is told by content alone has to be.
images = st.builds(
    lambda content, shape: FakeImage(content, *shape),
    st.integers(0, 2),
    st.sampled_from([(1, 1, "plain"), (4, 5, "plain"), (3, 4, "lined"), (4, 2, "lined"), (3, 6, "whole")]),
)
parts_lists = st.lists(texts | images, max_size=3)
samplings = st.sampled_from(
    [SamplingParams(1.0, seed=5), SamplingParams(0.8, seed=4, repetition_penalty=1.5, presence_penalty=0.7)]
)


def expected(parts: list[Part], sampling: SamplingParams) -> list[int]:
    prompt = prompt_of(parts)
    sampler, said = Sampler(sampling, len(prompt)), list(prompt)

    def choose(logits, position: int) -> int:  # type: ignore[no-untyped-def]
        said.append(sampler.sample(logits, position, said))
        return said[-1]

    return image_answer(parts, NUM_TOKENS, choose)


@search(few=12, many=200)
@given(
    common=parts_lists,
    rests=st.lists(
        st.tuples(parts_lists, texts).map(lambda pair: [*pair[0], pair[1]]), min_size=1, max_size=3
    ),
    ends_with_image=st.booleans(),
    deaths=st.dictionaries(st.integers(1, 60), st.integers(-1, NUM_STAGES - 1), max_size=3),
    proposer=st.sampled_from(["off", "oracle", "ngram"]),
    sampling=samplings,
    most_sent_rows=st.sampled_from([0, 30, 1000]),
    news_s=st.sampled_from([None, 0.001]),
    most_kept_bytes=st.sampled_from([0, 60, 2**30]),
    num_checkpoints=st.sampled_from([0, 0, 3]),
)
def test_one_text_whenever_stages_die(
    *,
    common: list[Part],
    rests: list[list[Part]],
    ends_with_image: bool,
    deaths: dict[int, int],
    proposer: str,
    sampling: SamplingParams,
    most_sent_rows: int,
    news_s: float | None,
    most_kept_bytes: int,
    num_checkpoints: int,
) -> None:
    """Sessions share texts and images, one after the other and at once; rows are dropped and loaded again."""
    prompts: list[list[Part]] = [[*common, *rest] for rest in rests]
    if ends_with_image:
        prompts[0].append(FakeImage(9, 3, 3, "plain"))
    if proposer == "oracle":
        prompts = prompts[:1]
    # The same with other images in the same places.
    prompts += [
        [replace(part, content=part.content + 1) if isinstance(part, FakeImage) else part for part in parts]
        for parts in prompts
    ]
    loads = Loads()
    requests = [
        GenerationRequest(prompt_of(parts), NUM_TOKENS, sampling=sampling, inputs=inputs_of(parts, loads))
        for parts in prompts
    ]
    wanted = [expected(parts, sampling) for parts in prompts]
    makes: dict[str, Callable[[], NgramProposer | Oracle]] = {
        "oracle": lambda: Oracle([*requests[0].prompt, *wanted[0]], [False, False, True]),
        "ngram": NgramProposer,
    }
    make = makes.get(proposer)

    async def ask() -> list[list[int]]:
        dies = Deaths(deaths)

        def recurrent(index: int) -> FakeRuntime:
            return FakeRecurrentRuntime(
                index,
                NUM_STAGES,
                num_checkpoints=num_checkpoints,
                is_poisoned=True,
                on_decode=lambda spans: dies(index, spans),
            )

        ring = dies.ring = RepairableRing(
            dies,
            recurrent if num_checkpoints else None,
            most_sent_bytes=4 * most_sent_rows,
            news_s=news_s,
        )
        options = CoordinatorOptions(
            128,
            4,
            FakeRuntime.max_rows,
            N_VOCAB,
            repair_wait_s=30.0,
            most_crashes=99,
            can_trim=not num_checkpoints,
            controller=ControllerOptions(fixed_width=3, fixed_depth=2),
        )
        plugs = [
            ImagePlug(most_kept_bytes) if isinstance(plug, ImagePlug) else plug
            for plug in plugs_for(num_checkpoints=num_checkpoints)
        ]
        make_proposers = None if make is None else lambda _request: [make()]

        async def read(request: GenerationRequest) -> list[int]:
            return [token async for part in ring.coordinator.generate(request) for token in part.tokens]

        async with asyncio.timeout(60), serving(ring, options, plugs=plugs, make_proposers=make_proposers):
            half = len(requests) // 2
            answers = await asyncio.gather(*map(read, requests[:half]))
            # From what slots hold.
            answers += await asyncio.gather(*map(read, requests[half:]))
            answers += await asyncio.gather(*map(read, requests))
            await asyncio.gather(*dies.dying)
        return answers

    assert asyncio.run(ask()) == wanted * 2
