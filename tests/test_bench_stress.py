"""What `mesh bench stress` sends, reads and makes of it."""

import asyncio
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mesh.bench.serve.load import Job
from mesh.bench.serve.record import Failure, Record
from mesh.bench.stress.acceptance import itls_during
from mesh.bench.stress.asker import carry_out
from mesh.bench.stress.checked_reading import CheckedReading
from mesh.bench.stress.compute_limit import compute_limit
from mesh.bench.stress.growth import growth_of
from mesh.bench.stress.judging import Expected, judge_all
from mesh.bench.stress.line import Line
from mesh.bench.stress.mix import QUICK, WIDE, mixed_scripts
from mesh.bench.stress.order import Order
from mesh.bench.stress.processes import role_of
from mesh.bench.stress.script import Script, Turn
from mesh.bench.stress.step import saturation
from mesh.bench.stress.told import Told
from mesh.bench.stress.turns import Turns
from tests.peer_server import ANSWER, DONE, END, USAGE, WORD, Reply, peer_server

MIB = 2**20


def ended(job: Job) -> Record:
    return Record(job.number, job.prompt_id, 0.0, 0.0, 0.0, 1.0)


@given(st.integers(0, 2**31), st.sampled_from([600, 2560]))
def test_a_mix_is_the_same_for_a_seed_and_keeps_to_the_context(seed: int, ctx_size: int) -> None:
    scripts = mixed_scripts(12, WIDE, ctx_size=ctx_size, seed=seed)
    assert scripts == mixed_scripts(12, WIDE, ctx_size=ctx_size, seed=seed)
    assert [turn.is_cold for script in scripts for turn in script.turns[:1]] == [True] * 12
    for script in scripts:
        words = sum(len(turn.text.split()) + turn.max_tokens for turn in script.turns[1:])
        assert words < ctx_size


def test_a_mix_has_chats_of_several_turns_and_an_even_one_gives_every_server_the_same_work() -> None:
    scripts = mixed_scripts(6, QUICK, ctx_size=2560, seed=3)
    assert sorted(len(script.turns) for script in scripts) == [1, 1, 1, 1, 2, 3]
    assert {script.temperature for script in scripts} == {0.0, 0.8}
    even = mixed_scripts(6, QUICK, ctx_size=2560, seed=3, is_even=True)
    assert all(turn.is_full and turn.is_cold for script in even for turn in script.turns)


def test_a_later_turn_tells_what_was_answered_before() -> None:
    script = Script("a", (Turn("one", 3), Turn("two", 4, is_full=False)), seed=9)
    fields = json.loads(script.body(1, ["uno"], {"speculation": {"mode": "off"}}))
    assert [message["content"] for message in fields["messages"]] == ["one", "uno", "two"]
    assert [message["role"] for message in fields["messages"]] == ["user", "assistant", "user"]
    assert (fields["max_tokens"], fields["ignore_eos"], fields["seed"]) == (4, False, 9)
    assert fields["cache_prompt"]
    assert fields["speculation"] == {"mode": "off"}


@given(st.lists(st.integers(1, 3), min_size=1, max_size=5), st.integers(1, 40), st.randoms())
def test_turns_follow_one_another_and_chats_come_round(sizes: list[int], count: int, random: Any) -> None:
    ids = [f"c{index}" for index in range(len(sizes))]
    bodies = [[b"%d/%d" % (chat, turn) for turn in range(size)] for chat, size in enumerate(sizes)]
    turns = Turns(ids, bodies, lambda given: given >= count)
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


def read(*events: str) -> CheckedReading:
    reading = CheckedReading()
    reading.on_head(200, {})
    for at_s, event in enumerate(events):
        reading.on_body(event.encode(), float(at_s))
    return reading


def test_a_sound_stream_has_no_fault() -> None:
    reading = read(ANSWER)
    assert reading.faults() == ()
    assert reading.text == " word word"


