"""Pure parts of `mesh bench chaos`: faults, how streams, repairs and meshes are judged, reports."""

import json
import os
import socket
from collections import Counter
from dataclasses import asdict, replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mesh.placement.host_capacity import HostCapacity
from mesh.placement.memory_estimate import Workload
from mesh.placement.planner import plan
from mesh.status import HostStatus, MeshStatus, StageStatus
from meshbench.chaos.cli import chaos
from meshbench.chaos.fault_kinds import ALL_KINDS, SCENARIOS, FaultKind
from meshbench.chaos.faults import draw_faults, listener, victim
from meshbench.chaos.harness import what_is_missing
from meshbench.chaos.options import least_memory_bytes
from meshbench.chaos.questions import questions
from meshbench.chaos.report import chaos_report
from meshbench.chaos.results import (
    ProbeOutcome,
    Repair,
    Scenario,
    account_of,
    by_kind,
    events_of,
    pauses_s,
    probe_outcome,
    repair_lines,
    silence_s,
    stream_lines,
    tally,
)
from meshbench.load_client.answers import AnswerRecord
from meshbench.load_client.client import MeshSnapshot, RunningRequest
from meshbench.load_client.json_values import restored
from meshbench.report_tools import Check, Report
from meshbench.request_record import HUNG_UP, Failure, Record
from meshbench.stress.checks import Expected
from meshbench.stress.scripts import Turn
from spanmesh_proto.errors import ModelDoesNotFit
from tests.mesh.placement.test_planner import model as made_up_model


def stream(
    *parts_s: float,
    sent_s: float = 0.0,
    ended_s: float = 10.0,
    text: str = "abc",
    ids: tuple[int, ...] = (1, 2, 3),
    failure: Failure | None = None,
    bytes_s: tuple[float, ...] = (),
) -> AnswerRecord:
    record = Record(
        number=0,
        prompt_id="q",
        scheduled_s=sent_s,
        ready_s=sent_s,
        sent_s=sent_s,
        ended_s=ended_s,
        parts_s=parts_s,
        last_s=ended_s,
        num_input_tokens=5,
        num_cached_tokens=0,
        num_output_tokens=3,
        has_usage=True,
        finish=None if failure else "length",
        failure=failure,
    )
    return AnswerRecord(record, text, ids, bytes_s=bytes_s or parts_s)


def expected() -> dict[str, Expected]:
    return {"q": Expected(Turn("Say so.", 3), stream(1.0, 2.0, 3.0))}


def repair(kind: FaultKind = FaultKind.FIRST, **fields: Any) -> Repair:
    plain = Repair(
        number=0,
        kind=kind,
        host="host1",
        at_s=1.0,
        hold_s=None,
        whole_s=9.0,
        repair_s=0.3,
        pauses_s=(1.0, 2.0),
        silence_s=1.0,
        newcomer=ProbeOutcome(1.0, "answer"),
        is_warm=True,
        reason="layers [0, 10) to host4 (had a replica)",
        rejoined=(),
        problem="",
    )
    return replace(plain, **fields)


@given(
    count=st.integers(0, 60),
    kinds=st.lists(st.sampled_from(FaultKind), min_size=1, unique=True),
    seed=st.integers(0, 2**32),
    is_short=st.booleans(),
)
def test_every_kind_of_harm_comes_about_as_often(
    *, count: int, kinds: list[FaultKind], seed: int, is_short: bool
) -> None:
    faults = draw_faults(count, kinds, seed, is_short=is_short)
    assert faults == draw_faults(count, kinds, seed, is_short=is_short)
    assert [fault.number for fault in faults] == list(range(count))
    times = Counter(fault.kind for fault in faults)
    assert set(times) <= set(kinds)
    assert max((times[kind] for kind in kinds), default=0) - min(times[kind] for kind in kinds) <= 1
    # A stage that is stopped or out of reach is noticed before it is back.
    assert all(fault.wait_s > 0 and 2.0 < fault.hold_s <= (3.5 if is_short else 8.0) for fault in faults)


@given(pick=st.floats(0, 1, exclude_max=True), kind=st.sampled_from(FaultKind), num_stages=st.integers(1, 5))
def test_a_harm_hits_a_stage_that_there_is(pick: float, kind: FaultKind, num_stages: int) -> None:
    hit = victim(kind, pick, num_stages)
    assert 0 <= hit < num_stages
    if kind is FaultKind.FIRST:
        assert hit == 0
    if kind is FaultKind.TAIL:
        assert hit == num_stages - 1
    if kind is FaultKind.MIDDLE and num_stages > 2:
        assert 0 < hit < num_stages - 1


