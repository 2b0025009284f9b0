"""Templates that refuse conversations: what is found out about them, and that every conversation passes."""

import itertools
from collections.abc import Sequence

import pytest

from mesh.text.chat_template import CHATML, ChatTemplate, Ending
from mesh.text.conversation_repair import Needs, Repair
from spanmesh_proto.errors import InvalidRequest
from tests.support.chat_templates import OWN, collected_templates, template_of
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
    TOOL,
    USER,
    Conversation,
    calling,
    said,
    words_of,
)

COLLECTED = collected_templates()
STRICT_SYSTEM = Repair.JOIN_LEADING_SYSTEM | Repair.PLACE_LATER_SYSTEM
TWO_ROLES = STRICT_SYSTEM | Repair.OPEN_WITH_USER | Repair.JOIN_NEIGHBOURS
WITH_CALLS = (
    TWO_ROLES
    | Repair.RESULTS_FIRST
    | Repair.ADD_RESULTS
    | Repair.ADD_USER
    | Repair.FOLD_AFTER_RESULTS
    | Repair.SHORT_IDS
)
NO_USER = Repair.SYSTEM_AS_USER | Repair.ADD_USER
NEEDS = {
    "STRICT_SYSTEM": STRICT_SYSTEM | NO_USER,
    "TWO_ROLES": TWO_ROLES | Repair.FOLD_SYSTEM | NO_USER,
    "TWO_ROLES_AND_SYSTEM": TWO_ROLES | NO_USER,
    "TWO_ROLES_WITH_CALLS": WITH_CALLS | Repair.DROP_EMPTY,
    "ONE_CALL": Repair.SPLIT_CALLS,
    "SILENT": STRICT_SYSTEM | Repair.SPLIT_CALLS,
    "MOVING": Repair.PLACE_LATER_SYSTEM,
    "CHATML": Repair(0),
}
# In addition, where the model may call something; none for others.
COLLECTED_NEEDS_WITH_TOOLS = {
    "meta-llama-Llama-3.1-8B-Instruct": NO_USER,
    "meta-llama-Llama-3.3-70B-Instruct": NO_USER,
}
COLLECTED_NEEDS = {
    "Qwen3.5-4B": STRICT_SYSTEM | NO_USER,
    "google-gemma-2-2b-it": TWO_ROLES | Repair.FOLD_SYSTEM | NO_USER,
    "NVIDIA-Nemotron-Nano-v2": STRICT_SYSTEM | Repair.SYSTEM_AS_USER,
    "Mistral-Small-3.2-24B-Instruct-2506": WITH_CALLS,
    "mistralai-Mistral-Nemo-Instruct-2407": WITH_CALLS | Repair.SYSTEM_AS_USER,
    "meta-llama-Llama-3.1-8B-Instruct": Repair.SPLIT_CALLS,
    "meta-llama-Llama-3.3-70B-Instruct": Repair.SPLIT_CALLS,
    "openai-gpt-oss-120b": STRICT_SYSTEM | Repair.SPLIT_CALLS | Repair.TEXT_AS_THOUGHT,
    "deepseek-ai-DeepSeek-V3.1": Repair.PLACE_LATER_SYSTEM,
    "Qwen-Qwen3-0.6B": Repair(0),
}


def sources(names: Sequence[str]) -> list[object]:
    """Sources of collected templates, as parameters of a test; skipped where they are not."""
    return [
        pytest.param(
            COLLECTED[name].read_text() if name in COLLECTED else "",
            id=name,
            marks=pytest.mark.skipif(
                name not in COLLECTED, reason="no source of llama.cpp: SPANMESH_LLAMA_CPP"
            ),
        )
        for name in names
    ]


REAL = sources(list(COLLECTED_NEEDS))
ALL = [*(pytest.param(source, id=name) for name, source in OWN.items()), *REAL]


@pytest.mark.parametrize("name", NEEDS)
def test_what_a_template_needs_is_found_out(name: str) -> None:
    template = template_of(OWN[name])
    assert template.needs == Needs(NEEDS[name], NEEDS[name])
    assert template.has_one_call is (Repair.SPLIT_CALLS in NEEDS[name])


