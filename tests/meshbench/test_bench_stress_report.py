"""The report of `mesh bench stress`, from results that were made up."""

import json
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from mesh.placement.memory_estimate import StageSizes, Workload
from mesh.status import MeshStatus, SessionsStatus, StageStatus
from meshbench.lab.memory_watch import MemorySample
from meshbench.load_client.answers import AnswerRecord, Outcome
from meshbench.report_tools import Check, Line, PairedRatio
from meshbench.request_record import HUNG_UP, Failure, Record
from meshbench.serving_metrics import Slo
from meshbench.stress.checks import (
    AnswerCheck,
    ClientCounts,
    Expected,
    Problem,
    Step,
    answer_checks,
    check_answers,
    flatness_check,
    leak_check,
    step_of,
)
from meshbench.stress.memory import footprints, growth_of
from meshbench.stress.report import Findings, RoleMemory, stress_report
from meshbench.stress.scripts import Turn
from meshbench.under_test.links import KnownLinks
from meshbench.under_test.status_figures import RingLink
from stages.slicing.model_facts import read_model_facts

if TYPE_CHECKING:
    from meshbench.lab.memory_watch import Role

MIB = 2**20
STAGES = (
    StageStatus(host="host1", layers=(0, 15), windows=9, mean_compute_ms=2.0, mean_queue_ms=0.5),
    StageStatus(index=1, host="host2", layers=(15, 30), windows=9, mean_compute_ms=2.5, mean_queue_ms=0.1),
)


def answer(number: int, *, failure: Failure | None = None) -> AnswerRecord:
    record = Record(
        number,
        "q",
        0.0,
        0.0,
        0.0,
        1.0,
        (0.25, 0.5),
        0.5,
        7,
        None,
        2,
        has_usage=True,
        finish="length",
        failure=failure,
    )
    return AnswerRecord(record, " a b", (1, 2), ())


def step(
    concurrency: int,
    count: int,
    *,
    fails: bool = False,
    peer: float | None = None,
    slos: tuple[Slo, ...] = (),
) -> Step:
    answers = tuple(answer(number) for number in range(count))
    if fails:
        answers = (*answers, answer(count, failure=Failure("http_500", "a stage went away")))
    answer_check = check_answers(
        answers, {"q": Expected(Turn("?", 2), answer(0))}, is_exact=True, text_of=None
    )
    return step_of(concurrency, Outcome(answers, 2.0), answer_check, peer, slos=slos)


def samples(leak_bytes_per_s: float = 0.0) -> list[MemorySample]:
    """A minute of two hosts; what is no part of the mesh is beside them."""
    sizes: dict[Role, int] = {"stage": 200 * MIB, "ray": 100 * MIB, "other": 900 * MIB}
    return [
        MemorySample(look, float(look), host, 10 * host + place, role, size, size + leaked)
        for look in range(60)
        for host in (1, 2)
        for place, (role, size) in enumerate(sizes.items())
        for leaked in [round(leak_bytes_per_s * look) if role == "stage" else 0]
    ]


@pytest.fixture
def findings(smollm2_path: Path) -> Findings:
    facts = read_model_facts(smollm2_path)
    sizes = StageSizes(facts, Workload(256, 1))
    looks = samples()
    growth = growth_of([look.at_s for look in looks if look.pid == 10], [200.0 * MIB] * 60)
    assert growth is not None
    return Findings(
        conditions={"preset": "ramp", "seed": 1},
        steps=(step(1, 4, peer=2.0), step(2, 8, peer=2.0)),
        has_ramp=True,
        saturation=None,
        lines=(Line("tokens/s | ratio", 2.0, 2.5, note="a note"), Line("not asked", None, 1.0)),
        checks=(
            Check("all sound", holds=True, detail="12 answers"),
            Check("flat", holds=None, detail="short"),
        ),
        footprints=tuple(footprints(STAGES, (1, 2), sizes, looks)),
        stages=STAGES,
        memory=(RoleMemory(1, "stage", 1, 200 * MIB, (growth,)),),
        samples=tuple(looks),
        failures=(),
    )


def test_a_report_tells_every_part_on_a_page_and_to_programs(findings: Findings, tmp_path: Path) -> None:
    report = stress_report(findings)
    report.write(tmp_path / "out")
    page = (tmp_path / "out" / "report.md").read_text()
    for words in ("preset ramp", "| tokens/s / ratio | ≥ 2.5 | 2.00 | missed | a note |", "Not saturated"):
        assert words in page
    assert "| 2 | 8 of 8 | 8.0 | 2.0 | 4.00 | 250.0 |" in page
    assert page.count("![") == len(list((tmp_path / "out").glob("*.png"))) == 2
    found = json.loads((tmp_path / "out" / "report.json").read_text())
    assert found["good"]
    assert [step["ratio"] for step in found["steps"]] == [2.0, 4.0]
    assert found["lines"][1]["verdict"] == "not measured"
    assert len(found["samples"]) == len(findings.samples)
    assert "samples" not in json.loads(report.json())
    assert "unknown  flat: short" in report.text()


def test_a_report_counts_clients_that_hang_up(findings: Findings, tmp_path: Path) -> None:
    counts = ClientCounts(800, 530, 0, 200, 70, 1, 60000, 20000, None)
    found = stress_report(replace(findings, clients=counts))
    found.write(tmp_path)
    assert "| disconnected during the answer | 70 |" in (tmp_path / "report.md").read_text()
    assert "texts different from the one generated alone: 1\n" in found.text()
    assert json.loads(found.json())["clients"]["num_finished"] == 530
    assert json.loads(stress_report(findings).json())["clients"] is None


