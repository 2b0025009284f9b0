"""A model cut in stages is the same model, to the last bit; and where it is not, certifying says so."""

import dataclasses
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from spanmesh_proto.errors import InvalidModel, UncuttableModel
from stages.certification.certify import CertifyOptions, certify, cut_stage
from stages.certification.comparison import Difference, compare, wire_loss
from stages.layers import LayerRange
from stages.runtime.spans import Span
from stages.runtime.stage_runtime import RuntimeOptions, StageRuntime
from stages.slicing.architectures import cutting_rules
from stages.transport.hidden_codec import HiddenType
from tests.support.short_models import short_gemma3_path  # noqa: F401 - a fixture
from tests.support.tiny_models import N_VOCAB, TinyModel
from tests.support.tiny_vision import write_vision

EXACT = RuntimeOptions(ctx_size=128, exact=True)
MODELS = [
    TinyModel("llama", has_rope_factors=True),
    TinyModel("llama", is_tied=True),
    TinyModel("qwen2"),
    TinyModel("qwen3", is_tied=True),
    # Cut at 5 the tail has no layer with a window, cut at 1 the first stage has no other.
    TinyModel("gemma3", is_tied=True),
    TinyModel("internlm2"),
]


@pytest.mark.parametrize("model", MODELS, ids=lambda model: f"{model.architecture}-{model.is_tied}")
def test_every_cut_of_tiny_models_is_bit_equal(model: TinyModel, tmp_path: Path) -> None:
    report = certify(model.write(tmp_path / "model.gguf"), None, CertifyOptions(n_prompt=20, n_decode=5))
    assert report.architecture == model.architecture
    assert [result.cut for result in report.cuts] == [1, 2, 3, 4, 5]
    for result in report.cuts:
        prefill, decode, chunks, spans, windows = (phase.difference for phase in result.phases)
        assert prefill == Difference(n_rows=20, n_tokens=20, n_equal_tokens=20)
        assert decode == Difference(n_rows=5, n_tokens=5, n_equal_tokens=5)
        assert chunks == Difference(n_rows=80, n_tokens=4, n_equal_tokens=4)
        assert spans == Difference(n_rows=11, n_tokens=11, n_equal_tokens=11)
        assert windows == Difference()
    assert report.together == Difference(n_tokens=40, n_equal_tokens=40)
    assert report.is_exact
    # Sessions go back to any position: nothing depends on checkpoints.
    assert report.with_checkpoints is None
    assert not report.is_exact_onward


@pytest.mark.model
@pytest.mark.parametrize(
    ("model", "cuts"),
    [
        # Those in between are tried as docs/exactness.md and examples/three_hosts.md show it.
        pytest.param("smollm2_path", (1, 29), id="smollm2"),
        # A first stage without the kind of layer that has no window, and a tail without any other; the sweep
        # has all cuts of all layers.
        pytest.param("short_gemma3_path", (5,), id="gemma3"),
    ],
)
def test_real_models_are_bit_equal_where_it_is_tricky(
    model: str, cuts: tuple[int, ...], request: pytest.FixtureRequest
) -> None:
    report = certify(request.getfixturevalue(model), cuts)
    assert tuple(result.cut for result in report.cuts) == cuts
    assert report.is_exact


@pytest.mark.model
@pytest.mark.sweep
@pytest.mark.timeout(900)
@pytest.mark.parametrize(("model", "n_layers"), [("smollm2_path", 30), ("gemma3_path", 18)])
def test_every_cut_of_real_models_is_bit_equal(
    model: str, n_layers: int, request: pytest.FixtureRequest
) -> None:
    report = certify(request.getfixturevalue(model))
    assert [result.cut for result in report.cuts] == list(range(1, n_layers))
    assert [result.cut for result in report.cuts if not result.difference.is_bit_equal] == []


def logits_of_chain(stages: list[Path], tokens: tuple[int, ...]) -> NDArray[np.float32]:
    hidden: NDArray[np.float32] | None = None
    for stage in stages:
        runtime = StageRuntime(stage, EXACT)
        (hidden,) = runtime.decode([Span(0, 0, tokens, hidden, num_outputs=len(tokens))])
        runtime.close()
    assert hidden is not None
    return hidden


@pytest.mark.parametrize("model", MODELS, ids=lambda model: f"{model.architecture}-{model.is_tied}")
def test_stages_of_one_layer_each_are_bit_equal(model: TinyModel, tmp_path: Path) -> None:
    source = model.write(tmp_path / "model.gguf")
    stages = []
    for start, stop in pairwise(range(7)):
        stages.append(tmp_path / f"stage{start}.gguf")
        cut_stage(source, LayerRange(start, stop), stages[-1])
    tokens = tuple(np.random.default_rng(5).integers(N_VOCAB, size=40).tolist())
    whole, chain = logits_of_chain([source], tokens), logits_of_chain(stages, tokens)
    assert whole.shape == (40, N_VOCAB)
    assert whole.tobytes() == chain.tobytes()