@pytest.mark.parametrize("name", COLLECTED_NEEDS)
@pytest.mark.skipif(not COLLECTED, reason="no source of llama.cpp: see SPANMESH_LLAMA_CPP")
def test_what_real_templates_need(name: str) -> None:
    needs, more = COLLECTED_NEEDS[name], COLLECTED_NEEDS_WITH_TOOLS.get(name, Repair(0))
    assert template_of(COLLECTED[name].read_text()).needs == Needs(needs, needs | more)


def shows_all(
    template: ChatTemplate, conversation: Conversation, missing: frozenset[str] = frozenset()
) -> None:
    """Check that a conversation is accepted, with tools and without, and that all of it is in the prompt."""
    for tools in ((), (TOOL,)):
        text = template.render(conversation, tools=tools)
        assert {word for word in words_of(conversation) if word not in text} <= missing


@pytest.mark.parametrize("source", ALL)
def test_every_conversation_goes_through(source: str) -> None:
    template = template_of(source)
    # Words beside a call, and the instructions where the user does not speak last, are dropped by Nemo's own
    # template; words beside a call by those of Llama, too.
    missing = frozenset(
        {"sys1", "say1"} if "[AVAILABLE_TOOLS]" in source else {"say1"} if source in WORDLESS else ()
    )
    for conversation in CONVERSATIONS.values():
        shows_all(template, conversation, missing)


WORDLESS = {COLLECTED[name].read_text() for name in COLLECTED if name.startswith("meta-llama")}


@pytest.mark.parametrize("source", [CHATML, *sources(["Qwen-Qwen3-0.6B"])])
def test_what_a_template_takes_stays_as_it_is(source: str) -> None:
    """None of these is changed by as much as a byte."""
    template = template_of(source)
    untouched = ChatTemplate.__new__(ChatTemplate)
    untouched.__dict__ |= vars(template) | {"needs": Needs(Repair(0), Repair(0))}
    for conversation in CONVERSATIONS.values():
        assert template.render(conversation, tools=[TOOL]) == untouched.render(conversation, tools=[TOOL])


def test_nothing_is_tried_for_what_all_templates_take() -> None:
    template = template_of(OWN["ONE_CALL"])
    template.render([USER, ANSWER, MORE])
    assert "needs" not in vars(template)


# The turns of an agent, each with what comes before the model speaks again.
AGENT: list[Conversation] = [
    [SYSTEM, NEWS, USER, MORE, LATEST],
    [calling(OSLO, ROME), SUN, RAIN, NEWS],
    [calling(OSLO), SUN, LAST, LATEST],
    [ANSWER, MORE],
    [FURTHER, NEWS, LAST],
]


@pytest.mark.parametrize(
    "source",
    [
        *(pytest.param(source, id=name) for name, source in OWN.items()),
        # Others move or drop parts of earlier turns by themselves.
        *sources(["google-gemma-2-2b-it", "meta-llama-Llama-3.1-8B-Instruct"]),
    ],
)
def test_each_turn_begins_with_the_one_before(source: str) -> None:
    """Caches have the beginning, also of turns that are the first to need a repair."""
    template = template_of(source)
    conversations = [
        [message for turn in turns for message in turn]
        for turns in itertools.accumulate(([turn] for turn in AGENT), lambda before, turn: [*before, *turn])
    ]
    prompts = [template.render(each, ending=Ending.MESSAGES) for each in conversations]
    for before, prompt in itertools.pairwise(prompts):
        assert prompt.startswith(before)
        assert len(prompt) > len(before)


@pytest.mark.skipif("Qwen3.5-4B" not in COLLECTED, reason="no source of llama.cpp: see SPANMESH_LLAMA_CPP")
def test_instructions_behind_results_leave_reasoning_where_it_was() -> None:
    """Qwen3.5 drops the reasoning before the user's latest message: instructions must not become one."""
    template = template_of(COLLECTED["Qwen3.5-4B"].read_text())
    first = [SYSTEM, USER, {**calling(OSLO), "reasoning_content": "think1"}, SUN, NEWS]
    second = [*first, {**calling(ROME), "reasoning_content": "think2"}, RAIN, LATEST]
    before, prompt = (template.render(each, tools=[TOOL], ending=Ending.MESSAGES) for each in (first, second))
    assert prompt.startswith(before)
    assert "think1" in prompt