def test_questions_are_greedy_or_seeded_with_penalties() -> None:
    asked = questions(12, (5, 9), seed=3)
    assert asked == questions(12, (5, 9), seed=3)
    assert len({question.turn.text for question in asked}) == 12
    bodies = [json.loads(question.request.body) for question in asked]
    assert {body["max_tokens"] for body in bodies} == {5, 9}
    drawn = [body for body in bodies if body["temperature"]]
    assert len(drawn) == 6
    assert all("seed" in body and any("penalty" in name for name in body) for body in drawn)
    assert all(body["return_token_ids"] and body["ignore_eos"] for body in bodies)


def test_a_pause_is_the_longest_gap_that_touches_the_time() -> None:
    one = stream(1.0, 1.1, 6.1, 6.2, 9.2, bytes_s=(1.0, 1.1, 2.1, 3.1, 6.1, 6.2, 9.2))
    assert one.pause_s(2.0, 7.0) == pytest.approx(5.0)
    assert one.pause_s(6.15, 7.0) == pytest.approx(3.0)
    assert one.pause_s(9.5, 20.0) == 0.0
    # Comment pings are no tokens, but somebody is there.
    assert one.silence_s(2.0, 6.15) == pytest.approx(3.0)
    other = stream(5.0, 5.5, sent_s=4.0)
    # The other had not asked yet; neither counts who has been answered before.
    everybody = [one, other, stream(0.1, 1.9, ended_s=2.0), stream(2.9, 3.0, sent_s=1.0)]
    assert pauses_s(everybody, 2.5, 6.0) == pytest.approx((0.1, 5.0))
    assert silence_s(everybody, 2.5, 6.0) == pytest.approx(3.0)
    assert (pauses_s([other], 2.5, 6.0), silence_s([other], 2.5, 6.0)) == ((), 0.0)


def test_a_stream_survives_json() -> None:
    one = stream(1.0, 2.0, failure=Failure("http_503", "later", "2"), bytes_s=(0.5, 1.0, 2.0))
    assert restored(AnswerRecord, json.loads(json.dumps(asdict(one)))) == one


def test_streams_that_fail_or_differ_count_and_refusals_do_not() -> None:
    streams = [
        stream(1.0, 2.0, 3.0),
        stream(1.0, 2.0, 3.0, text="abd"),
        stream(1.0, 2.0, 3.0, ids=(1, 2, 4)),
        stream(1.0, failure=Failure("stream_error", "gone")),
        stream(failure=Failure("http_503", "come again", "2")),
    ]
    found = tally(streams, expected(), is_exact=True)
    assert (found.num_streams, found.num_failed, found.num_unlike, found.num_refused) == (4, 1, 2, 1)
    assert [problem.kind for problem in found.problems] == ["text", "failure", "text"]
    fast = tally(streams, expected(), is_exact=False)
    assert [problem.kind for problem in fast.problems] == ["failure"]
    assert [line.verdict for line in stream_lines(found, "now", is_exact=True)] == ["missed", "missed"]
    assert [line.verdict for line in stream_lines(fast, "now", is_exact=False)] == ["missed"]


def test_a_client_that_hangs_up_is_no_failed_stream_but_what_it_got_must_be_right() -> None:
    left = Failure(HUNG_UP, "left")
    streams = [
        stream(1.0, 2.0, 3.0),
        stream(failure=left, text="", ids=()),
        stream(1.0, failure=left, text="a", ids=(1,)),
    ]
    found = tally(streams, expected(), is_exact=True)
    assert (found.num_streams, found.num_failed, found.num_unlike, found.problems) == (3, 0, 0, ())
    assert (found.num_hung_up_early, found.num_hung_up_late) == (1, 1)
    lines = stream_lines(found, "now", is_exact=True)
    assert [line.verdict for line in lines] == ["met", "met"]
    assert lines[0].note == "of 3; 2 clients disconnected, 1 of them before the first token"
    assert lines[1].note == "of 1 and 1 beginnings, text and token ids"
    for unlike in (
        stream(1.0, failure=left, text="b", ids=(1,)),
        stream(1.0, failure=left, text="a", ids=(2,)),
    ):
        found = tally([*streams, unlike], expected(), is_exact=True)
        assert (found.num_failed, found.num_unlike) == (0, 1)
        assert [problem.kind for problem in found.problems] == ["text"]


