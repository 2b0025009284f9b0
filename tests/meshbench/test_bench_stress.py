"""What `mesh bench stress` sends, reads and makes of it."""

import itertools
import json
from collections import Counter
from dataclasses import asdict, replace
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshbench.lab.memory_watch import role_of
from meshbench.load_client.answers import AnswerRecord
from meshbench.load_client.hang_ups import HangUpTime, draw_hang_up_time
from meshbench.load_client.json_values import restored
from meshbench.load_client.reading import CheckedReading
from meshbench.report_tools import Line
from meshbench.request_record import HUNG_UP, Failure, Record
from meshbench.stress.checks import (
    ClientCounts,
    Expected,
    check_answers,
    count_clients,
    prefix_mismatches,
    saturation,
)
from meshbench.stress.compute_limit import compute_limit
from meshbench.stress.measurements import itls_during
from meshbench.stress.memory import growth_of
from meshbench.stress.scripts import (
    QUICK,
    WIDE,
    Script,
    Turn,
    draw_client_requests,
    mixed_scripts,
    num_slots_for,
    scripts_with_shared_prefixes,
)
from tests.support.peer_server import ANSWER, DONE, END, USAGE, WORD

MIB = 2**20


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
    fields = json.loads(script.request(1, ["uno"], {"speculation": {"mode": "off"}}).body)
    assert [message["content"] for message in fields["messages"]] == ["one", "uno", "two"]
    assert [message["role"] for message in fields["messages"]] == ["user", "assistant", "user"]
    assert (fields["max_tokens"], fields["ignore_eos"], fields["seed"]) == (4, False, 9)
    assert fields["cache_prompt"]
    assert fields["speculation"] == {"mode": "off"}


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


def answered(**changes: Any) -> AnswerRecord:
    record = Record(
        0, "q", 0.0, 0.0, 0.0, 3.0, (1.0, 2.0), 2.0, 7, None, 2, has_usage=True, finish="length", failure=None
    )
    own = {name: changes.pop(name) for name in ("text", "token_ids", "faults") if name in changes}
    plain = AnswerRecord(replace(record, **changes), " a b", (1, 2), ())
    return replace(plain, **own)


def text_of(tokens: Any) -> str:
    return "".join({1: " a", 2: " b", 3: " c"}[token] for token in tokens)


@pytest.mark.parametrize(
    ("answer", "kinds"),
    [
        (answered(), {}),
        (answered(failure=Failure("http_500", "no")), {"failure": 1}),
        (answered(faults=("twice",)), {"stream": 1}),
        (answered(finish="stop"), {"length": 1, "text": 1}),
        (answered(num_output_tokens=1, parts_s=(1.0,)), {"length": 1}),
        (answered(parts_s=(1.0, 2.0, 2.5)), {"stream": 1}),
        (answered(text=" a a b"), {"pieces": 1, "text": 1}),
        (answered(text=" a c", token_ids=(1, 3)), {"text": 1}),
        (answered(num_input_tokens=8), {"prompt": 1}),
    ],
)
def test_what_is_wrong_with_an_answer_is_found(answer: AnswerRecord, kinds: dict[str, int]) -> None:
    expected = {"q": Expected(Turn("?", 2), answered())}
    judged = check_answers([answer], expected, is_exact=True, text_of=text_of)
    assert judged.by_kind == kinds
    # The fast mode promises no text, only a sound one.
    fast = check_answers([answer], expected, is_exact=False, text_of=text_of)
    assert fast.by_kind == {kind: count for kind, count in kinds.items() if kind != "text"}
    assert fast.num_forks == judged.num_forks == ("text" in kinds)


def test_an_answer_may_end_by_itself_where_it_was_not_told_to_go_on() -> None:
    expected = {"q": Expected(Turn("?", 2, is_full=False))}
    for answer in (answered(finish="stop"), answered(finish="stop", num_output_tokens=2), answered()):
        assert check_answers([answer], expected, is_exact=True, text_of=text_of).problems == ()
    cut = answered(num_output_tokens=1, parts_s=(1.0,))
    assert check_answers([cut], expected, is_exact=True, text_of=text_of).by_kind == {"length": 1}


