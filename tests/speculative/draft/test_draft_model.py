"""The draft-model proposer with real models: it says what the model says, whatever happens meanwhile."""

from __future__ import annotations

import contextlib
import random
import threading
import time
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from mesh.requantize import requantise
from mesh.text.tokenizer import Tokenizer
from speculative.draft.context import DraftOptions, DraftUnusable
from speculative.proposer import EMPTY
from stages.runtime.spans import Span
from stages.runtime.stage_runtime import RuntimeOptions, StageRuntime
from stages.sampling.sampler import Sampler, SamplingParams
from tests.support.draft_models import greedy, greedy_alone, running_draft, wait_for
from tests.support.tiny_models import N_VOCAB, TinyModel

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from numpy.typing import NDArray

    from speculative.draft.worker import DraftProposer

OPTIONS = DraftOptions(draft_max=8, ctx_size=512, num_sessions=3)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return TinyModel("llama").write(tmp_path_factory.mktemp("tiny") / "tiny.gguf")


@pytest.fixture(scope="module")
def q4_0(smollm2_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("draft") / "draft.gguf"
    requantise(smollm2_path, "Q4_0", path)
    return path


@pytest.fixture(scope="module")
def tokenizer(smollm2_path: Path) -> Tokenizer:
    return Tokenizer(smollm2_path)


def encoded(tokenizer: Tokenizer, text: str) -> list[int]:
    return tokenizer.encode(text, add_special=False, parse_special=True)


@pytest.mark.model
def test_it_says_what_the_draft_model_says_alone(q4_0: Path, tokenizer: Tokenizer) -> None:
    prompt = encoded(tokenizer, "The planets of the solar system are Mercury, Venus,")
    with running_draft(q4_0, OPTIONS) as model:
        proposer = model.open(greedy)
        proposer.extend(prompt)
        flying: list[int] = []
        while len(flying) < 24:
            flying += wait_for(proposer, 4, flying).tokens
        confidences = proposer.propose(8).confidences
        assert model.draft_ms_per_token > 0
    assert flying == greedy_alone(q4_0, prompt, 24)
    assert all(0.0 < confidence <= 1.0 for confidence in confidences)


@pytest.mark.model
def test_after_a_rejection_it_goes_on_from_the_corrected_token(q4_0: Path, tokenizer: Tokenizer) -> None:
    prompt = encoded(tokenizer, "One, two, three, four,")
    other = encoded(tokenizer, " twenty")
    with running_draft(q4_0, OPTIONS) as model:
        proposer = model.open(greedy)
        proposer.extend(prompt)
        drafted = wait_for(proposer, 8).tokens
        proposer.extend([*drafted[:3], *other])
        corrected = wait_for(proposer, 6).tokens
    assert list(corrected) == greedy_alone(q4_0, [*prompt, *drafted[:3], *other], 6)


@pytest.mark.model
def test_it_follows_what_others_proposed(q4_0: Path, tokenizer: Tokenizer) -> None:
    prompt = encoded(tokenizer, "Monday, Tuesday,")
    others = encoded(tokenizer, " Wednesday, Thursday,")
    with running_draft(q4_0, OPTIONS) as model:
        proposer = model.open(greedy)
        proposer.extend(prompt)
        assert proposer.propose(0, others) == EMPTY
        drafted = wait_for(proposer, 4, others).tokens
    assert list(drafted) == greedy_alone(q4_0, [*prompt, *others], 4)


@pytest.mark.model
def test_sessions_draft_together_and_do_not_mix(q4_0: Path, tokenizer: Tokenizer) -> None:
    prompts = [
        encoded(tokenizer, text)
        for text in ("1, 2, 3, 4, 5, 6, 7,", "a, b, c, d, e, f,", "Monday, Tuesday, Wednesday,")
    ]
    with running_draft(q4_0, OPTIONS) as model:
        proposers = [model.open(greedy) for _ in prompts]
        for proposer, prompt in zip(proposers, prompts, strict=True):
            proposer.extend(prompt)
            proposer.propose(8)
        drafted = [list(wait_for(proposer, 8).tokens) for proposer in proposers]
    assert drafted == [greedy_alone(q4_0, prompt, 8) for prompt in prompts]


@pytest.mark.quiet
@pytest.mark.model
def test_a_prompt_being_read_is_left_at_once(q4_0: Path, tokenizer: Tokenizer) -> None:
    prompt = encoded(tokenizer, "All work and no play makes Jack a dull boy. " * 100)
    options = DraftOptions(ctx_size=2048, num_sessions=2)
    with running_draft(q4_0, options) as model:
        first = model.open(greedy)
        first.extend(prompt)
        first.propose(1)
        time.sleep(0.1)
        started_s = time.perf_counter()
        first.close()
        second = model.open(greedy)
        second.extend(prompt[:20])
        wait_for(second, 1)
        second_token_s = time.perf_counter() - started_s
        third = model.open(greedy)
        third.extend(prompt)
        third.propose(1)
        time.sleep(0.1)
        started_s = time.perf_counter()
    closing_s = time.perf_counter() - started_s
    # A thousand tokens take seconds, a batch of them a third of one.
    assert second_token_s < 2.0
    assert closing_s < 1.0
    assert "draft" not in {thread.name for thread in threading.enumerate()}


@pytest.mark.model
def test_noise_shared_with_the_target_makes_them_agree(
    smollm2_path: Path, q4_0: Path, tokenizer: Tokenizer
) -> None:
    """Published as drafter-invariance: the same noise at the same position picks the same token, mostly."""
    prompt = encoded(tokenizer, "Write a short poem about the sea.\n\n")
    sampler = Sampler(SamplingParams(temperature=0.8, seed=5))
    answer: list[int] = []
    target = StageRuntime(smollm2_path, RuntimeOptions(ctx_size=512))
    for _ in range(64):
        tokens, start = [*prompt, *answer], max(0, len(prompt) + len(answer) - 1) if answer else 0
        logits = target.decode([Span(0, start, tokens[start:], num_outputs=1)])[0][0]
        answer.append(sampler.sample(logits, len(tokens)))
    target.close()
    agreed = {}
    with running_draft(q4_0, OPTIONS) as model:
        for seed in (5, 6):
            proposer = model.open(Sampler(SamplingParams(temperature=0.8, seed=seed)).sample)
            proposer.extend(prompt)
            hits = 0
            for token in answer:
                hits += wait_for(proposer, 1).tokens == (token,)
                proposer.extend([token])
            agreed[seed] = hits / len(answer)
            proposer.close()
    assert agreed[5] > 0.6
    assert agreed[5] > agreed[6] + 0.15


@pytest.mark.model
def test_a_session_may_close_at_any_moment(q4_0: Path, tokenizer: Tokenizer) -> None:
    dice = random.Random(3)
    prompt = encoded(tokenizer, ", ".join(map(str, range(100))))
    expected = greedy_alone(q4_0, prompt[:60], 6)
    with running_draft(q4_0, OPTIONS) as model:
        for _ in range(40):
            proposers = [model.open(greedy) for _ in range(3)]
            for proposer in proposers:
                proposer.extend(prompt[: dice.randrange(1, 200)])
                proposer.propose(dice.randrange(8))
            time.sleep(dice.random() * 0.1)
            for proposer in proposers:
                proposer.close()
            proposers[0].close()
        last = model.open(greedy)
        last.extend(prompt[:60])
        assert list(wait_for(last, 6).tokens) == expected


def test_the_model_may_close_at_any_moment(tiny: Path) -> None:
    for delay_ms in (0, 1, 2, 5, 10, 20):
        with running_draft(tiny, OPTIONS) as model:
            proposer = model.open(greedy)
            proposer.extend(list(range(3, 300)))
            proposer.propose(8)
            time.sleep(delay_ms / 1000)
        model.close()
        proposer.propose(8)
        proposer.close()
    assert "draft" not in {thread.name for thread in threading.enumerate()}


def test_more_sessions_than_slots_wait_their_turn(tiny: Path) -> None:
    with running_draft(tiny, DraftOptions(ctx_size=512, num_sessions=1)) as model:
        first, second = model.open(greedy), model.open(greedy)
        first.extend([5, 6])
        wait_for(first, 2)
        second.extend([7, 8])
        assert second.propose(2) == EMPTY
        first.close()
        assert list(wait_for(second, 2).tokens) == greedy_alone(tiny, [7, 8], 2)


def test_one_that_fails_harms_nobody_else(tiny: Path) -> None:
    def broken(_logits: NDArray[np.float32], _position: int, _before: Sequence[int]) -> int:
        raise ArithmeticError("no choice")

    def deaf() -> None:
        raise RuntimeError("nobody listens")

    with running_draft(tiny, OPTIONS) as model:
        failing, unheard, sound = model.open(broken), model.open(greedy), model.open(greedy)
        unheard.listen(deaf)
        for proposer in (failing, unheard, sound):
            proposer.extend([5, 6, 7])
            proposer.propose(4)
        assert len(wait_for(sound, 4).tokens) == 4
        with pytest.raises(ArithmeticError, match="no choice"):
            failing.propose(1)
        with pytest.raises(RuntimeError, match="nobody listens"):
            unheard.propose(1)


def test_a_client_s_text_saves_no_other_client_rows(tiny: Path) -> None:
    prompt = [5 + number % 50 for number in range(100)]
    with running_draft(tiny, OPTIONS) as model:
        num_rows: list[int] = []
        compute = model._thread._compute

        def counting(parts: Sequence[Any]) -> None:
            num_rows[-1] += sum(len(part.span.tokens) for part in parts)
            compute(parts)

        model._thread._compute = counting  # type: ignore[method-assign]

        def rows_for(client: str | None) -> tuple[DraftProposer, int]:
            """Its proposer, still open, and the rows that its first draft took."""
            num_rows.append(0)
            proposer = model.open(greedy, client)
            proposer.extend(prompt)
            wait_for(proposer, 1)
            return proposer, num_rows[-1]

        first, num_first = rows_for("ann")
        assert num_first >= len(prompt)
        # While it runs, and once it has ended.
        second, num_second = rows_for("bob")
        assert num_second >= len(prompt)
        first.close()
        third, num_third = rows_for(None)
        assert num_third >= len(prompt)
        second.close()
        again, num_again = rows_for("ann")
        assert num_again < len(prompt) / 2
        for proposer in (third, again):
            proposer.close()


def test_a_thread_that_fails_is_no_silence(tiny: Path) -> None:
    with running_draft(tiny, OPTIONS) as model:
        proposer = model.open(greedy)

        def broken() -> Any:
            raise ArithmeticError("wrong")

        model._thread._next_parts = broken  # type: ignore[method-assign]
        # The thread may fail before, where it looked for work only now.
        with contextlib.suppress(ArithmeticError):
            proposer.extend([5, 6])
        model._thread._thread.join(10)
        assert not model.is_alive
        with pytest.raises(ArithmeticError, match="wrong"):
            proposer.propose(1)
        proposer.close()


def test_ids_that_the_target_does_not_know_are_never_proposed(tiny: Path) -> None:
    with running_draft(tiny, OPTIONS, num_tokens=10) as model:
        seen: list[int] = []

        def greedy_and_watch(logits: NDArray[np.float32], _position: int, _before: Sequence[int]) -> int:
            seen.append(len(logits))
            return int(np.argmax(logits))

        proposer = model.open(greedy_and_watch)
        proposer.extend([5, 6, 7])
        assert max(wait_for(proposer, 4).tokens) < 10
        assert set(seen) == {10}


def test_a_choice_knows_what_came_before(tiny: Path) -> None:
    """As the target's penalties do, so that the draft agrees with it."""
    prompt = [5, 6, 7, 5, 6]
    sampler = Sampler(SamplingParams(frequency_penalty=2.0, repetition_penalty=1.5), len(prompt))
    histories: list[list[int]] = []

    def choose(logits: NDArray[np.float32], position: int, before: Sequence[int]) -> int:
        assert len(before) == position
        histories.append(list(before))
        return sampler.sample(logits, position, before)

    with running_draft(tiny, OPTIONS) as model:
        proposer = model.open(choose)
        proposer.extend(prompt)
        drafted = list(wait_for(proposer, 6).tokens)
    text = [*prompt, *drafted]
    assert all(history[: len(text)] == text[: len(history)] for history in histories)
    assert len(set(drafted)) == len(drafted), "a token said once has fallen far behind"


def test_a_file_that_is_no_draft_model(tiny: Path, tmp_path: Path) -> None:
    def load(path: Path, options: DraftOptions) -> None:
        with running_draft(path, options, num_tokens=N_VOCAB):
            pytest.fail("it is loaded")

    with pytest.raises(DraftUnusable, match=r"absent.gguf is not a file"):
        load(tmp_path / "absent.gguf", OPTIONS)
    text = tmp_path / "text.gguf"
    text.write_text("no model")
    with pytest.raises(DraftUnusable, match=r"cannot load .*text.gguf as a draft model"):
        load(text, OPTIONS)
    with pytest.raises(DraftUnusable, match=r"cannot make a context of 1000000 × 1000000 positions"):
        load(tiny, DraftOptions(ctx_size=1_000_000, num_sessions=1_000_000))
    with pytest.raises(DraftUnusable, match="no format f8"):
        load(tiny, DraftOptions(kv_type="f8"))


def test_a_quantised_kv_cache(tiny: Path) -> None:
    with running_draft(tiny, DraftOptions(ctx_size=64, kv_type="f32")) as model:
        proposer = model.open(greedy)
        proposer.extend([5, 6, 7])
        assert list(wait_for(proposer, 4).tokens) == greedy_alone(tiny, [5, 6, 7], 4)
