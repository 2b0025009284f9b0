"""Grammars on a real model in exact mode: real stages against the whole model under llama.cpp's grammars."""

from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import pytest

from mesh.engine import GenerationRequest
from mesh.structured_output.json_schema import schema_grammar
from mesh.text.tokenizer import Tokenizer
from speculative.controller import ControllerOptions
from speculative.lookup_proposers import NgramProposer
from speculative.proposer import Proposer
from stages.runtime.stage_runtime import RuntimeOptions
from stages.sampling.sampler import SamplingParams
from tests.support.proposers import Oracle, Parrot
from tests.support.ring_harness import RunningStage, collect, running_coordinator, running_stages
from tests.support.whole_model_engine import WholeModelEngine

pytestmark = pytest.mark.model

CTX_SIZE = 256
CHAT = "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "kind": {"enum": ["plant", "animal", "thing"]},
        "parts": {"type": "array", "items": {"type": "string", "maxLength": 8}, "minItems": 1, "maxItems": 2},
        "size": {"type": "number", "minimum": 0, "maximum": 10},
    },
    "required": ["name", "kind", "parts"],
    "additionalProperties": False,
}
LINES = 'root ::= ("- " [A-Za-zäöü ]{3,12} "\\n"){2,3}'
CASES = {
    "a schema, greedy": (schema_grammar(SCHEMA, param="schema"), SamplingParams()),
    "a schema, filtered": (
        schema_grammar(SCHEMA, param="schema"),
        SamplingParams(0.9, top_k=50, top_p=0.95, seed=7, frequency_penalty=0.3),
    ),
    "lines, drawn": (LINES, SamplingParams(1.0, seed=11, logit_bias=((28, -5.0),))),
}


@pytest.fixture(scope="module")
def tokenizer(smollm2_path: Path) -> Tokenizer:
    return Tokenizer(smollm2_path)


@pytest.fixture
async def stages(smollm2_path: Path, stage_cache_dir: Path) -> AsyncIterator[list[RunningStage]]:
    options = RuntimeOptions(num_slots=1, ctx_size=CTX_SIZE, exact=True)
    async with running_stages(smollm2_path, (10, 20), options, stage_cache_dir) as running:
        yield running


@pytest.fixture(scope="module")
def whole(smollm2_path: Path) -> Iterator[WholeModelEngine]:
    engine = WholeModelEngine(smollm2_path, context_length=CTX_SIZE, num_slots=1)
    yield engine
    engine.close()


def ways(future: list[int]) -> tuple[tuple[Callable[[], Proposer] | None, int, int], ...]:
    """Proposer, width and depth: off, known text with errors that no grammar would take, the text itself."""
    errs = [False, False, False, True, False]
    return (
        (None, 1, 1),
        (lambda: Oracle(future, errs), 6, 1),
        (lambda: Oracle(future, errs), 2, 4),
        (Parrot, 3, 3),
        (NgramProposer, 8, 1),
    )


@pytest.mark.parametrize(
    ("grammar", "sampling"),
    # Drawing through filters is the harder case of a schema; the other is left to the sweep.
    [
        pytest.param(*case, id=name, marks=pytest.mark.sweep if name == "a schema, greedy" else [])
        for name, case in CASES.items()
    ],
)
async def test_the_text_is_that_of_the_whole_model(
    whole: WholeModelEngine,
    stages: list[RunningStage],
    tokenizer: Tokenizer,
    grammar: str,
    sampling: SamplingParams,
) -> None:
    prompt = tuple(tokenizer.encode(CHAT.format("Describe a tree."), add_special=False, parse_special=True))
    request = GenerationRequest(prompt, 60, tokenizer.end_tokens, sampling, grammar=grammar)
    text = [token async for part in whole.generate(request) for token in part.tokens]
    rejected = 0
    for make_proposer, width, depth in ways([*prompt, *text]):
        async with running_coordinator(
            stages,
            context_length=CTX_SIZE,
            num_slots=1,
            make_proposer=make_proposer,
            controller=ControllerOptions(fixed_width=width, fixed_depth=depth),
            token_texts=tokenizer.texts,
        ) as coordinator:
            got, last = await collect(coordinator, request)
        assert got == text
        rejected += last.stats.num_proposed - last.stats.num_accepted
    assert rejected > 0
