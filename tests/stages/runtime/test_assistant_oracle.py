"""Drafts of an assistant beside the last stage, in exact mode: those of llama.cpp on the whole model."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

import numpy as np
import pytest

from stages.runtime.stage_runtime import RuntimeOptions
from tests.qualification.own_models import OWN_MODELS
from tests.support.assistant_files import write_assistant
from tests.support.assistant_rounds import AssistedModel, assisted_rounds
from tests.support.draft_oracle import DraftOracle, OracleMissing, build_draft_oracle
from tests.support.scripted_rounds import Script

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.sweep

NUM_ROUNDS = 80
CTX_SIZE = 512


@pytest.fixture(scope="module")
def program() -> Path:
    try:
        return build_draft_oracle()
    except OracleMissing as missing:
        pytest.skip(str(missing))


def texts(num_sessions: int) -> list[list[int]]:
    noise = np.random.default_rng(1)
    return [[int(token) for token in noise.integers(3, 300, size)] for size in (60, 17, 33)[:num_sessions]]


@pytest.mark.parametrize(
    ("kind", "cuts", "num_drafted", "num_sessions", "p_min", "kv_type"),
    [
        ("dense", (2, 4), 3, 1, 0.0, "f16"),
        ("dense", (3,), 7, 3, 0.0, "f16"),
        ("dense", (2, 4), 3, 1, 0.0, "q8_0"),
        ("dense", (4,), 3, 3, 0.0, "q4_0"),
        ("dense", (2, 4), 6, 1, 0.2, "f16"),
        ("dense", (3,), 6, 3, 0.2, "f16"),
        ("moe", (2, 4), 3, 1, 0.0, "f16"),
        ("moe", (3,), 7, 3, 0.0, "q8_0"),
        ("e", (2, 4), 3, 1, 0.0, "f16"),
        ("e", (3,), 7, 3, 0.0, "q8_0"),
    ],
)
def test_drafts_are_llama_cpp_s_own(
    program: Path,
    tmp_path: Path,
    kind: str,
    cuts: tuple[int, ...],
    num_drafted: int,
    num_sessions: int,
    p_min: float,
    kv_type: str,
) -> None:
    model = OWN_MODELS[f"gemma4-{kind}"](2).write(tmp_path / "model.gguf")
    assistant = write_assistant(tmp_path / "assistant.gguf")
    options = RuntimeOptions(
        num_slots=num_sessions, ctx_size=CTX_SIZE, exact=True, kv_type=kv_type, has_reader=True
    )
    sessions = texts(num_sessions)
    with contextlib.closing(AssistedModel(model, assistant, cuts, tmp_path / "stages", options)) as assisted:
        rounds = assisted_rounds(assisted, sessions, Script(num_drafted, NUM_ROUNDS, p_min=p_min))
    oracle = DraftOracle(program, model, assistant, "mtp")
    expected = oracle.rounds(
        sessions, num_drafted, NUM_ROUNDS, verdicts="scripted", p_min=p_min, kv_type=kv_type
    )
    assert rounds == expected
    # Random weights repeat themselves: what a case can tell.
    assert len({each.drafted for own in rounds for each in own}) >= 20
    accepted = {(each.num_accepted, len(each.drafted)) for own in rounds for each in own}
    assert {count for count, _ in accepted} >= {0, 1, 2, 3}
    assert (num_drafted, num_drafted) in accepted


def test_drafts_behind_32k_positions_are_llama_cpp_s_own(program: Path, tmp_path: Path) -> None:
    model = OWN_MODELS["gemma4-dense"](2).write(tmp_path / "model.gguf")
    assistant = write_assistant(tmp_path / "assistant.gguf")
    text = [int(token) for token in np.random.default_rng(1).integers(3, 300, 32_000)]
    options = RuntimeOptions(
        num_slots=1, ctx_size=len(text) + CTX_SIZE, exact=True, kv_type="q8_0", has_reader=True
    )
    with contextlib.closing(
        AssistedModel(model, assistant, (2, 4), tmp_path / "stages", options)
    ) as assisted:
        rounds = assisted_rounds(assisted, [text], Script(4, NUM_ROUNDS))
    oracle = DraftOracle(program, model, assistant, "mtp")
    assert rounds == oracle.rounds([text], 4, NUM_ROUNDS, verdicts="scripted", kv_type="q8_0")
    assert len({each.drafted for each in rounds[0]}) >= 20
