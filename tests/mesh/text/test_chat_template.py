"""Chat templates: the real one, the fallbacks, and those that misbehave."""

import json
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from mesh.text.chat_template import CHATML, PLAIN, ChatTemplate, template_source_of
from mesh.text.text_jobs import TextModel
from mesh.text.text_worker import ModelTexts, do_prompt
from mesh.text.tokenizer import Tokenizer
from mesh.util.worker_pool import unpacked_answer
from spanmesh_proto.errors import InvalidRequest

NOW = datetime(2026, 11, 21, tzinfo=UTC)
HELLO = [{"role": "user", "content": "Hello"}]


def _texts(tokenizer: Tokenizer) -> ModelTexts:
    return ModelTexts(TextModel(str(tokenizer.path), tokenizer.stamp, template_source_of(tokenizer)))


def _template(source: str, *, max_chars: int = 10_000) -> ChatTemplate:
    return ChatTemplate(source, bos="<s>", eos="</s>", now=lambda: NOW, max_chars=max_chars)


def test_blocks_leave_no_lines_behind() -> None:
    source = (
        "{%- for message in messages %}\n  {% if true %}\n{{ message.content }}\n  {% endif %}\n{% endfor %}"
    )
    assert _template(source).render(HELLO) == "Hello\n"


def test_knows_the_tokens_the_date_and_more_variables() -> None:
    source = "{{ bos_token }}{{ eos_token }} {{ strftime_now('%d %b %Y') }} {{ enable_thinking }}"
    assert _template(source).render(HELLO, {"enable_thinking": False}) == "<s></s> 21 Nov 2026 False"


def test_variables_do_not_replace_the_conversation() -> None:
    assert _template("{{ messages[0].content }}").render(HELLO, {"messages": []}) == "Hello"


def test_tojson_leaves_html_and_other_scripts_alone() -> None:
    value = {"b": "<\u00e4>", "a": [1]}
    source = "{{ value | tojson }}|{{ value | tojson(indent=2) }}"
    short, long = _template(source).render(HELLO, {"value": value}).split("|")
    assert short == '{"b": "<\u00e4>", "a": [1]}'
    assert long == json.dumps(value, ensure_ascii=False, indent=2)


def test_loop_controls_and_generation_blocks_work() -> None:
    source = "{% for n in range(9) %}{% if n == 2 %}{% break %}{% endif %}{{ n }}{% endfor %}"
    assert _template(source).render(HELLO) == "01"
    assert _template("a{% generation %}b{% endgeneration %}c").render(HELLO) == "abc"


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ("{% set made = [] %}{% set _ = made.append(1) %}{{ made }}", "[1]"),
        ("{% set made = {} %}{% set _ = made.update(a=1) %}{{ made }}", "{'a': 1}"),
        ("{% set ns = namespace(made=[]) %}{% set _ = ns.made.append(2) %}{{ ns.made.pop() }}", "2"),
        ("{% set rest = messages[1:] %}{% set _ = rest.append('x') %}{{ rest | length }}", "2"),
        ("{% set rest = messages | list %}{% set _ = rest.clear() %}{{ messages | length }}", "2"),
        ("{{ messages | map(attribute='role') | tojson }}", '["user", "assistant"]'),
        ("{{ (messages | selectattr('content') | list)[0].content }}", "Hello"),
    ],
)
def test_a_template_changes_what_it_made_itself(source: str, text: str) -> None:
    assert _template(source).render([*HELLO, {"role": "assistant", "content": ""}]) == text


