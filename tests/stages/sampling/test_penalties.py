"""Penalties, biases and logprobs, each against its definition in plain Python."""

import math
from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from spanmesh_proto.errors import InvalidRequest, InvalidWindow
from spanmesh_proto.row_ids import FIRST_ROW_ID
from stages.sampling.sampler import (
    MAX_BIASES,
    LogitAdjustment,
    Sampler,
    SamplingParams,
    from_wire,
    to_wire,
    token_logprobs,
)
from stages.sampling.session_spec import SessionSpec
from stages.sampling.verifier import TokenRecord, WindowVerifier

N_VOCAB = 24
tokens = st.lists(st.integers(0, N_VOCAB - 1), max_size=40)
rows = st.lists(st.floats(-20, 20, width=32), min_size=N_VOCAB, max_size=N_VOCAB)
samplings = st.builds(
    SamplingParams,
    frequency_penalty=st.sampled_from([0.0, -2.0, 0.3, 2.0]),
    presence_penalty=st.sampled_from([0.0, -1.5, 0.7]),
    repetition_penalty=st.sampled_from([1.0, 0.5, 1.3, 10.0]),
    repetition_window=st.sampled_from([0, 1, 5, 64]),
    logit_bias=st.dictionaries(st.integers(0, N_VOCAB - 1), st.floats(-100, 100), max_size=4).map(
        lambda biases: tuple(biases.items())
    ),
)


def by_definition(
    row: list[float], before: list[int], num_prompt: int, sampling: SamplingParams
) -> list[float]:
    counts = Counter(before[num_prompt:])
    recent = set(before[-sampling.repetition_window :] if sampling.repetition_window else before)
    adjusted = []
    for token, value in enumerate(row):
        logit = value
        if token in recent:
            factor = sampling.repetition_penalty
            logit = logit / factor if logit > 0 else logit * factor
        logit -= counts[token] * sampling.frequency_penalty
        logit -= (counts[token] > 0) * sampling.presence_penalty
        adjusted.append(logit + dict(sampling.logit_bias).get(token, 0.0))
    return adjusted


@given(rows, tokens, st.integers(0, 40), samplings)
def test_a_row_is_adjusted_as_defined(
    row: list[float], before: list[int], num_prompt: int, sampling: SamplingParams
) -> None:
    logits = np.array(row, np.float32)
    adjusted = LogitAdjustment(sampling, num_prompt).apply(logits, before)
    assert adjusted == pytest.approx(by_definition(row, before, num_prompt, sampling), abs=1e-4, rel=1e-6)
    assert logits.tolist() == row


def test_nothing_to_adjust_costs_no_copy() -> None:
    row = np.zeros(4, np.float32)
    assert LogitAdjustment(SamplingParams(repetition_window=5)).apply(row, [1, 1]) is row


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_bias_of_100_bans_and_forces(temperature: float) -> None:
    row = np.linspace(-15, 25, N_VOCAB, dtype=np.float32)

    def drawn(bias: float) -> set[int]:
        sampling = SamplingParams(temperature, logit_bias=((N_VOCAB - 1, bias),))
        return {Sampler(sampling).sample(row[::-1] if bias > 0 else row, place) for place in range(200)}

    assert drawn(100) == {N_VOCAB - 1}
    assert N_VOCAB - 1 not in drawn(-100)


@given(st.lists(st.tuples(st.integers(0, 30), tokens), max_size=12))
def test_the_record_holds_what_the_cache_would(windows: list[tuple[int, list[int]]]) -> None:
    record, known = TokenRecord(), list[int]()
    for start, window in windows:
        if start > len(known):
            with pytest.raises(InvalidWindow, match=f"position {start}, but only {len(known)} tokens"):
                record.write(start, window)
            continue
        record.write(start, window)
        known[start:] = window
        assert record.before(len(record)).tolist() == known
        assert record.before(start).tolist() == known[:start]


def test_a_record_grows() -> None:
    record = TokenRecord()
    for start in range(0, 5000, 50):
        record.write(start, range(start, start + 50))
    assert record.before(5000).tolist() == list(range(5000))


def test_a_row_counts_the_tokens_before_it_and_a_rejected_one_leaves_nothing() -> None:
    """Every row likes 1 best, then 2, then 3; each that was said once falls behind."""
    row = np.array([0, 3, 2.5, 2.2, 0], np.float32)
    verifier = WindowVerifier(SamplingParams(presence_penalty=2.0), num_prompt=2)
    assert verifier.verify([], [1], 0).tokens == []
    assert verifier.verify([row], [2], 1).tokens == [1]  # the prompt does not count
    # Proposed 2 and 3 as foreseen, then 3 again, where 1 comes: the last row is not even looked at.
    assert verifier.verify([row] * 5, [1, 2, 3, 3, 4], 2).tokens == [2, 3, 1]
    # Had the proposed 3 and 4 stayed, or 2 and 3 been counted twice, the next ones would be others.
    assert verifier.verify([row], [1], 5).tokens == [1]
    again = WindowVerifier(SamplingParams(frequency_penalty=1.0), num_prompt=2)
    again.verify([], [1, 2], 0)
    for _ in range(3):
        assert again.verify([row] * 3, [1, 2, 4], 2).tokens == [2, 3]


