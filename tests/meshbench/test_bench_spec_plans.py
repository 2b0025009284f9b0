"""Workloads and plans: what a run of `mesh bench spec` will ask."""

import json
from pathlib import Path

import pytest

from mesh.text.tokenizer import Tokenizer
from meshbench.speculation_acceptance import EXACT, WITH_DRAFT, WITH_HISTORY, WITHOUT_DRAFT
from meshbench.speculation_plan import (
    ServeOptions,
    acceptance_plan,
    features_plan,
    in_turn,
    narrowed,
    peer_settings,
    quick_plan,
    sweep_plan,
)
from meshbench.speculation_results import AUTO, DRAFT, OFF, OFF_AGAIN, REPLAY, Setting
from meshbench.speculation_workloads import Workload, all_workloads, choose
from spanmesh_proto.errors import MeshError

pytestmark = pytest.mark.model

CATEGORIES = ("writing", "coding", "rag")


@pytest.fixture(scope="module")
def tokenizer(smollm2_path: Path) -> Tokenizer:
    return Tokenizer(smollm2_path)


@pytest.fixture(scope="module")
def spec_bench(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("spec-bench") / "question.jsonl"
    lines = [
        {"question_id": number, "category": category, "turns": [f"{category} {number}", "and more"]}
        for category in CATEGORIES
        for number in range(4)
    ]
    path.write_text("\n".join(map(json.dumps, lines)))
    return path


@pytest.fixture(scope="module")
def workloads(tokenizer: Tokenizer, spec_bench: Path) -> dict[str, Workload]:
    return all_workloads(tokenizer, spec_bench=spec_bench, per_workload=2, seed=1)


def test_categories_come_first_then_our_own(workloads: dict[str, Workload]) -> None:
    assert list(workloads) == [
        *CATEGORIES,
        *("built-in", "repository-edit", "tool-call", "random-token", "warm-repeat"),
        *("built-in-raw", "random-token-raw"),
    ]
    assert all(len(workload.questions) == 2 for workload in workloads.values())
    (first, second) = workloads["coding"].questions
    assert (first.id, second.id) == ("0", "2")
    assert first.content == {"messages": [{"role": "user", "content": "coding 0"}]}


def test_raw_and_warm_say_so(workloads: dict[str, Workload]) -> None:
    assert [name for name, workload in workloads.items() if workload.is_raw] == [
        "built-in-raw",
        "random-token-raw",
    ]
    assert [name for name, workload in workloads.items() if workload.is_warm] == ["warm-repeat"]
    assert workloads["built-in-raw"].path == "/v1/completions"
    assert workloads["built-in"].path == "/v1/chat/completions"


def test_random_prompts_follow_the_seed(tokenizer: Tokenizer, workloads: dict[str, Workload]) -> None:
    again = all_workloads(tokenizer, spec_bench=None, per_workload=2, seed=1)
    other = all_workloads(tokenizer, spec_bench=None, per_workload=2, seed=2)
    for name in ("random-token", "random-token-raw"):
        assert again[name] == workloads[name]
        assert other[name] != workloads[name]
    prompt = workloads["random-token-raw"].questions[0].content["prompt"]
    assert all(tokenizer.piece(token) for token in prompt)


def test_questions_follow_a_text(workloads: dict[str, Workload]) -> None:
    (first, _) = workloads["coding"].behind("Once upon a time").questions
    assert first.content == {"messages": [{"role": "user", "content": "Once upon a time\n\ncoding 0"}]}
    raw, asked = workloads["built-in-raw"], workloads["built-in-raw"].questions[0].content["prompt"]
    assert raw.behind("Once").questions[0].content == {"prompt": f"Once\n\n{asked}"}
    assert [name for name, workload in workloads.items() if not workload.is_text] == ["random-token-raw"]


def test_an_unknown_workload_is_named(workloads: dict[str, Workload]) -> None:
    with pytest.raises(MeshError, match=r"no workload is called poetry; there are writing,"):
        choose(workloads, ("coding", "poetry"))


def test_the_acceptance_plan_asks_for_every_line(workloads: dict[str, Workload]) -> None:
    phases = {phase.server: phase for phase in acceptance_plan(workloads, ServeOptions(Path("d.gguf")), 3)}
    assert list(phases) == [WITH_DRAFT, WITHOUT_DRAFT, WITH_HISTORY, EXACT]
    assert "--draft" in phases[WITH_DRAFT].options
    assert "--draft" not in phases[WITHOUT_DRAFT].options
    assert "--exact" in phases[EXACT].options
    asked = {(trial.delay_ms, trial.workload.name) for trial in phases[WITH_DRAFT].trials}
    assert {(delay, name) for delay in (0.1, 5.0, 20.0) for name in (*CATEGORIES, "random-token")} <= asked
    with_peer = {trial.workload.name for trial in phases[WITH_DRAFT].trials if trial.with_peer}
    assert with_peer == set(CATEGORIES)
    drafted = {trial.workload.name for trial in phases[WITH_DRAFT].trials if DRAFT in trial.settings}
    assert drafted == {"writing", "coding"}
    assert {concurrent_trial.num_at_once for concurrent_trial in phases[WITH_DRAFT].concurrent_trials} == {
        4,
        8,
    }
    assert {trial.temperature for trial in phases[EXACT].trials} == {0.0, 0.8}
    for name in ("writing", "coding"):
        samplings = [trial.sampling for trial in phases[EXACT].trials if trial.workload.name == name]
        assert [sampling.get("seed") for sampling in samplings] == [None, 3, 4, 5]
    assert [server for server, phase in phases.items() if phase.replays] == [WITH_DRAFT]


def test_the_acceptance_plan_asks_auto_every_question_where_answers_are_quick(
    workloads: dict[str, Workload],
) -> None:
    plan = acceptance_plan(workloads, ServeOptions(Path("d.gguf")), 3)

    def asked(server: str, setting: Setting, delay_ms: float) -> list[str]:
        return [
            question.id
            for phase in plan
            for trial in phase.trials
            for question in trial.workload.questions
            if (phase.server, trial.delay_ms, trial.workload.name) == (server, delay_ms, "coding")
            and setting in trial.settings
        ]

    every = [question.id for question in workloads["coding"].questions]
    assert asked(WITH_DRAFT, AUTO, 0.1) == asked(WITH_DRAFT, OFF_AGAIN, 0.1) == every
    assert asked(WITH_DRAFT, AUTO, 5.0) == asked(WITHOUT_DRAFT, AUTO, 5.0) == every
    assert asked(WITH_DRAFT, AUTO, 20.0) == asked(WITH_DRAFT, DRAFT, 5.0) == every[:1]


def test_a_plan_can_be_narrowed(workloads: dict[str, Workload]) -> None:
    plan = acceptance_plan(workloads, ServeOptions(None), 1)
    assert narrowed(plan, delays_ms=(), workloads=()) == plan
    phases = narrowed(plan, delays_ms=(5.0,), workloads=("coding", "warm-repeat"))
    assert [phase.server for phase in phases] == [WITH_DRAFT, WITHOUT_DRAFT, WITH_HISTORY]
    asked = {(trial.delay_ms, trial.workload.name) for phase in phases for trial in phase.trials}
    assert asked == {(5.0, "coding"), (5.0, "warm-repeat")}
    assert len(phases[0].concurrent_trials) == 2
    assert narrowed(plan, delays_ms=(7.0,), workloads=()) == ()


def test_a_sweep_is_every_proposer_with_every_width(workloads: dict[str, Workload]) -> None:
    first, second = sweep_plan(
        choose(workloads, ("coding", "warm-repeat")),
        ServeOptions(None, exact=True),
        modes=("ngram", "auto", "replay"),
        widths=(1, 8),
        delays_ms=(5.0, 20.0),
        with_peer=True,
    )
    names = ["ngram/1", "ngram/8", "auto/1", "auto/8", "auto", "replay"]
    assert [setting.name for setting in first.trials[0].settings] == names
    assert [(trial.delay_ms, trial.workload.name) for trial in first.trials] == [
        (5.0, "coding"),
        (20.0, "coding"),
    ]
    assert first.options == ("--speculate", "auto", "--exact")
    assert {trial.workload.name for trial in second.trials} == {"warm-repeat"}
    assert "--spec-history" in second.options


def test_a_quick_look_is_one_mesh(workloads: dict[str, Workload]) -> None:
    (phase,) = quick_plan(workloads, ServeOptions(None))
    assert all(len(trial.workload.questions) == 1 for trial in phase.trials)
    assert {trial.workload.is_raw for trial in phase.trials} == {False, True}


def test_off_again_is_off_under_another_name() -> None:
    assert OFF_AGAIN.fields == OFF.fields
    assert OFF_AGAIN.name == "off again"
    assert OFF_AGAIN != OFF


def test_settings_travel_in_the_request() -> None:
    assert OFF.fields == {"speculation": {"mode": "off"}}
    assert Setting("draft", 4, 1).fields == {"speculation": {"mode": "draft", "max_width": 4, "depth": 1}}
    assert (AUTO.name, Setting("draft", 4, 1).name) == ("auto", "draft/4 depth 1")


def test_every_other_turn_goes_backwards() -> None:
    assert in_turn((OFF, AUTO, DRAFT), 0) == (OFF, AUTO, DRAFT)
    assert in_turn((OFF, AUTO, DRAFT), 1) == (DRAFT, AUTO, OFF)


def test_a_replay_follows_what_it_replays() -> None:
    assert in_turn((OFF, AUTO, REPLAY), 0) == (OFF, AUTO, REPLAY)
    assert in_turn((OFF, AUTO, REPLAY), 1) == (AUTO, OFF, REPLAY)


def test_llama_cpp_drafts_only_with_a_draft_model() -> None:
    without = [setting.name for setting in peer_settings(None)]
    assert without == ["off", "ngram-simple", "ngram-cache"]
    more = peer_settings(Path("d.gguf"))[len(without) :]
    assert [setting.name for setting in more] == [
        "draft/2 p_min 0.0",
        "draft/4 p_min 0.0",
        "draft/8 p_min 0.5",
    ]
    assert all("d.gguf" in setting.options for setting in more)


def test_a_drafter_is_measured_beside_off_and_raw_text_beside_chat(workloads: dict[str, Workload]) -> None:
    drafter, replay = features_plan(workloads, ServeOptions(Path("/models/eagle3.gguf")), (0.75, 0.5))
    assert drafter.options == ("--speculate", "auto", "--draft", "/models/eagle3.gguf", "--draft-max", "8")
    asked = {
        (trial.delay_ms, trial.workload.name): (
            len(trial.workload.questions),
            [setting.name for setting in trial.settings],
        )
        for trial in drafter.trials
    }
    lengths = ["draft/1", "draft/2", "draft/4", "draft/8"]
    assert len(asked) == 5 * len(CATEGORIES)
    assert asked[0.1, "coding"] == (2, ["auto", "off again"])
    assert asked[5.0, "coding"] == asked[20.0, "rag"] == (1, ["draft", *lengths, "ngram", "auto"])
    assert asked[5.0, "coding-raw"] == (1, ["draft", "auto"])
    assert not drafter.replays
    assert replay.options == ("--speculate", "auto", "--set", "replay-rates=0.75,0.5")
    assert replay.replays
    assert {(trial.delay_ms, trial.workload.name) for trial in replay.trials} == {
        (delay_ms, "writing") for delay_ms in (0.1, 5.0, 20.0)
    }
    names = ["in step/1", "in step/2", "in step/4", "in step/8", "replay"]
    assert [setting.name for setting in in_turn((OFF, *replay.trials[0].settings), 1)] == ["off", *names]
    assert {setting.depth for setting in replay.trials[0].settings} == {1, None}