# What each writes of a message with reasoning, a text and a call, and how its prompt ends behind the result.
BESIDE_CALLS = {
    "openai-gpt-oss-120b": (
        "<|start|>assistant<|channel|>analysis<|message|>think1\n\nsay1<|end|><|start|>assistant to=",
        '"sun"<|end|><|start|>assistant',
    ),
    "google-gemma-4-31B-it": (
        "<|turn>model\n<|channel>thought\nthink1\n\nsay1\n<channel|><|tool_call>",
        '<|"|>sun<|"|>}<tool_response|>',
    ),
    "upstage-Solar-Open-100B": (
        "<|begin|>assistant<|think|>think1\n\nsay1<|end|><|begin|>assistant<|tool_calls|>",
        "sun<|tool_response:end|><|end|><|begin|>assistant",
    ),
    "LFM2.5-8B-A1B": (
        "<|im_start|>assistant\n<think>think1</think>say1<|tool_call_start|>",
        "sun<|im_end|>\n<|im_start|>assistant\n",
    ),
}


@pytest.mark.parametrize("name", BESIDE_CALLS)
@pytest.mark.skipif(not COLLECTED, reason="no source of llama.cpp: see SPANMESH_LLAMA_CPP")
def test_reasoning_and_text_beside_a_call_stay_ahead_of_it(name: str) -> None:
    template = template_of(COLLECTED[name].read_text())
    turn = {**calling(OSLO, content="say1"), "reasoning_content": "think1"}
    before, end = BESIDE_CALLS[name]
    prompt = template.render([USER, turn, SUN], tools=[TOOL])
    assert before in prompt
    assert prompt.endswith(end)


def test_in_place_means_in_place() -> None:
    strict, two_roles = template_of(OWN["STRICT_SYSTEM"]), template_of(OWN["TWO_ROLES"])
    told = "[System message]\nnews1\n[End of system message]"
    assert strict.render([SYSTEM, USER, NEWS, ANSWER, MORE]) == (
        "<|im_start|>system\nsys1<|im_end|>\n<|im_start|>user\nask1<|im_end|>\n"
        f"<|im_start|>user\n{told}<|im_end|>\n<|im_start|>assistant\nsay1<|im_end|>\n"
        "<|im_start|>user\nask2<|im_end|>\n<|im_start|>assistant\n"
    )
    assert two_roles.render([SYSTEM, USER, NEWS, ANSWER, MORE]) == (
        f"<start_of_turn>user\nsys1\n\nask1\n\n{told}<end_of_turn>\n<start_of_turn>assistant\nsay1<end_of_turn>\n"
        "<start_of_turn>user\nask2<end_of_turn>\n<start_of_turn>assistant\n"
    )


def test_the_last_message_is_continued_where_answers_are_joined() -> None:
    template = template_of(OWN["TWO_ROLES"])
    text = template.render([USER, ANSWER, said("assistant", "It is")], ending=Ending.CONTINUED)
    assert text.endswith("assistant\nsay1\n\nIt is")


MISTRAL = ["Mistral-Small-3.2-24B-Instruct-2506", "mistralai-Ministral-3-14B-Reasoning-2512"]


@pytest.mark.parametrize(
    "source",
    [
        pytest.param(OWN["TWO_ROLES_WITH_CALLS"], id="TWO_ROLES_WITH_CALLS"),
        *sources([*MISTRAL, "mistralai-Mistral-Nemo-Instruct-2407"]),
    ],
)
def test_a_call_without_a_result_leaves_the_others_as_they_are(source: str) -> None:
    """All calls in the model's own format, and the instructions where they were."""
    template = template_of(source)
    before = [SYSTEM, USER, calling(OSLO), SUN, ANSWER]
    conversation = [*before, MORE, calling(ROME), LAST]
    text = template.render(conversation, ending=Ending.MESSAGES)
    assert text.startswith(template.render(before, ending=Ending.MESSAGES))
    assert text.index("rome") < text.index("(no result)") < text.index("ask3")
    assert text.count("[TOOL_CALLS]") == 2
    assert "<tool_call>" not in text
    assert "[TOOL_CALLS]" in template.render([USER, calling(OSLO)], ending=Ending.MESSAGES)
    assert "(no result)" not in template.render([USER, calling(OSLO)], ending=Ending.MESSAGES)
    assert ("sys1" in text) is ("sys1" in template.render(before, ending=Ending.MESSAGES))