def test_an_answer_survives_its_way_through_json() -> None:
    for answer in (answered(), answered(failure=Failure("http_429", "full", "3"), faults=("x",))):
        assert restored(AnswerRecord, json.loads(json.dumps(asdict(answer)))) == answer


def hung_up(text: str, token_ids: tuple[int, ...]) -> AnswerRecord:
    return answered(failure=Failure(HUNG_UP, "left"), finish=None, text=text, token_ids=token_ids)


def test_what_a_client_got_before_it_hung_up_must_be_how_the_answer_begins() -> None:
    expected = {"q": Expected(Turn("?", 2), answered())}
    answers = [answered(), hung_up("", ()), hung_up(" a", (1,)), hung_up(" a b", (1, 2))]
    judged = check_answers(answers, expected, is_exact=True, text_of=text_of)
    assert (judged.problems, judged.num_forks, judged.num_compared) == ((), 0, 3)
    assert (judged.num_hung_up_early, judged.num_hung_up_late) == (1, 2)
    for other in (hung_up(" c", (3,)), hung_up(" a", (3,)), hung_up(" a b c", (1, 2, 3))):
        unlike = check_answers([other], expected, is_exact=True, text_of=text_of)
        assert (unlike.by_kind, unlike.num_forks) == ({"text": 1}, 1)
        assert check_answers([other], expected, is_exact=False, text_of=text_of).problems == ()


@given(st.integers(0, 2**31), st.sampled_from([0.0, 0.33, 1.0]))
def test_visits_are_the_same_for_a_seed_and_a_share_of_them_hangs_up(seed: int, share: float) -> None:
    scripts = scripts_with_shared_prefixes(7, seed)
    requests = draw_client_requests(200, scripts, share, seed)
    assert (scripts, requests) == (
        scripts_with_shared_prefixes(7, seed),
        draw_client_requests(200, scripts, share, seed),
    )
    times = Counter(request.id for request in requests)
    assert max(times.values()) - min(times.values()) <= 1
    hang_up_times = [request.hang_up_time for request in requests if request.hang_up_time is not None]
    assert share * 200 * 0.5 <= len(hang_up_times) <= share * 200 * 1.5
    for request in requests:
        fields = json.loads(request.body)
        assert fields["stream"] is request.is_streamed is ("stream_options" in fields)
        if request.hang_up_time is not None:
            assert 0 <= request.hang_up_time.after_s <= 4
            # Only a stream shows how far its answer has come.
            most = fields["max_tokens"] if request.is_streamed else 0
            assert request.hang_up_time.num_tokens <= most


def test_moments_cover_the_whole_of_an_answer() -> None:
    random = Random(1)
    hang_up_times = [draw_hang_up_time(random, 1.0, 20) for _ in range(400)]
    assert None not in hang_up_times
    drawn = [hang_up_time for hang_up_time in hang_up_times if hang_up_time is not None]
    assert sum(hang_up_time == HangUpTime(0, 0.0) for hang_up_time in drawn) > 40
    waits_s = [
        hang_up_time.after_s for hang_up_time in drawn if not hang_up_time.num_tokens and hang_up_time.after_s
    ]
    assert min(waits_s) < 0.002 < 0.2 < max(waits_s)
    assert {hang_up_time.num_tokens for hang_up_time in drawn} == set(range(21))
    assert sum(hang_up_time.num_tokens == 20 for hang_up_time in drawn) > 40


def test_requests_share_beginnings_of_every_length() -> None:
    texts = [script.turns[0].text.split() for script in scripts_with_shared_prefixes(48, seed=1)]
    shared = {
        sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False)))
        for one, other in itertools.combinations(texts, 2)
    }
    assert {0, 8, 32, 92, 202, 50, 140} <= shared
    # Several chunks of the exact mode.
    assert max(map(len, texts)) > 3 * 63


