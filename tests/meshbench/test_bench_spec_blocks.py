"""What `mesh bench spec --preset features` asks and says of drafters of blocks."""

from __future__ import annotations

import json
from math import prod
from typing import TYPE_CHECKING, Any

import pytest

from mesh.text.tokenizer import Tokenizer
from meshbench.speculation_blocks import (
    PAIRED,
    compared_lines,
    conditional,
    drafting_table,
    paired_lines,
    published_rates,
)
from meshbench.speculation_features import WITH_FEATURES
from meshbench.speculation_plan import Phase, ServeOptions, drafter_plan
from meshbench.speculation_results import WITH_RATES, DraftCounts, rows_of
from meshbench.speculation_workloads import Workload, all_workloads
from spanmesh_proto.errors import InvalidModel
from speculative.proposer import DrafterKind
from tests.qualification.own_models import gemma4_dense
from tests.support.assistant_files import write_assistant
from tests.support.block_drafters import BlockDrafter
from tests.support.spec_bench_samples import sample
from tests.support.tiny_models import TinyModel

if TYPE_CHECKING:
    from pathlib import Path

    from meshbench.report_tools import Line
    from meshbench.speculation_results import Sample

LOOP = "and so on " * 9
BLOCKS = (DrafterKind.DFLASH, DrafterKind.DSPARK, DrafterKind.DFLASH2)
CATEGORIES = ("writing", "coding", "rag")


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return TinyModel("qwen3").write(tmp_path_factory.mktemp("target") / "qwen3.gguf")


@pytest.fixture(scope="module")
def drafter(target: Path) -> Path:
    return BlockDrafter(DrafterKind.DSPARK).write(target, target.parent / "dspark.gguf")


@pytest.fixture(scope="module")
def workloads(target: Path) -> dict[str, Workload]:
    questions = [
        {"question_id": number, "category": category, "turns": [f"{category} {number}"]}
        for category in CATEGORIES
        for number in range(8)
    ]
    path = target.parent / "question.jsonl"
    path.write_text("\n".join(map(json.dumps, questions)))
    return all_workloads(Tokenizer(target), spec_bench=path, per_workload=8, seed=1)


def plan(
    workloads: dict[str, Workload], target: Path, drafter: Path | None, *rates: float, **narrow: Any
) -> tuple[Phase, ...]:
    narrow = {"delays_ms": (), "names": (), **narrow}
    return drafter_plan(workloads, ServeOptions(drafter), rates, target=target, **narrow)


@pytest.mark.parametrize("kind", BLOCKS)
def test_each_kind_of_blocks_has_published_rates(kind: DrafterKind, target: Path, tmp_path: Path) -> None:
    rates = published_rates(BlockDrafter(kind).write(target, tmp_path / "drafter.gguf"), target)
    assert rates is not None
    # What its publishers say it brings: a token, and those that are accepted.
    tokens = 1 + sum(prod(rates[: count + 1]) for count in range(len(rates)))
    assert 2.2 < tokens < 4.0
    assert all(0.4 < rate < 1.0 for rate in rates)


def test_an_assistant_is_measured_in_paired_rounds(tmp_path: Path) -> None:
    target = gemma4_dense(1).write(tmp_path / "gemma4.gguf")
    rates = published_rates(write_assistant(tmp_path / "assistant.gguf"), target)
    assert rates == pytest.approx((0.84, 0.714, 0.65, 0.692), abs=1e-3)


def test_rates_are_conditional() -> None:
    assert conditional((0.8, 0.4, 0.1)) == (0.8, 0.5, 0.25)


def test_small_models_are_not_measured_in_paired_rounds(target: Path, tmp_path: Path) -> None:
    small = TinyModel("llama").write(tmp_path / "small.gguf")
    assert published_rates(small, target) is None


def test_a_drafter_of_another_model_is_refused_before_anything_is_started(
    drafter: Path, tmp_path: Path
) -> None:
    with pytest.raises(InvalidModel):
        published_rates(drafter, TinyModel("llama", n_embd=128).write(tmp_path / "wide.gguf"))