@pytest.mark.parametrize("source", sources(MISTRAL))
def test_an_interrupted_call_leaves_the_instructions_a_system_message(source: str) -> None:
    text = template_of(source).render([SYSTEM, USER, calling(OSLO), MORE], tools=[TOOL])
    assert "[SYSTEM_PROMPT]sys1[/SYSTEM_PROMPT]" in text


# Without a form for results.
NO_RESULTS = (
    "{% for m in messages %}{% if m.role == 'tool' %}{{ raise_exception('no results') }}{% endif %}"
    "<|{{ m.role }}|>{{ m.content }}{% endfor %}{# tools #}"
)


def test_calls_are_written_out_where_nothing_else_helps() -> None:
    """The beginning stays as it was before the first call."""
    template = template_of(NO_RESULTS)
    before = template.render([SYSTEM, USER], ending=Ending.MESSAGES)
    text = template.render([SYSTEM, USER, calling(OSLO), SUN, MORE], ending=Ending.MESSAGES)
    assert text.startswith(before)
    assert text.index("ask1") < text.index('<tool_call>\n{"name": "look"') < text.index("ask2")


@pytest.mark.parametrize(
    "source",
    [
        *(pytest.param(source, id=name) for name, source in OWN.items()),
        *sources(["NVIDIA-Nemotron-Nano-v2", "meta-llama-Llama-3.1-8B-Instruct", *MISTRAL]),
    ],
)
@pytest.mark.parametrize(
    ("before", "later"),
    [
        # Without a user at first.
        ([SYSTEM, calling(OSLO), SUN], [ANSWER, MORE]),
        # Text that stands alone before calls, and the answer behind them.
        ([USER, calling(OSLO), SUN, ANSWER, calling(ROME), RAIN], [FURTHER, MORE]),
        ([SYSTEM, USER, calling(OSLO), MORE], [ANSWER, LAST]),
    ],
)
def test_odd_beginnings_stay_as_they_are(source: str, before: Conversation, later: Conversation) -> None:
    template = template_of(source)
    earlier, prompt = (template.render(each, ending=Ending.MESSAGES) for each in (before, before + later))
    assert prompt.startswith(earlier)


@pytest.mark.parametrize("source", sources(["meta-llama-Llama-3.1-8B-Instruct"]))
def test_what_is_taken_without_tools_stays_as_it_is(source: str) -> None:
    """Llama's templates refuse instructions alone with tools only."""
    template = template_of(source)
    without, with_tools = (template.render([SYSTEM], tools=tools) for tools in ((), [TOOL]))
    assert "sys1" in without.partition("<|eot_id|>")[0]
    assert "sys1" in with_tools.partition("<|start_header_id|>user<|end_header_id|>")[2]


def test_the_error_is_the_one_of_the_conversation_as_it_is_sent() -> None:
    """Not of a form that nobody sent."""
    refusal = "{% if m.content != 'ask1' %}{{ raise_exception(m.content) }}{% endif %}"
    source = f"{{% for m in messages %}}{refusal}{{% endfor %}}"
    with pytest.raises(InvalidRequest, match=r"does not accept this conversation: news1$") as caught:
        template_of(source).render([USER, NEWS, LATEST])
    assert caught.value.param == "messages"


@pytest.mark.sweep
@pytest.mark.skipif(not COLLECTED, reason="no source of llama.cpp: see SPANMESH_LLAMA_CPP")
@pytest.mark.parametrize("name", COLLECTED)
def test_every_conversation_goes_through_every_template(name: str) -> None:
    template = template_of(COLLECTED[name].read_text())
    for conversation, tools in itertools.product(CONVERSATIONS.values(), ((), (TOOL,))):
        template.render(conversation, tools=tools)