def test_logprobs_are_those_of_the_models_own_distribution() -> None:
    row = np.random.default_rng(3).normal(scale=4, size=49152).astype(np.float32)
    row[7] = row[9] = row.max() + 1
    exact = row.astype(np.float64) - np.logaddexp.reduce(row.astype(np.float64))
    got = token_logprobs(row, 11, 20)
    assert got.logprob == pytest.approx(exact[11], abs=1e-5)
    assert [token for token, _ in got.top] == np.argsort(-row, kind="stable")[:20].tolist()
    assert [logprob for _, logprob in got.top] == pytest.approx(
        [exact[token] for token, _ in got.top], abs=1e-5
    )
    assert token_logprobs(row, 11, 0).top == ()

    verifier = WindowVerifier(SamplingParams(logit_bias=((11, 100.0),)), num_top_logprobs=2)
    sampled = verifier.verify([row, row, row], [5, 11, 12], 0)
    assert sampled.tokens == [11, 11]
    assert [each.logprob for each in sampled.logprobs] == [got.logprob] * 2
    (back,) = from_wire(to_wire(sampled.logprobs[:1]))
    assert back.logprob == pytest.approx(got.logprob)
    assert [token for token, _ in back.top] == [7, 9]


@given(samplings, st.none() | st.integers(0, 20), st.integers(0, 2**31))
def test_an_opening_arrives_as_it_was_sent(
    sampling: SamplingParams, num_top: int | None, num_prompt: int
) -> None:
    spec = SessionSpec(3, 1, sampling, num_prompt, num_top)
    assert SessionSpec.from_wire(type(spec.to_wire()).FromString(spec.to_wire().SerializeToString())) == spec


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"frequency_penalty": 2.5}, "frequency_penalty is 2.5: it must be from -2 to 2"),
        ({"presence_penalty": math.nan}, "presence_penalty is nan"),
        ({"repetition_penalty": 0.0}, "repetition_penalty is 0.0"),
        ({"repetition_window": -1}, "repetition_window is -1"),
        ({"logit_bias": ((4, 101.0),)}, "token 4 is 101: it must be from -100"),
        ({"logit_bias": ((4, 1.0), (4, 2.0))}, "twice"),
        (
            {"logit_bias": tuple((token, 1.0) for token in range(MAX_BIASES + 1))},
            "1025 entries: at most 1024",
        ),
    ],
)
def test_settings_out_of_range_are_refused_by_name(fields: dict[str, object], words: str) -> None:
    with pytest.raises(InvalidRequest, match=words) as caught:
        SamplingParams(**fields)  # type: ignore[arg-type]
    assert caught.value.param == next(iter(fields))


def test_rows_that_are_no_tokens_are_not_penalised() -> None:
    logits = np.arange(1, 5, dtype=np.float32)
    adjustment = LogitAdjustment(SamplingParams(repetition_penalty=2.0, frequency_penalty=1.0), 3)
    adjusted = adjustment.apply(logits, [FIRST_ROW_ID, 0, FIRST_ROW_ID + 7, 3])
    assert adjusted.tolist() == [0.5, 2.0, 3.0, 1.0]


def test_a_cached_prefix_has_tokens_and_rows_only() -> None:
    rows = (9, FIRST_ROW_ID, 2**32 - 1)
    SessionSpec(1, 0, num_prompt=3, cached=(*rows, 8)).require_vocabulary(10)
    for wrong, num_prompt in ((10, 4), (FIRST_ROW_ID - 1, 4), (FIRST_ROW_ID, 3)):
        with pytest.raises(InvalidWindow, match=f"token {wrong} is outside the vocabulary of 10"):
            SessionSpec(1, 0, num_prompt=num_prompt, cached=(*rows, wrong)).require_vocabulary(10)


def test_biased_ids_must_exist() -> None:
    SamplingParams(logit_bias=((9, 1.0),)).require_vocabulary(10)
    for wrong in (-1, 10):
        with pytest.raises(InvalidRequest, match=rf"token id {wrong}: this model's ids go from 0 to 9"):
            SamplingParams(logit_bias=((wrong, 1.0),)).require_vocabulary(10)
    with pytest.raises(InvalidRequest, match="top_logprobs is 21"):
        SessionSpec(1, 0, num_top_logprobs=21)
