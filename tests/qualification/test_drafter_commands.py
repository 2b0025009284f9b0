"""The commands about drafters that read hidden states: figures from samples, and verdicts; no lab."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from click.testing import CliRunner

from mesh.draft.drafter import read_drafter
from mesh.status import (
    MeshStatus,
    ProposerStatus,
    RecordingStatus,
    SessionsStatus,
    SpeculationStatus,
    StageStatus,
)
from meshbench.chaos.results import Tally
from meshbench.load_client.answers import AnswerRecord
from meshbench.load_client.client import MeshSnapshot
from meshbench.request_record import Record
from spanmesh_proto.errors import MeshError
from speculative.draft.session import MOST_FEATURES
from speculative.proposer import EMPTY, DrafterKind, FeatureReader
from stages.gguf import read_header
from stages.slicing.model_facts import read_model_facts
from tests.qualification import recording_costs
from tests.qualification.drafter_costs import __main__ as drafter_costs
from tests.qualification.drafter_costs.feature_listener import FeatureListener
from tests.qualification.drafter_costs.figures import DecodeRound, Figures, FirstTokenRound, SentFeatures
from tests.qualification.drafter_costs.timing import BlockTimes, DrafterTimes, time_drafter
from tests.qualification.drafter_losses import __main__ as drafter_losses
from tests.qualification.drafter_losses.__main__ import loss_tokens, questions
from tests.qualification.drafter_losses.results import Counts, Sample, WatchedAnswer, result_lines
from tests.qualification.random_drafter import main as write_random
from tests.qualification.recording_costs import Round
from tests.support.block_drafters import BlockDrafter
from tests.support.eagle3 import DRAFTER
from tests.support.tiny_models import N_VOCAB, TinyModel

if TYPE_CHECKING:
    from pathlib import Path

ROW_VALUES = 3 * 576


def figures(**changes: Any) -> Figures:
    good = Figures(
        decode=(
            DecodeRound(0.1, 50.0, 49.5, 50.0, 1.0),
            DecodeRound(5.0, 25.0, 24.8, 25.2, 0.99),
            DecodeRound(5.0, 25.0, 20.0, 25.0, 1.0),
            DecodeRound(5.0, 25.0, 25.0, 24.0, 1.0),
        ),
        first_token=(FirstTokenRound(5000.0, 5100.0, 560), FirstTokenRound(5000.0, 4900.0, 540)),
        times=DrafterTimes(64, (10.0, 30.0, 11.0), (80.0, 60.0, 400.0), (75.0, 70.0, 78.0)),
        listened=SentFeatures(100, 0, 101 * ROW_VALUES * 2),
        drafted=SentFeatures(1000, 30, 1010 * ROW_VALUES * 2),
        row_values=ROW_VALUES,
        row_bytes=2 * ROW_VALUES,
        num_read=512,
    )
    return replace(good, **changes)


def verdicts(found: Figures) -> dict[str, str]:
    return {line.title: line.verdict for line in found.lines() if line.wanted is not None}


@pytest.mark.model
def test_blocks_are_timed_by_their_length(tmp_path: Path) -> None:
    target = TinyModel("qwen3").write(tmp_path / "target.gguf")
    path = BlockDrafter(DrafterKind.DSPARK, is_complete=False).write(target, tmp_path / "dspark.gguf")
    found = time_drafter(read_drafter(path, read_model_facts(target)), target, N_VOCAB)
    assert isinstance(found, BlockTimes)
    assert list(found.blocks_ms) == [1, 2, 4, 8]
    assert min(found.reading_ms.values()) > 0
    titles = [line.title for line in figures(times=found).lines()]
    assert "drafter: block of 8, ms" in titles
    assert "drafter: features of 64 rows read, ms" in titles


def test_costs_within_their_bounds_are_met() -> None:
    assert set(verdicts(figures()).values()) == {"met"}
    ratios = {line.title: line.measured for line in figures().lines()}
    at_5_ms = ratios["decode rate with features and no drafts over off, at 5 ms"]
    assert at_5_ms == pytest.approx(24.8 / 25.1)  # the middle one of three
    assert ratios["time to the first token of a long prompt, drafter over off, at 5 ms"] == pytest.approx(1.0)
    assert ratios["drafter: 64 rows absorbed over as many with outputs"] == pytest.approx(11 / 80)
    assert ratios["the same without the encoder of features, by difference"] == pytest.approx((11 - 5) / 75)


@pytest.mark.parametrize(
    ("changes", "title"),
    [
        (
            {"decode": (DecodeRound(5.0, 25.0, 24.0, 25.0, 1.0),)},
            "decode rate with features and no drafts over off, at 5 ms",
        ),
        (
            {"decode": (DecodeRound(5.0, 25.0, 25.0, 25.0, 0.5),)},
            "share of the wanted features that arrived, at 5 ms",
        ),
        (
            {"first_token": (FirstTokenRound(1000.0, 1060.0, 600),)},
            "time to the first token of a long prompt, drafter over off, at 5 ms",
        ),
        (
            {"first_token": (FirstTokenRound(1000.0, 1000.0, 500),)},
            "rows whose features were wanted then, fewest",
        ),
        (
            {"times": DrafterTimes(64, (21.0,), (100.0,), (100.0,))},
            "drafter: 64 rows absorbed over as many with outputs",
        ),
        (
            {"row_bytes": 4 * ROW_VALUES, "drafted": SentFeatures(100, 0, 106 * ROW_VALUES * 2)},
            "bytes of features over rows × taps × width × 2, drafts",
        ),
        (
            # Too many for q8, which takes about half of f16's.
            {"row_bytes": ROW_VALUES, "drafted": SentFeatures(100, 0, 106 * ROW_VALUES)}
            | {"listened": SentFeatures(100, 0, 100 * ROW_VALUES)},
            "bytes of a position's features, drafts",
        ),
    ],
)
def test_each_cost_can_miss_its_bound(changes: dict[str, Any], title: str) -> None:
    found = verdicts(figures(**changes))
    assert [name for name, verdict in found.items() if verdict != "met"] == [title]


def timings(**changes: Any) -> dict[str, Any]:
    features = {"wanted": 620, "received": 615, "bytes": 4000}
    return {"speculation": {"stale_rows": 0, "proposed": 20, "accepted": 8, "features": features, **changes}}


def test_rejected_rows_count_among_those_whose_features_were_sent() -> None:
    assert SentFeatures.of(timings()) == SentFeatures(615 + 12, 12, 4000)
    assert SentFeatures.of(timings()) + SentFeatures(3, 1, 5) == SentFeatures(630, 13, 4005)


@pytest.mark.parametrize(
    "changes", [{"stale_rows": 2}, {"features": None}, {"features": {"received": 0, "bytes": 0}}]
)
def test_rows_that_nobody_knows_are_not_guessed(changes: dict[str, Any]) -> None:
    with pytest.raises(MeshError, match="cannot be counted"):
        SentFeatures.of(timings(**changes))


def test_a_listener_keeps_the_latest_features_and_proposes_nothing() -> None:
    listener = FeatureListener()
    assert isinstance(listener, FeatureReader)
    listener.take_features(0, np.zeros((MOST_FEATURES, 4), np.float32))
    listener.take_features(MOST_FEATURES, np.ones((3, 4), np.float32))
    assert min(listener.features) == 3
    assert len(listener.features) == MOST_FEATURES
    assert listener.propose(8) == EMPTY


RING, OTHER_RING = ("a:1", "b:1", "c:1"), ("a:1", "d:1", "c:1")
NUM_PROMPT, NUM_TOKENS = 40, 200


def stream(name: str) -> AnswerRecord:
    record = Record(0, name, 0.0, 0.0, 0.0, 30.0, num_input_tokens=NUM_PROMPT, num_output_tokens=NUM_TOKENS)
    return AnswerRecord(record, "text", (1,) * NUM_TOKENS)


def samples(
    accepted_after: int, *, rings: tuple[tuple[str, ...], ...] = (RING, (), OTHER_RING)
) -> list[Sample]:
    """An answer of 10 tokens a second that drafts three tokens for each: one loss at 6 s, repaired at 8 s."""
    first, broken, second = rings
    found = [Sample(-0.1, 0, Counts(1000, 500), first)]
    accepted = 500
    for second_number in range(21):
        tokens = 10 * second_number
        accepted += 0 if second_number == 0 else 15 if tokens <= 60 else accepted_after
        at_s = float(second_number if tokens <= 60 else second_number + 2)
        ring = first if tokens <= 60 else second
        found.append(Sample(at_s, NUM_PROMPT + tokens, Counts(1000 + 3 * tokens, accepted), ring))
        if tokens == 60:
            found.append(Sample(7.0, NUM_PROMPT + tokens, found[-1].counts, broken))
            found.append(Sample(7.9, NUM_PROMPT + tokens, found[-1].counts, second))
    return [*found, replace(found[-1], at_s=30.0, positions=0)]


def lost(accepted_after: int = 15, **options: Any) -> WatchedAnswer:
    return WatchedAnswer(stream("story 0"), tuple(samples(accepted_after, **options)), killed_s=6.5)


def test_counts_are_taken_before_the_loss_and_some_tokens_after_the_repair() -> None:
    answer = lost(accepted_after=17)
    assert answer.killed_tokens == answer.repaired_tokens == 60
    assert answer.repair_s == pytest.approx(1.4)
    assert answer.before == Counts(180, 90)
    # 64 tokens after the 60th it has 130 by the next sample; 70 tokens are left.
    assert answer.after == Counts(210, 119)
    assert answer.until_token(60) == answer.before
    assert answer.from_token(0) == Counts(600, 90 + 14 * 17)


def test_without_another_ring_nothing_counts_after_a_loss() -> None:
    answer = lost(rings=(RING, (), RING))
    assert answer.repaired_tokens is None
    assert answer.repair_s is None
    assert answer.after == Counts()
    assert answer.after.acceptance is None


def tally(num_unlike: int = 0) -> Tally:
    return Tally(1, 0, 0, 0, num_unlike, 0, ())


@pytest.mark.parametrize(
    ("answer", "num_unlike", "missed"),
    [
        (lost(15), 0, []),
        (lost(16), 0, []),
        (lost(17), 0, ["change of acceptance, pooled"]),
        (lost(13), 0, ["change of acceptance, pooled"]),
        (lost(15), 1, ["1 losses: texts different from the undisturbed run"]),
        (
            lost(15, rings=(RING, (), RING)),
            0,
            [
                "losses after which another ring went on",
                "losses with drafts before and after",
                "change of acceptance, pooled",
            ],
        ),
    ],
)
def test_verdicts_about_losses(answer: WatchedAnswer, num_unlike: int, missed: list[str]) -> None:
    base = {"story 0": replace(lost(15), killed_s=None)}
    found = result_lines([answer], base, tally(num_unlike))
    bounded = [line for line in found if line.wanted is not None]
    assert [line.title for line in bounded if line.verdict != "met"] == missed
    by_title = {line.title: line.measured for line in found}
    assert by_title["acceptance of the undisturbed answers until the same tokens"] == 0.5


def test_a_sample_is_read_from_the_status() -> None:
    status = MeshStatus(
        ready=True,
        stages=(StageStatus(address="a:1"), StageStatus(address="b:1")),
        sessions=SessionsStatus(positions=77),
        speculation=SpeculationStatus(proposers={"eagle3": ProposerStatus(drafted=9, accepted=4)}),
    )
    assert Sample.of(MeshSnapshot(1.0, status, ()), "eagle3") == Sample(1.0, 77, Counts(9, 4), ("a:1", "b:1"))
    assert Sample.of(MeshSnapshot(1.0, status, ()), "mtp") == Sample(1.0, 77, Counts(), ("a:1", "b:1"))
    broken = Sample.of(MeshSnapshot(1.0, replace(status, ready=False), ()), "eagle3")
    assert broken is not None
    assert broken.ring == ()
    assert Sample.of(MeshSnapshot(1.0, None, ()), "eagle3") is None
    assert Sample.of(MeshSnapshot(1.0, MeshStatus(), ()), "eagle3") is None


def test_losses_come_at_different_tokens_of_the_first_half() -> None:
    found = loss_tokens(10, 400)
    assert len(set(found)) == 10
    assert found[0] > 60
    assert found[-1] <= 220


def test_questions_differ_and_are_computed_anew() -> None:
    asked = questions(10, 400)
    assert len({question.turn.text for question in asked}) == 10
    assert all('"cache_prompt": false' in question.request.body for question in asked)


@pytest.mark.parametrize("command", [drafter_costs.main, drafter_losses.main])
def test_a_drafter_must_be_named(command: Any) -> None:
    shown = CliRunner().invoke(command, ["--help"])
    assert shown.exit_code == 0
    assert "--draft FILE" in shown.output
    refused = CliRunner().invoke(command, [])
    assert refused.exit_code == 2
    assert "--draft" in refused.output


def test_options_of_a_run_arrive(monkeypatch: pytest.MonkeyPatch) -> None:
    found = []

    def keep(options: Any, _kind: str) -> None:
        found.append(options)
        raise MeshError("as far as this goes")

    monkeypatch.setattr("meshbench.lab.network.require_lab", lambda: None)
    monkeypatch.setattr(drafter_losses, "measure", keep)
    arguments = ["--draft", str(DRAFTER), "--losses", "3", "--threads", "2"]
    run = CliRunner().invoke(drafter_losses.main, arguments)
    assert (run.exit_code, "as far as this goes" in run.output) == (1, True)
    [options] = found
    assert (options.num_faults, options.num_threads, options.kinds) == (3, 2, ("middle",))
    assert options.link.is_ideal


@pytest.mark.parametrize("kind", [DrafterKind.DFLASH, DrafterKind.DSPARK, DrafterKind.DFLASH2])
def test_a_random_drafter_of_blocks_fits_its_model(kind: DrafterKind, tmp_path: Path) -> None:
    target = TinyModel("qwen3", n_layers=12).write(tmp_path / "qwen3.gguf")
    path = tmp_path / "drafter.gguf"
    CliRunner().invoke(write_random, [kind.value, str(path), "--for", str(target)], catch_exceptions=False)
    drafter = read_drafter(path, read_model_facts(target))
    assert drafter.kind is kind
    assert drafter.num_drafting_layers == 5
    # Outputs of the layers before those whose inputs it names.
    assert drafter.layers == (1, 3, 5, 7, 9)
    assert drafter.most_drafted == (16 if kind is DrafterKind.DSPARK else 15)


def test_a_random_assistant_fits_a_random_gemma4_of_a_model_s_size(tmp_path: Path) -> None:
    shape = TinyModel("llama", n_layers=12, n_embd=256, head_size=64)
    small = shape.write(tmp_path / "small.gguf", controls=("<its own>",))
    model, path = tmp_path / "gemma4.gguf", tmp_path / "assistant.gguf"
    for kind, written, like in (("gemma4", model, small), ("assistant", path, model)):
        arguments = [kind, str(written), "--for", str(like)]
        CliRunner().invoke(write_random, arguments, catch_exceptions=False)
    facts = read_model_facts(model)
    assert (facts.n_layers, facts.n_embd) == (12, 256)
    tokens = [read_header(file).metadata["tokenizer.ggml.tokens"] for file in (model, small)]
    assert tokens[0] == tokens[1]
    # Checks widths, heads, windows, rotations and the vocabulary of both.
    assert read_drafter(path, facts).kind is DrafterKind.ASSISTANT
    refused = CliRunner().invoke(write_random, ["assistant", str(path), "--for", str(small)])
    assert (refused.exit_code, "for a Gemma 4" in refused.output) == (2, True)


def test_costs_of_recording_are_held_against_their_bound() -> None:
    recording = RecordingStatus(conversations=4, tokens=256, bytes=1 << 20)
    rounds = [Round(delay_ms, 50.0, on, 10.0, 10.3) for delay_ms in (0.0, 5.0) for on in (49.0, 50.0, 49.5)]
    lines = {line.title: line for line in recording_costs.figures(tuple(rounds), recording)}
    bound = lines["decode rate at 5 ms, recorded, over not: lower bound"]
    assert (bound.wanted, bound.verdict) == (0.97, "missed")
    # Three rounds that differ by two percent say little; more of them say more.
    lines = {line.title: line for line in recording_costs.figures(tuple(rounds * 4), recording)}
    assert lines["decode rate at 0 ms, recorded, over not: lower bound"].verdict == "met"
    assert lines["further processor time a token at 0 ms, µs"].measured == pytest.approx(300.0)
    assert lines["bytes recorded a token of an answer"].measured == 4096.0