def test_a_report_of_a_running_mesh_names_its_links_and_what_is_hidden_from_clients(
    findings: Findings, tmp_path: Path
) -> None:
    links = KnownLinks({"links": [], "round": None}, "measured before the load")
    found = stress_report(
        replace(
            findings,
            footprints=(),
            memory=(),
            samples=(),
            links=links,
            ring_links=(RingLink("head", "host1", 5.25, 9),),
            groups_found={8: 2},
            omitted=("memory of processes",),
        )
    )
    assert found.is_good
    found.write(tmp_path)
    page = (tmp_path / "report.md").read_text()
    assert "## Not measured from outside\n\n- memory of processes\n" in page
    assert "| head | host1 | 9 | 5.25 |" in page
    assert "Groups of sessions found best, by the number of sessions: 2 for 8." in page
    assert "no other host has joined: there is no link to measure" in page
    assert "## Memory, MiB" not in page
    assert "not measured from outside: memory of processes" in found.text()
    figures = json.loads(found.json())
    assert figures["links"] == links.found
    assert figures["ring_links"][0]["wire_ms"] == 5.25
    assert figures["not_measured_from_outside"] == ["memory of processes"]
    assert "not measured from outside" not in stress_report(findings).text()


def test_goodput_has_a_column_where_limits_were_given(findings: Findings, tmp_path: Path) -> None:
    within, beyond = (step(1, 4, slos=(Slo("ttft", limit_ms),)) for limit_ms in (300.0, 200.0))
    stress_report(replace(findings, steps=(within, beyond))).write(tmp_path)
    page = (tmp_path / "report.md").read_text()
    assert "| problems | good requests/s |" in page
    assert "| 0 | 2.00 (100%) |" in page
    assert "| 0 | 0.00 (0%) |" in page
    stress_report(findings).write(tmp_path)
    assert "good requests/s" not in (tmp_path / "report.md").read_text()


def test_requests_that_hang_up_are_no_part_of_a_step_s_figures() -> None:
    left = answer(1, failure=Failure(HUNG_UP, "left"))
    found = step_of(2, Outcome((answer(0), left), 2.0), AnswerCheck(2, 1, 0, (), num_hung_up_early=1))
    assert (found.figures.completed, found.figures.failed) == (1, 0)


def test_a_missed_line_is_a_figure_but_a_failed_check_is_a_failure(findings: Findings) -> None:
    assert stress_report(findings).is_good
    failed = replace(findings, checks=(Check("sound", holds=False, detail=""),))
    assert not stress_report(failed).is_good
    assert not stress_report(replace(findings, failures=("no answer",))).is_good


def test_what_is_no_part_of_the_mesh_does_not_weigh_on_a_stage(findings: Findings) -> None:
    for each in findings.footprints:
        assert each.process_bytes == 200 * MIB
        assert each.host_bytes == 300 * MIB
        assert each.host_overhead_bytes - each.overhead_bytes == 100 * MIB


def test_every_step_is_checked_by_itself() -> None:
    sound, broken = answer_checks([step(1, 2), step(2, 2, fails=True)], is_exact=True)
    assert sound.holds
    assert not broken.holds
    assert "1 failure" in broken.detail
    assert "a stage went away" in broken.detail
    forked = replace(step(4, 1), answer_check=AnswerCheck(4, 4, 1, ()))
    (fast,) = answer_checks([forked], is_exact=False)
    assert fast.holds
    assert "1 of 4 texts differ from alone" in fast.detail
    assert forked.answer_check.fork_rate == 0.25
    left = replace(step(4, 1), answer_check=AnswerCheck(4, 4, 0, (), num_hung_up_early=1, num_hung_up_late=1))
    assert answer_checks([left], is_exact=True)[0].detail.endswith("2 clients disconnected")
    assert AnswerCheck(1, 0, 0, (Problem("text", "q", ""),)).by_kind == {"text": 1}


@pytest.mark.parametrize(("running", "open_at_stages"), [(0, 0), (1, 0), (0, 2)])
def test_a_session_that_somebody_still_holds_is_found(running: int, open_at_stages: int) -> None:
    status = MeshStatus(
        sessions=SessionsStatus(running=running),
        stages=(StageStatus(open_sessions=0), StageStatus(open_sessions=open_at_stages)),
    )
    assert leak_check(status).holds is (running + open_at_stages == 0)


def test_memory_is_judged_by_process_and_only_if_there_was_time() -> None:
    assert flatness_check(samples(), "stage", 60.0).holds is True
    assert flatness_check(samples(leak_bytes_per_s=MIB), "stage", 60.0).holds is False
    assert flatness_check(samples(leak_bytes_per_s=MIB), "stage", 10.0).holds is None
    assert flatness_check(samples(), "join", 60.0).holds is None


def test_a_ratio_of_paired_rounds_has_an_interval() -> None:
    # Student's t with one degree of freedom: 12.706 standard errors.
    two = PairedRatio.of([(2.0, 1.0), (8.0, 1.0)])
    assert two.ratio == pytest.approx(4.0)
    assert two.low == pytest.approx(4.0 / 2**12.706, rel=1e-3)
    assert two.high == pytest.approx(4.0 * 2**12.706, rel=1e-3)
    same = PairedRatio.of([(3.0, 4.0)] * 10)
    assert (same.low, same.ratio, same.high) == pytest.approx((0.75, 0.75, 0.75))
    (_, bound) = same.lines("tokens/s", "the other", "10 rounds")
    assert bound.verdict == "missed"
    (_, bound) = PairedRatio.of([(1.0, 1.0)]).lines("tokens/s", "the other", "1 round")
    assert bound.verdict == "missed", "a single round shows nothing"
