"""Repairs of conversations: what each one changes, and that none changes what is before."""

import itertools
import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mesh.text.conversation_repair import EVERY, Repair, repaired
from tests.support.conversations import (
    ANSWER,
    CONVERSATIONS,
    FURTHER,
    LAST,
    LATEST,
    MORE,
    NEWS,
    OSLO,
    RAIN,
    ROME,
    SUN,
    SYSTEM,
    USER,
    Conversation,
    call,
    calling,
    result,
    said,
    words_of,
)

PLACED_NEWS = "[System message]\nnews1\n[End of system message]"
PLACED_LATEST = "[System message]\nnews2\n[End of system message]"
NOTE = said("user", "(The user has said nothing yet.)")


@pytest.mark.parametrize(
    ("repair", "conversation", "expected"),
    [
        (Repair.RESULTS_FIRST, [calling(OSLO), NEWS, SUN, MORE], [calling(OSLO), SUN, NEWS, MORE]),
        (
            Repair.DROP_EMPTY,
            [said("user", ""), said("assistant", ""), calling(OSLO), SUN],
            [said("user", ""), calling(OSLO), SUN],
        ),
        (
            Repair.ADD_RESULTS,
            [USER, calling(OSLO, ROME), RAIN, NEWS, MORE, calling(call("", "here")), ANSWER, calling(OSLO)],
            [
                *[USER, calling(OSLO, ROME), RAIN, result(OSLO["id"], "(no result)"), NEWS, MORE],
                *[calling(call("", "here")), result(None, "(no result)"), ANSWER, calling(OSLO)],
            ],
        ),
        # By their order, where ids do not tell.
        (
            Repair.ADD_RESULTS,
            [calling(OSLO, OSLO, ROME), MORE, SUN, result("?", "a"), ANSWER],
            [
                *[calling(OSLO, OSLO, ROME), MORE, SUN, result("?", "a")],
                *[result(ROME["id"], "(no result)"), ANSWER],
            ],
        ),
        # No call that it belongs to.
        (Repair.RESULTS_FIRST, [USER, ANSWER, MORE, SUN], [USER, ANSWER, MORE, SUN]),
        (
            Repair.JOIN_LEADING_SYSTEM,
            [SYSTEM, NEWS, said("system", ""), USER, LATEST],
            [said("system", "sys1\n\nnews1"), USER, LATEST],
        ),
        (
            Repair.PLACE_LATER_SYSTEM,
            [SYSTEM, USER, NEWS, said("system", ""), ANSWER, LATEST],
            [SYSTEM, USER, said("user", PLACED_NEWS), ANSWER, said("user", PLACED_LATEST)],
        ),
        (
            Repair.PLACE_LATER_SYSTEM,
            [USER, ANSWER, said("system", ""), said("system", ""), FURTHER],
            [USER, ANSWER, said("user", ""), FURTHER],
        ),
        (
            Repair.PLACE_LATER_SYSTEM,
            [USER, calling(OSLO), SUN, NEWS, LATEST, MORE],
            [
                USER,
                calling(OSLO),
                {**SUN, "content": f"sun\n\n{PLACED_NEWS}\n\n{PLACED_LATEST}"},
                MORE,
            ],
        ),
        (Repair.FOLD_SYSTEM, [SYSTEM, NEWS, USER, ANSWER], [said("user", "sys1\n\nnews1\n\nask1"), ANSWER]),
        (Repair.FOLD_SYSTEM, [SYSTEM, ANSWER, USER], [said("user", "sys1"), ANSWER, USER]),
        (Repair.FOLD_SYSTEM, [said("system", ""), USER], [USER]),
        (Repair.SYSTEM_AS_USER, [SYSTEM, NEWS], [said("user", "sys1\n\nnews1")]),
        (Repair.SYSTEM_AS_USER, [SYSTEM, ANSWER], [SYSTEM, ANSWER]),
        (Repair.ADD_USER, [SYSTEM], [SYSTEM]),
        (Repair.ADD_USER, [SYSTEM, ANSWER], [SYSTEM, NOTE, ANSWER]),
        (Repair.ADD_USER, [SYSTEM, calling(OSLO), SUN], [SYSTEM, NOTE, calling(OSLO), SUN]),
        # As it was when the model went on from the result.
        (
            Repair.ADD_USER,
            [SYSTEM, calling(OSLO), SUN, ANSWER, USER],
            [SYSTEM, NOTE, calling(OSLO), SUN, ANSWER, USER],
        ),
        # In no turn of these the user had said nothing.
        (Repair.ADD_USER, [calling(OSLO), SUN, USER, ANSWER, MORE], [calling(OSLO), SUN, USER, ANSWER, MORE]),
        (Repair.ADD_USER, [ANSWER, USER], [ANSWER, USER]),
        (Repair.OPEN_WITH_USER, [SYSTEM, ANSWER, USER], [SYSTEM, NOTE, ANSWER, USER]),
        (Repair.OPEN_WITH_USER, [SYSTEM], [SYSTEM]),
        (
            Repair.SPLIT_CALLS,
            [USER, {**calling(OSLO, ROME, content="say1"), "reasoning_content": "think1"}, RAIN, SUN, MORE],
            [
                USER,
                {**calling(OSLO, content="say1"), "reasoning_content": "think1"},
                SUN,
                calling(ROME),
                RAIN,
                MORE,
            ],
        ),
        # By their order, where ids do not tell.
        (
            Repair.SPLIT_CALLS,
            [calling(OSLO, ROME), result(None, "a"), result(OSLO["id"], "b"), result("?", "c")],
            [calling(OSLO), result(OSLO["id"], "b"), calling(ROME), result(None, "a"), result("?", "c")],
        ),
        (
            Repair.FOLD_AFTER_RESULTS,
            [USER, calling(OSLO), SUN, MORE, LAST, ANSWER],
            [USER, calling(OSLO), {**SUN, "content": "sun\n\nask2\n\nask3"}, ANSWER],
        ),
        (
            Repair.JOIN_NEIGHBOURS,
            [USER, MORE, ANSWER, FURTHER, calling(OSLO), SUN, LAST],
            [said("user", "ask1\n\nask2"), calling(OSLO, content="say1\n\nsay2"), SUN, LAST],
        ),
        (
            Repair.JOIN_NEIGHBOURS,
            [USER, calling(OSLO), ANSWER, said("assistant", "", reasoning_content="think1")],
            [USER, calling(OSLO), {**ANSWER, "reasoning_content": "think1"}],
        ),
        (
            Repair.TEXT_AS_THOUGHT,
            [
                *[USER, {**calling(OSLO, content="say1"), "reasoning_content": "think1"}, SUN],
                *[calling(ROME, content="say2"), RAIN, calling(OSLO), SUN, ANSWER],
            ],
            [
                *[USER, {**calling(OSLO), "reasoning_content": "think1\n\nsay1"}, SUN],
                *[{**calling(ROME), "reasoning_content": "say2"}, RAIN, calling(OSLO), SUN, ANSWER],
            ],
        ),
    ],
)  # fmt: skip
def test_what_each_changes(repair: Repair, conversation: Conversation, expected: Conversation) -> None:
    assert repaired(conversation, repair) == expected
    assert repaired(expected, repair) == expected