def test_each_question_is_answered_by_off_twice_and_by_each_setting(
    workloads: dict[str, Workload], target: Path, drafter: Path
) -> None:
    real, replayed = plan(workloads, target, drafter)
    assert (real.server, replayed.server) == (WITH_FEATURES, WITH_RATES)
    for phase, names in ((real, ["off again", "auto", "draft"]), (replayed, ["off again", "replay"])):
        assert [trial.delay_ms for trial in phase.trials] == [0.1, 5.0, 20.0]
        for trial in phase.trials:
            assert [setting.name for setting in trial.settings] == names
            assert trial.workload.name == PAIRED
            asked = [question.content["messages"][0]["content"] for question in trial.workload.questions]
            # Prose and code in turn, and no other category.
            assert asked == [f"{category} {number}" for number in range(5) for category in CATEGORIES[:2]]
    assert not real.replays
    assert replayed.replays


def test_replayed_blocks_are_computed_and_as_long_as_there_are_rates(
    workloads: dict[str, Workload], target: Path, drafter: Path
) -> None:
    real, replayed = plan(workloads, target, drafter, 0.5, 0.25)
    serve = ("--speculate", "auto", "--draft", str(drafter), "--draft-max")
    assert real.options == (*serve, "8")
    assert replayed.options == (*serve, "2", "--set", "replay-rates=0.5,0.25")
    _, published = plan(workloads, target, drafter)
    assert published.options[-1] == "replay-rates=0.61,0.5574,0.5588,0.5263,0.5"


def test_paired_rounds_can_be_narrowed(workloads: dict[str, Workload], target: Path, drafter: Path) -> None:
    phases = plan(workloads, target, drafter, delays_ms=(5.0,), names=("rag",))
    assert [trial.delay_ms for phase in phases for trial in phase.trials] == [5.0, 5.0]
    assert {len(trial.workload.questions) for phase in phases for trial in phase.trials} == {8}


def test_two_drafters_are_asked_in_turn(
    workloads: dict[str, Workload], target: Path, drafter: Path, tmp_path: Path
) -> None:
    first = BlockDrafter(DrafterKind.DSPARK).write(target, tmp_path / "first.gguf")
    serve = ServeOptions(drafter, other_draft=first)
    (phase,) = drafter_plan(workloads, serve, (), target=target, delays_ms=(5.0, 20.0), names=("rag",))
    assert phase.beside is not None
    assert phase.options == ("--speculate", "auto", "--draft", str(drafter), "--draft-max", "8")
    assert phase.beside.name == "first.gguf"
    assert phase.beside.options == ("--speculate", "auto", "--draft", str(first), "--draft-max", "8")
    assert [(trial.delay_ms, len(trial.workload.questions)) for trial in phase.trials] == [
        (5.0, 8),
        (20.0, 8),
    ]
    assert {setting.name for trial in phase.trials for setting in trial.settings} == {"auto", "draft"}
    wide = TinyModel("qwen3", n_embd=128).write(tmp_path / "wide.gguf")
    strange = BlockDrafter(DrafterKind.DSPARK).write(wide, tmp_path / "strange.gguf")
    with pytest.raises(InvalidModel):
        drafter_plan(
            workloads, ServeOptions(drafter, other_draft=strange), (), target=target, delays_ms=(), names=()
        )


def test_drafters_of_single_tokens_have_the_long_plan(workloads: dict[str, Workload], target: Path) -> None:
    phases = plan(workloads, target, None, names=("writing",))
    assert {trial.workload.name for phase in phases for trial in phase.trials} == {"writing"}
    assert phases[1].options[-1].startswith("replay-rates=0.75,0.72,")


def rounds(server: str, delay_ms: float, *, text: str = "", **rates: tuple[float, ...]) -> list[Sample]:
    """Rounds with `off` at 10 tokens/s."""
    where: dict[str, Any] = {"workload": PAIRED, "delay_ms": delay_ms, "server": server}
    where |= {"text": text} if text else {}
    names = {"again": "off again"}
    count = len(next(iter(rates.values())))
    return [
        sample(1000 * len(server) + 100 * round(delay_ms) + number, setting, rate, **where)
        for number in range(count)
        for setting, rate in (
            ("off", 10.0),
            *((names.get(name, name), found[number]) for name, found in rates.items()),
        )
    ]


def lines(samples: list[Sample]) -> dict[str, Line]:
    return {line.title: line for line in paired_lines(samples)}