def test_a_pause_in_which_the_client_hung_up_is_not_measured() -> None:
    one = stream(1.0, 2.0, ended_s=4.0, failure=Failure(HUNG_UP, "left"))
    assert (pauses_s([one], 1.5, 5.0), silence_s([one], 1.5, 5.0)) == ((), 0.0)
    assert pauses_s([one], 1.5, 3.0) == (1.0,)


def test_a_probe_gets_an_answer_or_a_503_that_says_when_to_come_again() -> None:
    assert probe_outcome(stream(3.0, 4.0, sent_s=1.0)) == ProbeOutcome(2.0, "answer")
    refused = stream(sent_s=1.0, ended_s=3.5, failure=Failure("http_503", "later", "2"))
    assert probe_outcome(refused) == ProbeOutcome(2.5, "503")
    silent = stream(sent_s=1.0, ended_s=3.5, failure=Failure("http_503", "later"))
    broken = stream(1.5, sent_s=1.0, ended_s=3.5, failure=Failure("stream_error", "gone"))
    assert not probe_outcome(silent).is_sound
    assert probe_outcome(broken).outcome == "stream_error: gone"


WHOLE = MeshStatus(
    ready=True,
    phase="serving",
    hosts=(HostStatus(name="host1", ready=True), HostStatus(name="host2", ready=True, copies=("[0, 30)",))),
    stages=(StageStatus(host="host1", layers=(0, 30), address="10.0.0.1:5"),),
)


def test_a_mesh_is_whole_when_all_are_back_and_all_streams_go_on() -> None:
    def missing(status: MeshStatus | None, *running: RunningRequest) -> str | None:
        snapshot = MeshSnapshot(20.0, status, running)
        return what_is_missing(snapshot, since_s=10.0, num_hosts=2, with_replicas=True)

    assert missing(WHOLE, RunningRequest(1.0, 11.0), RunningRequest(12.0, None)) is None
    assert missing(None) == "the head does not answer"
    assert "repairing" in str(missing(replace(WHOLE, ready=False, phase="repairing")))
    assert missing(replace(WHOLE, hosts=WHOLE.hosts[1:])) == "1 of 2 hosts are ready"
    cold = tuple(HostStatus(name=name, ready=True) for name in ("host1", "host2"))
    assert missing(replace(WHOLE, hosts=cold)) == "layers [0, 30) have no replica"
    assert (
        missing(WHOLE, RunningRequest(1.0, 9.0), RunningRequest(1.0, None))
        == "2 of 2 streams have not gone on"
    )


def test_the_heads_log_tells_how_layers_moved() -> None:
    log = "\n".join(
        (
            "words for people",
            json.dumps({"event": "ring_broken", "reason": "a stream ended"}),
            json.dumps(
                {"event": "repaired", "seconds": 0.25, "how": "layers [0, 9) to host4 (had a replica)"}
            ),
            json.dumps(
                {"event": "repaired", "seconds": 1.0, "how": "layers [9, 12) to host2, [12, 15) to host3"}
            ),
            '{"event": "half a li',
        )
    )
    events = events_of(log)
    assert len(events) == 3
    warm = account_of(events[:2])
    assert (warm.num_repairs, warm.is_warm, warm.repair_s) == (1, True, 0.25)
    assert warm.reason == "a stream ended; layers [0, 9) to host4 (had a replica)"
    assert account_of(events).is_warm is False
    assert account_of([]).is_warm is None


def test_layers_that_move_off_a_host_that_leaves_are_accounted_for() -> None:
    def event(name: str, second: int, **fields: Any) -> dict[str, Any]:
        return {"event": name, "timestamp": f"2026-11-21T21:00:0{second}Z", **fields}

    how = "layers [0, 9) to host4"
    found = account_of(
        [event("moving", 1, how=how), event("ring_whole_again", 3), event("repaired", 4, how=how, seconds=1)]
    )
    assert (found.num_repairs, found.is_warm, found.repair_s, found.reason) == (2, False, 3.0, how)
    # The ring was whole again after a repair, too: that is not counted twice.
    assert account_of([event("ring_whole_again", 3)]).num_repairs == 0