def test_a_missing_rule_shows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = TinyModel("gemma3", n_layers=8).write(tmp_path / "model.gguf")
    without_windows = dataclasses.replace(cutting_rules.FAMILIES["gemma3"], rules=())
    monkeypatch.setitem(cutting_rules.FAMILIES, "gemma3", without_windows)
    (result,) = certify(source, [2], CertifyOptions(n_prompt=20, n_decode=5)).cuts
    prefill, _, chunks, *_ = (phase.difference for phase in result.phases)
    assert not result.difference.is_bit_equal
    assert result.difference.max_hidden_diff == 0  # layers 0 and 1 count from 0 either way
    assert prefill.max_logit_diff > 0
    assert chunks.max_logit_diff > 0


def test_a_head_that_takes_the_first_rows_for_the_last_shows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the whole model as of its stages: only the reference marks all rows."""
    source = write_vision("cogvlm", tmp_path / "model.gguf")
    assert certify(source, [1], CertifyOptions(n_prompt=20, n_decode=2)).is_exact
    family = cutting_rules.FAMILIES["cogvlm"]
    marking_few = dataclasses.replace(family, entry=dataclasses.replace(family.entry, marks_all_rows=False))
    monkeypatch.setitem(cutting_rules.FAMILIES, "cogvlm", marking_few)
    (result,) = certify(source, [1], CertifyOptions(n_prompt=20, n_decode=2)).cuts
    assert [phase.phase for phase in result.phases if not phase.difference.is_bit_equal] == ["chunks"]


def test_what_a_cut_gets_that_is_not_there(tmp_path: Path) -> None:
    source = TinyModel("llama").write(tmp_path / "tiny.gguf")
    for cut in (0, 6, -1):
        with pytest.raises(
            UncuttableModel, match=f"cannot be cut at {cut}: it has 6 layers, so cuts are 1 to 5"
        ):
            certify(source, [cut])
    with pytest.raises(UncuttableModel, match="there is nothing to cut"):
        certify(TinyModel("llama", n_layers=1).write(tmp_path / "one.gguf"))


def test_a_model_that_llama_cpp_does_not_load(tmp_path: Path) -> None:
    source = TinyModel("starship").write(tmp_path / "starship.gguf")
    with pytest.raises(InvalidModel, match=r"llama\.cpp does not load starship\.gguf"):
        certify(source)


@pytest.mark.model
def test_what_smaller_wire_types_cost(smollm2_path: Path) -> None:
    options = CertifyOptions(n_prompt=12, n_decode=4, wires=(HiddenType.F16, HiddenType.Q8))
    report = certify(smollm2_path, [15], options)
    assert report.is_exact  # of float32, whatever the others cost
    (result,) = report.cuts
    assert [loss.hidden_type for loss in result.wire_losses] == ["f16", "q8"]
    for loss in result.wire_losses:
        assert loss.n_tokens == 16
        assert 0 < loss.mean_logit_diff < 1
        assert loss.mean_logit_diff < loss.max_logit_diff < 5
        assert 0 < loss.mean_kl_nats < loss.max_kl_nats < 0.2
    half, eighth = result.wire_losses
    assert half.mean_kl_nats < eighth.mean_kl_nats


def test_losses_are_those_of_the_distributions() -> None:
    whole, cut = rows(0, 0), rows(0, np.log(3))
    # Halves against a quarter and three quarters.
    expected = np.log(0.5) - (np.log(0.25) + np.log(0.75)) / 2
    loss = wire_loss(HiddenType.Q8, np.concatenate([whole, whole]), np.concatenate([cut, whole]))
    assert loss.max_kl_nats == pytest.approx(expected)
    assert loss.mean_kl_nats == pytest.approx(expected / 2)
    assert loss.max_logit_diff == pytest.approx(np.log(3))
    assert loss.mean_logit_diff == pytest.approx(np.log(3) / 4)
    assert (loss.n_tokens, loss.n_changed_tokens) == (2, 1)
    # Logits that a constant was added to say the same.
    assert wire_loss(HiddenType.F16, whole, whole + 7).max_kl_nats == 0


def test_progress_ends_at_the_total(tmp_path: Path) -> None:
    calls: list[tuple[int, int]] = []
    source = TinyModel("llama").write(tmp_path / "tiny.gguf")
    certify(
        source,
        [2, 3],
        CertifyOptions(n_decode=3, wires=(HiddenType.Q8,)),
        progress=lambda done, total: calls.append((done, total)),
    )
    assert [done for done, _ in calls] == list(range(1, len(calls) + 1))
    assert calls[-1] == (len(calls), len(calls))


def rows(*values: float) -> NDArray[np.float32]:
    return np.array([values], np.float32)


def test_compare() -> None:
    same = (rows(1, 2), rows(1, 2))
    assert compare(same, same) == Difference(1, 1, 1, 0.0, 0.0, is_bit_equal=True)
    assert compare(same, (rows(1, 2), rows(2.5, 2))) == Difference(1, 1, 0, 1.5, 0.0, is_bit_equal=False)
    assert compare((rows(1, 2), rows(1, 2.25)), same) == Difference(1, 1, 1, 0.0, 0.25, is_bit_equal=False)
    assert compare(same, (rows(1, 2), rows(np.nan, 2))).max_logit_diff == np.inf
    assert not compare(same, (rows(0, 2), rows(-0.0, 2))).is_bit_equal
    assert compare((rows(1, 2), rows(1, 2, 3)), same).max_hidden_diff == np.inf
