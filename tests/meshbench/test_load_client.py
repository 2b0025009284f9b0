"""The client that sends the requests of a load: in which order, for whom, and what it hands back."""

import asyncio
import contextlib
import itertools
import json
import os
import signal
import time
from dataclasses import asdict, replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mesh.status import MeshStatus
from meshbench.load_client import process
from meshbench.load_client.answers import AnswerRecord, Outcome
from meshbench.load_client.client import LoadClient
from meshbench.load_client.hang_ups import NO_HANG_UPS, HangUps, HangUpTime
from meshbench.load_client.json_values import restored
from meshbench.load_client.process import Run, Turns, send
from meshbench.load_client.schedule import Request, Schedule
from meshbench.load_generator import Job
from meshbench.request_record import HUNG_UP, Record
from spanmesh_proto.errors import MeshError
from tests.support.peer_server import ANSWER, END, WORD, Reply, peer_server


def ended(job: Job) -> Record:
    return Record(job.number, job.prompt_id, 0.0, 0.0, 0.0, 1.0)


@given(st.lists(st.integers(1, 3), min_size=1, max_size=5), st.integers(1, 40), st.randoms())
def test_turns_follow_one_another_and_chats_come_round(sizes: list[int], count: int, random: Any) -> None:
    chats = [
        [Request(f"c{chat}", f"{chat}/{turn}") for turn in range(size)] for chat, size in enumerate(sizes)
    ]
    turns = Turns(chats, lambda given: given >= count)
    under_way: list[Job] = []
    sent: list[bytes] = []
    for job in turns:
        chat, turn = map(int, job.body.split(b"/"))
        # Whatever turn comes, the one before it was ended as often as that.
        ends = sent.count(b"%d/%d" % (chat, turn - 1)) - sum(
            other.body == b"%d/%d" % (chat, turn - 1) for other in under_way
        )
        assert turn == 0 or ends > sent.count(job.body)
        sent.append(job.body)
        under_way.append(job)
        while under_way and random.random() < 0.5:
            turns.ended(ended(under_way.pop(random.randrange(len(under_way)))))
    assert len(sent) == count


def test_a_load_asks_whole_chats_of_a_real_server_and_keeps_what_it_said() -> None:
    with peer_server(lambda number: Reply(ANSWER if number != 3 else WORD + END)) as peer:
        chats = (
            (
                Request("a, turn 1", '{"chat": 0, "turn": 0}'),
                Request("a, turn 2", '{"chat": 0, "turn": 1}'),
            ),
            (Request("b, turn 1", '{"chat": 1, "turn": 0}'),),
        )
        outcome = asyncio.run(send(Schedule(peer.url, chats, num_at_once=1, num_requests=4)))
    assert [(body["chat"], body["turn"]) for body in peer.bodies] == [(0, 0), (0, 1), (1, 0), (0, 0)]
    assert [one.record.prompt_id for one in outcome.answers] == [
        "a, turn 1",
        "a, turn 2",
        "b, turn 1",
        "a, turn 1",
    ]
    assert [one.text for one in outcome.answers] == [" word word"] * 3 + [" word"]
    assert [bool(one.faults) for one in outcome.answers] == [False, False, False, True]
    assert outcome.tokens_per_s == pytest.approx(7 / outcome.duration_s)


@pytest.mark.quiet
def test_a_load_by_time_sends_nothing_after_it() -> None:
    with peer_server(lambda _number: Reply(ANSWER)) as peer:
        begun_s = time.perf_counter()
        chats = ((Request("a", "{}"),),)
        outcome = asyncio.run(send(Schedule(peer.url, chats, num_at_once=2, duration_s=0.3)))
    assert len(outcome.answers) == len(peer.bodies) > 2
    assert max(one.record.sent_s for one in outcome.answers) - begun_s < 0.5 <= outcome.duration_s + 0.3


def test_a_schedule_survives_its_way_through_json() -> None:
    chats = ((Request("a", "{}", hang_up_time=HangUpTime(3, 0.5)), Request("b", "{}", is_streamed=False)),)
    schedule = Schedule("http://x", chats, 2, arrivals_s=(0.0, 1.0), api_keys=("k", None))
    for one in (schedule, replace(schedule, arrivals_s=None, hang_ups=HangUps(0.5, 7), is_patient=True)):
        assert restored(Schedule, json.loads(json.dumps(asdict(one)))) == one