def test_ids_are_short_and_tell_the_same() -> None:
    short = call("abcDEF123", "here")
    turn = calling(OSLO, short, call("", "there"))
    found = repaired(
        [USER, turn, result(None, "a"), SUN, result("abcDEF123", "b"), ANSWER, RAIN], Repair.SHORT_IDS
    )
    ids = [each["id"] for each in found[1]["tool_calls"]]
    assert ids[1] == "abcDEF123"
    assert len(set(ids)) == 3
    assert all(len(each) == 9 and each.isascii() and each.isalnum() for each in ids)
    assert [message["tool_call_id"] for message in found[2:5]] == [ids[2], ids[0], ids[1]]
    # Of a call that is not there.
    assert len(found[6]["tool_call_id"]) == 9
    assert repaired(found, Repair.SHORT_IDS) == found


def test_nothing_is_changed_in_place() -> None:
    for conversation in CONVERSATIONS.values():
        before = repr(conversation)
        repaired(conversation, EVERY)
        assert repr(conversation) == before


CONTENTS = st.text("ab \n", max_size=3)
CALL_IDS = st.sampled_from(["", "a", "b", "c", "123456789"])


@st.composite
def turns(draw: st.DrawFn) -> Conversation:
    """What the assistant says, and what comes behind it until it may speak again."""
    calls = [call(draw(CALL_IDS), draw(CONTENTS)) for _ in range(draw(st.integers(0, 3)))]
    message: dict[str, Any] = {
        "role": "assistant",
        "content": draw(CONTENTS) if calls else f"x{draw(CONTENTS)}",
    }
    if calls:
        message["tool_calls"] = calls
    if draw(st.booleans()):
        message["reasoning_content"] = draw(CONTENTS)
    behind = [
        said(draw(st.sampled_from(["user", "system"])), draw(CONTENTS))
        for _ in range(draw(st.integers(0, 3)))
    ]
    results = [result(draw(CALL_IDS), draw(CONTENTS)) for _each in calls]
    return [message, *draw(st.permutations([*results, *behind]))]