@pytest.mark.parametrize(
    ("events", "fault"),
    [
        ((WORD, END, USAGE), "[DONE] came 0 times"),
        ((WORD, WORD, END, USAGE, USAGE, DONE), "usage came 2 times"),
        ((WORD, END, END, USAGE, DONE), "finish reason came 2 times"),
        ((WORD, END, WORD, USAGE, DONE), "tokens after the finish reason"),
        ((WORD, END, USAGE, DONE, WORD), "an event after [DONE]"),
        (
            ('data: {"id": "a", "choices": []}\n\n', 'data: {"id": "b", "choices": []}\n\n'),
            "chunks of 2 answers",
        ),
        (
            ('data: {"choices": [{"text": "x", "token_ids": [7, 8, 9]}]}\n\n', END, USAGE, DONE),
            "3 token ids came, usage counts 2",
        ),
    ],
)
def test_a_broken_stream_is_told(events: tuple[str, ...], fault: str) -> None:
    assert any(fault in found for found in read(*events).faults())


def told(**changes: Any) -> Told:
    record = Record(
        0, "q", 0.0, 0.0, 0.0, 3.0, (1.0, 2.0), 2.0, 7, None, 2, has_usage=True, finish="length", failure=None
    )
    own = {name: changes.pop(name) for name in ("text", "token_ids", "faults") if name in changes}
    plain = Told(replace(record, **changes), " a b", (1, 2), ())
    return replace(plain, **own)


def text_of(tokens: Any) -> str:
    return "".join({1: " a", 2: " b", 3: " c"}[token] for token in tokens)


@pytest.mark.parametrize(
    ("answer", "kinds"),
    [
        (told(), {}),
        (told(failure=Failure("http_500", "no")), {"failure": 1}),
        (told(faults=("twice",)), {"stream": 1}),
        (told(finish="stop"), {"length": 1, "text": 1}),
        (told(num_output_tokens=1, parts_s=(1.0,)), {"length": 1}),
        (told(parts_s=(1.0, 2.0, 2.5)), {"stream": 1}),
        (told(text=" a a b"), {"pieces": 1, "text": 1}),
        (told(text=" a c", token_ids=(1, 3)), {"text": 1}),
        (told(num_input_tokens=8), {"prompt": 1}),
    ],
)
def test_what_is_wrong_with_an_answer_is_found(answer: Told, kinds: dict[str, int]) -> None:
    expected = {"q": Expected(Turn("?", 2), told())}
    judged = judge_all([answer], expected, is_exact=True, text_of=text_of)
    assert judged.by_kind == kinds
    # The fast mode promises no text, only a sound one.
    fast = judge_all([answer], expected, is_exact=False, text_of=text_of)
    assert fast.by_kind == {kind: count for kind, count in kinds.items() if kind != "text"}
    assert fast.num_forks == judged.num_forks == ("text" in kinds)


def test_an_answer_may_end_by_itself_where_it_was_not_told_to_go_on() -> None:
    expected = {"q": Expected(Turn("?", 2, is_full=False))}
    for answer in (told(finish="stop"), told(finish="stop", num_output_tokens=2), told()):
        assert judge_all([answer], expected, is_exact=True, text_of=text_of).problems == ()
    cut = told(num_output_tokens=1, parts_s=(1.0,))
    assert judge_all([cut], expected, is_exact=True, text_of=text_of).by_kind == {"length": 1}


def test_an_answer_survives_its_way_through_json() -> None:
    for answer in (told(), told(failure=Failure("http_429", "full", "3"), faults=("x",))):
        assert Told.from_dict(json.loads(json.dumps(answer.as_dict()))) == answer


def test_a_load_asks_whole_chats_of_a_real_server_and_keeps_what_it_said() -> None:
    with peer_server(lambda number: Reply(ANSWER if number != 3 else WORD + END)) as peer:
        port = int(peer.url.rpartition(":")[2])
        bodies = (('{"chat": 0, "turn": 0}', '{"chat": 0, "turn": 1}'), ('{"chat": 1, "turn": 0}',))
        order = Order(port, ("a", "b"), bodies, num_at_once=1, num_requests=4)
        outcome = asyncio.run(carry_out(order))
    assert [(body["chat"], body["turn"]) for body in peer.bodies] == [(0, 0), (0, 1), (1, 0), (0, 0)]
    assert [one.record.prompt_id for one in outcome.told] == [
        "a, turn 1",
        "a, turn 2",
        "b, turn 1",
        "a, turn 1",
    ]
    assert [one.text for one in outcome.told] == [" word word"] * 3 + [" word"]
    assert [bool(one.faults) for one in outcome.told] == [False, False, False, True]
    assert outcome.tokens_per_s == pytest.approx(7 / outcome.duration_s)