@pytest.mark.parametrize(
    "change",
    [
        "messages.append(1)",
        "messages[0].update(content='x')",
        "(messages | list)[0].clear()",
        "messages[1].tool_calls.pop()",
        "messages[1].tool_calls[0].function.arguments.setdefault('b', 1)",
        "tools[0].clear()",
        "deep.inner.append(1)",
        "messages[0].__class__.update(messages[0], content='x')",
        "dict.update(messages[0], content='x')",
        "(dict | attr('clear'))(messages[0])",
    ],
)
def test_a_template_changes_nothing_that_it_was_given(change: str) -> None:
    call = {"id": "c", "type": "function", "function": {"name": "look", "arguments": {"a": 1}}}
    messages: list[dict[str, Any]] = [*HELLO, {"role": "assistant", "content": "", "tool_calls": [call]}]
    tool = {"type": "function", "function": {"name": "look", "parameters": {}}}
    with pytest.raises(InvalidRequest, match=r"(?i)unsafe|undefined|no attribute"):
        _template(f"{{{{ {change} }}}}").render(messages, {"deep": {"inner": []}}, tools=[tool])


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{% for %}", "end of statement"),
        ("{{ messages[0].missing() }}", "no attribute"),
        ("{{ 1 / 0 }}", "division"),
        ("{{ messages.append(1) }}", "unsafe|append"),
        ("{{ ''.__class__.__mro__[1].__subclasses__() }}", "unsafe|undefined"),
        ("{% for a in range(1000000) %}{{ a }}{% endfor %}", "large"),
        ("{% macro again() %}{{ again() }}{% endmacro %}{{ again() }}", "recursion"),
    ],
)
def test_what_goes_wrong_in_a_template_is_the_requests_error(source: str, reason: str) -> None:
    with pytest.raises(InvalidRequest, match=f"(?i){reason}") as caught:
        _template(source).render(HELLO)
    assert caught.value.param == "messages"


def test_what_is_not_there_is_nothing_where_a_template_needs_it() -> None:
    source = "{{ messages[0].missing.deeper }}{{ 'a' + missing + 'b' }}{{ messages[0].content }}"
    assert _template(source).render(HELLO) == "abHello"


def test_output_is_bounded() -> None:
    source = "{% for n in range(100) %}{{ 'x' * 100 }}{% endfor %}"
    assert len(_template(source, max_chars=10_000).render(HELLO)) == 10_000
    with pytest.raises(InvalidRequest, match="more than 9999 characters"):
        _template(source, max_chars=9_999).render(HELLO)


@pytest.mark.model
def test_smollm2_gets_its_own_template(smollm2_path: Path) -> None:
    template = _texts(Tokenizer(smollm2_path)).template(NOW)
    assert template.render(HELLO) == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
        "<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n"
    )


@pytest.mark.model
def test_without_a_template_the_special_tokens_decide(smollm2_path: Path, gemma3_path: Path) -> None:
    with_chatml, without = Tokenizer(smollm2_path), Tokenizer(gemma3_path)
    with_chatml.chat_template = without.chat_template = None
    chatml = "<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n"
    assert template_source_of(with_chatml) == CHATML
    assert _template(CHATML).render(HELLO) == chatml
    assert template_source_of(without) == PLAIN
    assert _template(PLAIN).render(HELLO) == "user: Hello\nassistant:"


@pytest.mark.model
def test_bos_comes_once(gemma3_path: Path) -> None:
    tokenizer = Tokenizer(gemma3_path)
    texts = _texts(tokenizer)
    bos = tokenizer.special_token("<bos>")
    written, added = texts.prompt_ids("<bos>Hello"), texts.prompt_ids("Hello")
    assert written == added
    assert written.count(bos or -1) == 1


@pytest.mark.model
@pytest.mark.parametrize(("marks", "end"), [(None, None), ([{"begin": "<t>", "end": "</t>"}], "</t>")])
def test_marks_of_reasoning_that_are_known_are_not_found_again(
    smollm2_path: Path, marks: Any, end: str | None
) -> None:
    tokenizer = Tokenizer(smollm2_path)
    texts = ModelTexts(TextModel(str(tokenizer.path), tokenizer.stamp, "{{ messages[0].content }}<t>"))
    answer = do_prompt(
        texts,
        messages=HELLO,
        variables={},
        tools=(),
        ending="ANSWER",
        now=NOW.isoformat(),
        most_tokens=99,
        param="messages",
        marks=marks,
    )
    assert unpacked_answer(answer)[0]["thought_end"] == end