WHOLE = json.dumps(
    {
        "choices": [{"message": {"content": " word word"}, "token_ids": [5, 6], "finish_reason": "length"}],
        "usage": {
            "prompt_tokens": 7,
            "completion_tokens": 2,
            "prompt_tokens_details": {"cached_tokens": 3},
        },
    }
)


def request(*, is_streamed: bool, hang_up_time: HangUpTime | None = None) -> Request:
    body = json.dumps({"stream": is_streamed})
    return Request("a", body, is_streamed=is_streamed, hang_up_time=hang_up_time)


def test_clients_with_keys_ask_a_real_server_for_streams_and_whole_answers() -> None:
    def reply(number: int) -> Reply:
        return Reply(ANSWER if peer.bodies[number]["stream"] else WHOLE)

    with peer_server(reply) as peer:
        requests = [request(is_streamed=number % 2 == 0) for number in range(6)]
        schedule = Schedule.once(peer.url, requests, 2, api_keys=("one", "two"))
        outcome = asyncio.run(send(schedule))
    assert [one.text for one in outcome.answers] == [" word word"] * 6
    assert [one.token_ids for one in outcome.answers] == [(), (5, 6)] * 3
    assert [one.record.num_cached_tokens for one in outcome.answers] == [None, 3] * 3
    assert [one.record.failure for one in outcome.answers] == [None] * 6
    assert [one.faults for one in outcome.answers] == [()] * 6
    assert {headers["authorization"] for headers in peer.headers} == {"Bearer one", "Bearer two"}


def test_a_client_hangs_up_before_the_first_token_and_in_the_answer_and_the_next_one_asks() -> None:
    """Each answer of this server stays open until its client has gone."""
    gone: list[int] = []
    numbers = itertools.count()
    are_gone = asyncio.Event()

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        length = int(head.lower().partition(b"content-length: ")[2].split(b"\r\n")[0])
        await reader.readexactly(length)
        if number := next(numbers):
            chunk = b'data: {"choices": [{"delta": {"content": "x"}, "token_ids": [9]}]}\n\n' * number
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n\r\n" + chunk)
        with contextlib.suppress(ConnectionError):
            assert await reader.read() == b""
        gone.append(number)
        writer.close()
        if len(gone) == 3:
            are_gone.set()

    async def ask() -> Outcome:
        server = await asyncio.start_server(answer, "127.0.0.1", 0)
        requests = (
            request(is_streamed=False, hang_up_time=HangUpTime(0, 0.0)),
            request(is_streamed=True, hang_up_time=HangUpTime(1, 0.0)),
            request(is_streamed=True, hang_up_time=HangUpTime(2, 0.01)),
        )
        async with asyncio.timeout(30), server:
            port = server.sockets[0].getsockname()[1]
            outcome = await send(Schedule.once(f"http://127.0.0.1:{port}", requests))
            await are_gone.wait()
        return outcome

    outcome = asyncio.run(ask())
    assert [one.record.failure and one.record.failure.kind for one in outcome.answers] == [HUNG_UP] * 3
    assert [one.text for one in outcome.answers] == ["", "x", "xx"]
    assert sorted(gone) == [0, 1, 2]


@pytest.mark.parametrize(
    ("reply", "kind"),
    [(Reply('{"error": {"message": "no"}}', 429), "http_429"), (Reply("{"), "not_an_answer")],
)
def test_what_the_server_does_is_told_though_its_client_was_to_hang_up(reply: Reply, kind: str) -> None:
    with peer_server(lambda _number: reply) as peer:
        asked = request(is_streamed=False, hang_up_time=HangUpTime(0, 60.0))
        (one,) = asyncio.run(send(Schedule.once(peer.url, [asked]))).answers
    assert one.record.failure is not None
    assert one.record.failure.kind == kind