def test_a_load_by_time_sends_nothing_after_it() -> None:
    with peer_server(lambda _number: Reply(ANSWER)) as peer:
        port = int(peer.url.rpartition(":")[2])
        order = Order(port, ("a",), (("{}",),), num_at_once=2, duration_s=0.3)
        outcome = asyncio.run(carry_out(order))
    assert len(outcome.told) == len(peer.bodies) > 2
    assert max(one.record.sent_s for one in outcome.told) < 0.5 <= outcome.duration_s + 0.3


@given(
    st.floats(1, 1000),
    st.integers(20, 200),
    st.lists(st.floats(-0.5, 0.5), min_size=200, max_size=200),
)
def test_noise_is_no_growth_and_a_leak_is(level_mib: float, count: int, noise_mib: list[float]) -> None:
    times = np.arange(count, dtype=float)
    sizes = (level_mib + np.array(noise_mib[:count])) * MIB
    # A run fills its caches in the first quarter.
    sizes[: count // 8] -= 0.5 * MIB * level_mib
    flat = growth_of(times.tolist(), sizes.tolist())
    assert flat is not None
    assert flat.is_flat
    leaking = growth_of(times.tolist(), (sizes + times / count * (0.1 * level_mib + 40) * MIB).tolist())
    assert leaking is not None
    assert not leaking.is_flat
    assert leaking.slope_bytes_per_hour > flat.slope_bytes_per_hour


def test_nothing_is_said_of_too_few_samples() -> None:
    assert growth_of([], []) is None
    assert growth_of([0.0, 1.0, 2.0], [1.0, 1.0, 1.0]) is None


@pytest.mark.parametrize(
    ("rates", "found"),
    [
        ([(1, 30.0), (2, 58.0), (4, 90.0), (8, 95.0), (16, 96.0)], 4),
        ([(1, 30.0), (2, 60.0), (4, 120.0)], None),
        ([(1, 30.0), (2, 29.0), (4, 60.0), (8, 61.0)], 4),
        ([(8, 61.0), (1, 60.0)], 1),
    ],
)
def test_a_ramp_is_saturated_where_more_users_bring_no_more(
    rates: list[tuple[int, float]], found: int | None
) -> None:
    assert saturation(rates) == found


@pytest.mark.parametrize(
    ("argv", "role"),
    [
        (["ray::StageActor"], "stage"),
        (["ray::StageActor.load"], "stage"),
        (["ray::IDLE"], "ray"),
        (["/env/lib/ray/core/src/ray/raylet/raylet", "--x"], "ray"),
        (["/env/bin/python", "-m", "mesh.cluster.ray_child", "start"], "ray"),
        (["/env/bin/python", "/env/bin/mesh", "serve", "model.gguf"], "coordinator"),
        (["/env/bin/python", "/env/bin/mesh", "join", "--token-file", "serve"], "join"),
        (["/env/bin/python", "-m", "mesh.bench.stress.asker"], "other"),
        ([""], "other"),
    ],
)
def test_a_process_is_known_by_its_command_line(argv: list[str], role: str) -> None:
    assert role_of(argv) == role


def test_gaps_beside_a_prefill_are_those_that_touch_it() -> None:
    decoding = replace(told().record, parts_s=(0.0, 1.0, 1.5, 4.0, 4.5, 5.0))
    prefill = replace(told().record, sent_s=1.2, parts_s=(4.2,))
    assert itls_during(decoding, prefill) == pytest.approx([500.0, 2500.0, 500.0])
    assert itls_during(decoding, replace(prefill, parts_s=())) == []


def test_a_line_says_whether_it_is_met() -> None:
    assert Line("x", 2.5, 2.5).verdict == Line("x", 0.2, 0.25, is_ceiling=True).verdict == "met"
    assert Line("x", 2.4, 2.5).verdict == Line("x", 0.3, 0.25, is_ceiling=True).verdict == "missed"
    assert Line("x", None, 2.5).verdict == "not measured"


@pytest.mark.model
def test_the_compute_limit_is_that_of_all_workers_together(smollm2_path: Path) -> None:
    found = compute_limit(
        smollm2_path, (0, 15, 30), num_sessions=4, prompt_tokens=16, answer_tokens=8, exact=False
    )
    assert set(found) <= {2, 4}
    assert all(1 < rate < 100_000 for rate in found.values())