@st.composite
def chats(draw: st.DrawFn) -> list[Conversation]:
    """Turns of a conversation that the user opens."""
    roles = [*draw(st.lists(st.sampled_from(["system", "user"]), max_size=3)), "user"]
    return [[said(role, draw(CONTENTS)) for role in roles], *draw(st.lists(turns(), max_size=4))]


@given(chats())
def test_all_of_them_together_give_what_the_strictest_templates_want(chat: list[Conversation]) -> None:
    conversation = [message for turn in chat for message in turn]
    found = repaired(conversation, EVERY)
    assert found[0]["role"] == "user"
    for before, message in itertools.pairwise(found):
        assert message["role"] != "system"
        assert (before["role"], message["role"]) not in {("user", "user"), ("tool", "user")}
        if before["role"] == message["role"] == "assistant":
            assert before.get("tool_calls")
        assert len(message.get("tool_calls", [None])) == 1
    ids = [each["id"] for message in found for each in message.get("tool_calls", ())]
    ids += [message["tool_call_id"] for message in found if message["role"] == "tool"]
    assert all(len(each) == 9 for each in ids)
    texts = words_of(found) | {message.get("reasoning_content", "") for message in found}
    for word in words_of(conversation):
        assert any(word in text for text in texts)
    assert repaired(found, EVERY) == found


@given(chats(), st.sampled_from([EVERY, *Repair]))
def test_the_next_turn_changes_nothing_of_those_before(chat: list[Conversation], repairs: Repair) -> None:
    """So a prompt begins with the one of the turn before, and caches find it."""
    conversation = [message for turn in chat for message in turn]
    found = repaired(conversation, repairs)
    begun: Conversation = []
    for turn, following in itertools.pairwise(chat):
        begun += turn
        if begun[-1]["role"] != "assistant" and following:
            earlier = repaired(begun, repairs)
            assert found[: len(earlier)] == earlier


def test_long_conversations_are_repaired_in_one_pass() -> None:
    text = "x" * 10_000
    many = [said("user", text), said("system", text)] * 1000
    begin_s = time.process_time()
    [message] = repaired(many, EVERY)
    calls = calling(*[call("", "p")] * 2000)
    behind = repaired([USER, calls, *[result(None, text)] * 1000, *many], EVERY)
    assert time.process_time() - begin_s < 5
    assert len(message["content"]) > 20_000_000
    assert [message["role"] for message in behind].count("tool") == 2000