def test_clients_that_hang_up_ask_the_next_question_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    # Whose request failed would wait for longer than this test.
    monkeypatch.setattr(process, "_LEAST_PATIENCE_S", 3600.0)
    monkeypatch.setattr(process, "_MOST_PATIENCE_S", 3600.0)
    chats = ((Request("q", json.dumps({"max_tokens": 2})),),)

    async def keep_asking(url: str, hang_ups: HangUps) -> list[AnswerRecord]:
        ended: list[AnswerRecord] = []

        def on_end(stream: AnswerRecord) -> None:
            ended.append(stream)
            if len(ended) == 12:
                run.end()

        run = Run(Schedule(url, chats, hang_ups=hang_ups, is_patient=True, timeout_s=30.0), on_end)
        async with asyncio.timeout(30):
            await run.carry_out()
        return ended

    with peer_server(lambda _number: Reply(ANSWER)) as peer:
        all_wait = asyncio.run(keep_asking(peer.url, NO_HANG_UPS))
        some_leave = asyncio.run(keep_asking(peer.url, HangUps(0.9, 3)))
    assert [stream.record.failure for stream in all_wait] == [None] * 12
    kinds = {stream.record.failure and stream.record.failure.kind for stream in some_leave}
    assert kinds == {None, HUNG_UP}


def test_a_client_whose_request_failed_waits_as_long_as_the_server_wants(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    waits_s: list[float] = []

    async def note(wait_s: float) -> None:
        waits_s.append(wait_s)

    replies = [Reply("no", 503, {"Retry-After": wait}) for wait in ("0", "1.5", "60", "soon")]
    with peer_server(lambda number: replies[number] if number < 4 else Reply(ANSWER)) as peer:
        requests = [Request("q", "{}")] * 5
        patient = Schedule.once(peer.url, requests, is_patient=True)
        with monkeypatch.context() as patch:
            patch.setattr(asyncio, "sleep", note)
            outcome = asyncio.run(process.send(patient))
    assert [one.is_refused for one in outcome.answers] == [True] * 4 + [False]
    assert waits_s == [0.2, 1.5, 3.0, 0.2]


def test_a_load_runs_in_the_background_beside_others_until_it_is_ended() -> None:
    with peer_server(lambda _number: Reply(ANSWER)) as peer, LoadClient(None) as client:
        load = client.start(Schedule(peer.url, ((Request("again", "{}"),),), num_at_once=2))
        probe = client.start(Schedule.once(peer.url, [Request("probe", "{}")])).wait(30.0)
        assert [one.record.prompt_id for one in probe.answers] == ["probe"]
        while len(load.answers) < 3:
            assert not load.is_over
            time.sleep(0.01)
        snapshot = client.snapshot(peer.url)
        # Something else than a mesh tells nothing of one.
        assert snapshot.status == MeshStatus()
        now_s = time.perf_counter()
        assert now_s - 30.0 < snapshot.at_s < now_s
        outcome = load.end(timeout_s=30.0)
        assert load.is_over
        assert list(outcome.answers) == load.answers
        assert {one.record.prompt_id for one in outcome.answers} == {"again"}
        assert all(now_s - 30.0 < one.record.sent_s < one.bytes_s[0] for one in outcome.answers)
        assert len(peer.bodies) == len(outcome.answers) + 1


def test_a_load_whose_process_ended_is_an_error_and_its_answers_are_kept() -> None:
    with peer_server(lambda _number: Reply(ANSWER)) as peer, LoadClient(None) as client:
        load = client.start(Schedule(peer.url, ((Request("again", "{}"),),)))
        while not load.answers:
            time.sleep(0.01)
        os.kill(client.pid, signal.SIGKILL)
        with pytest.raises(MeshError, match="exited with code -9"):
            load.wait(30.0)
        assert load.answers
        with pytest.raises(MeshError, match="exited with code -9"):
            client.snapshot(peer.url)


def test_requests_that_do_not_end_in_time_are_an_error() -> None:
    with peer_server(lambda _number: Reply(ANSWER)) as peer, LoadClient(None) as client:
        load = client.start(Schedule(peer.url, ((Request("again", "{}"),),)))
        with pytest.raises(MeshError, match=r"not ended after 0\.1 s"):
            load.wait(0.1)