def test_lines_hold_the_pauses_against_their_bounds() -> None:
    repairs = [
        repair(),
        repair(pauses_s=(3.0, 3.5), is_warm=False),
        repair(pauses_s=(16.0,), is_warm=None, newcomer=ProbeOutcome(4.0, "http_500: oh")),
    ]
    lines = {line.title: line for line in repair_lines(repairs)}
    measured = {
        title.removeprefix("faults: "): (line.measured, line.verdict) for title, line in lines.items()
    }
    assert measured["pause seen by a client, median, s"] == (3.0, "met")
    assert measured["pause, worst, s"] == (16.0, "missed")
    assert measured["pause where a spare had the layers loaded, median, s"] == (1.5, "met")
    assert measured["a new request's answer or 503, worst, s"] == (4.0, "missed")
    assert measured["new requests with neither"] == (1, "missed")
    assert {line.verdict for line in repair_lines([])} == {"not measured"}


def test_kinds_are_summed_up_apart() -> None:
    first, second = by_kind(
        [
            repair(),
            repair(FaultKind.STOP, whole_s=None, newcomer=None, pauses_s=()),
            repair(pauses_s=(4.0,), is_warm=False),
        ]
    )
    assert (first.kind, first.count, first.num_warm) == ("first", 2, 1)
    assert (first.median_pause_s, first.worst_pause_s) == (2.0, 4.0)
    assert (second.kind, second.num_not_whole, second.median_whole_s) == ("stop", 1, None)
    assert (second.worst_newcomer_s, second.worst_pause_s) == (None, None)


def scenario(*, failed: int = 0, pauses_s: tuple[float, ...] = (1.0, 2.0)) -> Scenario:
    streams = [stream(1.0, failure=Failure("stream_error", "gone"))] * failed + [stream(1.0, 2.0, 3.0)]
    found = tally(streams, expected(), is_exact=True)
    repairs = (
        repair(pauses_s=pauses_s),
        repair(FaultKind.CUT_OFF, whole_s=None, hold_s=3.0, problem="| no host"),
    )
    lines = (*stream_lines(found, "faults", is_exact=True), *repair_lines(repairs))
    return Scenario("faults", lines, repairs, found.problems)


def report(*scenarios: Scenario, holds: bool = True, failures: tuple[str, ...] = ()) -> Report:
    return chaos_report({"seed": 1}, scenarios, [Check("nothing left", holds, "none")], failures)


def test_a_report_is_good_unless_something_was_lost() -> None:
    assert report(scenario()).is_good
    # A long pause is a figure.
    assert report(scenario(pauses_s=(60.0,))).is_good
    assert not report(scenario(failed=1)).is_good
    assert not report(scenario(), holds=False).is_good
    assert not report(scenario(), failures=("no lab",)).is_good
    broken_off = replace(scenario(), failures=("the mesh did not come back",))
    assert not report(broken_off).is_good


def test_the_report_says_it_in_words_and_in_json() -> None:
    bad = report(scenario(failed=1, pauses_s=(60.0,)))
    page, text, fields = bad.markdown(), bad.text(), json.loads(bad.json())
    assert FaultKind.CUT_OFF.meaning in page
    assert "never: / no host" in page
    assert "q: failure: stream_error: gone" in page
    assert "| faults: failed streams | ≤ 0 | 1.00 | missed | of 2 |" in page
    assert "missed" in text
    assert "bad stream: q" in text
    assert fields["good"] is False
    assert fields["scenarios"][0]["repairs"][1]["problem"] == "| no host"
    assert [each["kind"] for each in fields["scenarios"][0]["kinds"]] == ["first", "cut-off"]


def test_the_tightest_memory_fits_as_many_hosts_and_no_fewer() -> None:
    model, workload = made_up_model(), Workload(256, 2)
    memory_bytes = least_memory_bytes(model, workload, 3)

    def place(num_hosts: int, memory_bytes: int) -> int:
        hosts = [HostCapacity(f"host{index}", memory_bytes, 1.0) for index in range(num_hosts)]
        return len(plan(model, hosts, workload, num_stages=num_hosts).stages)

    assert place(3, memory_bytes) == 3
    for num_hosts, less in ((3, 2**21), (2, 0)):
        with pytest.raises(ModelDoesNotFit):
            place(num_hosts, memory_bytes - less)


def test_the_listener_of_a_port_is_found() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        assert listener([os.getppid(), os.getpid()], port) == os.getpid()
    assert listener([os.getpid()], port) is None


def test_the_command_knows_what_there_is() -> None:
    options = {param.name: param for param in chaos.params}
    assert options["kinds"].type.convert(",".join(reversed(FaultKind)), None, None) == ALL_KINDS
    assert options["scenarios"].type.convert(",".join(SCENARIOS), None, None) == SCENARIOS