@pytest.mark.parametrize(("num_at_once", "num_keys"), [(8, 4), (8, 1), (3, 8), (1, 1)])
def test_a_key_never_needs_every_slot(num_at_once: int, num_keys: int) -> None:
    num_slots = num_slots_for(num_at_once, num_keys)
    assert num_slots > num_at_once
    assert 2 * -(-num_at_once // num_keys) < num_slots


def test_an_error_in_a_stream_is_not_hidden_by_a_hang_up() -> None:
    reading = read('data: {"error": {"message": "a stage went away"}}\n\n')
    failure = reading.response(Failure(HUNG_UP, "left")).failure
    assert failure is not None
    assert failure.kind == "stream_error"
    assert read(WORD).response(Failure(HUNG_UP, "left")).failure == Failure(HUNG_UP, "left")


def test_clients_are_counted() -> None:
    answers = [
        answered(num_cached_tokens=5),
        hung_up("", ()),
        hung_up(" c", (3,)),
        answered(failure=Failure("x", "y")),
    ]
    judged = check_answers(answers, {"q": Expected(Turn("?", 2), answered())}, is_exact=True, text_of=None)
    counts = count_clients(answers, [judged], 2)
    assert counts == ClientCounts(4, 1, 1, 1, 1, 1, 7, 5, 2)
    assert dict(counts.rows())["cached tokens"] == "5 of 7 in finished prompts"


def test_a_counter_that_the_mesh_does_not_have_is_not_taken_for_nought() -> None:
    lines = (
        "# TYPE mesh_prefix_mismatches_total counter",
        'mesh_prefix_mismatches_total{model_name="a"} 2.0',
        'mesh_prefix_mismatches_total{model_name="b"} 1.0',
        'mesh_prefix_mismatches_total_other{model_name="b"} 9.0',
    )
    assert prefix_mismatches("\n".join(lines)) == 3
    assert prefix_mismatches(lines[-1]) is None


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
        (["ray::EmbeddingActor"], "stage"),
        (["ray::IDLE"], "ray"),
        (["/env/lib/ray/core/src/ray/raylet/raylet", "--x"], "ray"),
        (["/env/bin/python", "-m", "mesh.cluster.ray_child", "start"], "ray"),
        (["/env/bin/python", "/env/bin/mesh", "serve", "model.gguf"], "coordinator"),
        (["/env/bin/python", "/env/bin/mesh", "join", "--token-file", "serve"], "join"),
        (["/env/bin/python", "-m", "meshbench.load_client.process"], "other"),
        ([""], "other"),
    ],
)
def test_a_process_is_known_by_its_command_line(argv: list[str], role: str) -> None:
    assert role_of(argv) == role


def test_gaps_beside_a_prefill_are_those_that_touch_it() -> None:
    decoding = replace(answered().record, parts_s=(0.0, 1.0, 1.5, 4.0, 4.5, 5.0))
    prefill = replace(answered().record, sent_s=1.2, parts_s=(4.2,))
    assert itls_during(decoding, prefill) == pytest.approx([500.0, 2500.0, 500.0])
    assert itls_during(decoding, replace(prefill, parts_s=())) == []


def test_a_line_says_whether_it_is_met() -> None:
    assert Line("x", 2.5, 2.5).verdict == Line("x", 0.2, 0.25, is_ceiling=True).verdict == "met"
    assert Line("x", 2.4, 2.5).verdict == Line("x", 0.3, 0.25, is_ceiling=True).verdict == "missed"
    assert Line("x", None, 2.5).verdict == "not measured"


@pytest.mark.model
@pytest.mark.parametrize("repacks", [True, False])
def test_the_compute_limit_is_that_of_all_workers_together(smollm2_path: Path, *, repacks: bool) -> None:
    found = compute_limit(
        smollm2_path,
        (0, 15, 30),
        num_sessions=4,
        prompt_tokens=16,
        answer_tokens=8,
        exact=False,
        repacks=repacks,
    )
    assert set(found) <= {2, 4}
    assert all(1 < rate < 100_000 for rate in found.values())