def test_a_setting_is_held_against_what_off_shows_against_off() -> None:
    found = lines(
        rounds(WITH_FEATURES, 0.1, again=(9.0, 11.0, 10.0), auto=(9.0, 9.1, 9.2), draft=(7.0, 7.1, 7.2))
    )
    noise = found[f"off again ({WITH_FEATURES}) over off, 0.1 ms"]
    assert noise.wanted is None
    assert noise.measured == pytest.approx((0.9 * 1.1) ** (1 / 3))
    auto, draft = found["auto with drafter over off, 0.1 ms"], found["drafter alone over off, 0.1 ms"]
    assert auto.wanted == draft.wanted
    assert auto.wanted is not None
    assert noise.note == f"{auto.wanted:.3f} to 1.279 in 3 rounds"
    assert (auto.verdict, draft.verdict) == ("met", "missed")


def test_off_that_was_faster_the_second_time_asks_for_no_gain() -> None:
    found = lines(rounds(WITH_RATES, 5.0, again=(11.0, 11.0, 11.1), replay=(10.1, 10.0, 10.1)))
    line = found["drafts of given acceptance over off, 5 ms"]
    assert (line.wanted, line.verdict) == (1.0, "met")


def test_answers_in_circles_do_not_count() -> None:
    samples = rounds(WITH_RATES, 5.0, again=(10.0, 10.0), replay=(12.0, 12.0))
    samples += rounds(WITH_RATES, 5.0, text=LOOP, again=(10.0,), replay=(90.0,))
    line = lines(samples)["drafts of given acceptance over off, 5 ms"]
    assert line.measured == pytest.approx(1.2)
    assert line.note.endswith("in 2 rounds")


def test_two_drafters_are_compared_in_their_turns() -> None:
    where: dict[str, Any] = {"workload": PAIRED, "delay_ms": 20.0, "server": WITH_FEATURES}
    samples = [
        sample(turn, setting, rate, system=system, **where)
        for turn in range(3)
        for system, off, draft in (("mesh", 10.0, 15.0 + turn), ("old.gguf", 20.0, 24.0))
        for setting, rate in (("off", off), ("draft", draft))
    ]
    found = {line.title: line for line in compared_lines(samples, "new.gguf", "old.gguf")}
    over = found["drafter alone: new.gguf over old.gguf, 20 ms"]
    assert over.measured == pytest.approx((15 * 16 * 17) ** (1 / 3) / 24)
    assert over.note.endswith("in 3 rounds")
    assert found["off: new.gguf over old.gguf, 20 ms"].measured == pytest.approx(0.5)
    assert found["drafter alone: old.gguf over off, 20 ms"].measured == pytest.approx(1.2)
    assert found["drafter alone: new.gguf over off, 20 ms"].measured == pytest.approx(
        (15 * 16 * 17) ** (1 / 3) / 10
    )
    assert found["auto with drafter: new.gguf over off, 20 ms"].measured is None


def test_other_runs_have_no_such_lines() -> None:
    assert paired_lines([sample(0, "off"), sample(0, "auto", server=WITH_FEATURES)]) == ()


def test_the_table_shows_what_drafting_costs_and_brings() -> None:
    counts = DraftCounts.from_timings(
        {
            "draft_n": 8,
            "draft_n_accepted": 3,
            "speculation": {
                "windows": 5,
                "proposers": {
                    "dspark": {
                        "drafts": 2,
                        "drafted_per_position": [2, 2, 2, 2],
                        "accepted_per_position": [2, 1, 0, 0],
                        "drafted_per_depth": [4, 4, 2],
                        "reached_per_depth": [4, 3, 1],
                        "accepted_per_depth": [3, 1, 1],
                    }
                },
                "draft_tokens_per_pass": 4.0,
                "draft_ms_per_token": 2.5,
            },
        }
    )
    chain = DraftCounts.from_timings({"speculation": {"draft_ms_per_token": 9.0}})
    where: dict[str, Any] = {"workload": PAIRED, "server": WITH_FEATURES}
    samples = [
        sample(0, **where),
        sample(0, "draft", 20.0, counts=counts, **where),
        sample(0, "auto", 20.0, counts=chain, **where),
    ]
    table = drafting_table(rows_of(samples)).splitlines()
    assert len(table) == 4
    assert "| 1.00 | 9.00 | 9.00 |  |" in table[3]
    assert "| 4.00 | 10.00 | 2.50 | 2.50 | 2.00 | 2.00 |" in table[2]
