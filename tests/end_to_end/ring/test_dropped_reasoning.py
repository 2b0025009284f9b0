"""Chats whose template leaves out earlier reasoning: what is before it is not computed again."""

from pathlib import Path
from typing import Any, Final

import pytest

from mesh.text.tokenizer import Tokenizer
from stages.runtime.stage_runtime import RuntimeOptions
from tests.support.api_harness import Api, running_api
from tests.support.ring_api import CHAT
from tests.support.ring_harness import running_coordinator, running_stages
from tests.support.tiny_families import TINY_FAMILIES
from tests.support.tiny_models import TinyModel

CTX_SIZE: Final = 1024
NUM_CHECKPOINTS: Final = 6
# More than the prompt has tokens, so that the next turn has the lesser part of the session in common.
NUM_THOUGHTS: Final = 300
# As Qwen3's: the prompt begins the reasoning, and only what follows the user's last message keeps its own.
OPENING: Final = "<think>\n"
TEMPLATE: Final = (
    "{% set last = namespace(user=0) %}"
    "{% for m in messages %}{% if m.role == 'user' %}{% set last.user = loop.index %}{% endif %}{% endfor %}"
    "{% for m in messages %}<|{{ m.role }}|>"
    "{% if m.reasoning_content and loop.index > last.user %}"
    "<think>\n{{ m.reasoning_content }}\n</think>{% endif %}"
    "{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>" + OPENING + "{% endif %}"
)
ASKED: Final = {
    "role": "user",
    "content": "Say a word, and one more, and a third one; then another, and that is it.",
}
MORE: Final = {"role": "user", "content": "And now?"}


async def said(api: Api, messages: list[dict[str, Any]], **fields: Any) -> dict[str, Any]:
    body = {"messages": messages, "temperature": 0, "ignore_eos": True, "return_token_ids": True, **fields}
    response = await api.http.post(CHAT, json=body)
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


def num_shared(tokenizer: Tokenizer) -> int:
    """Tokens up to where the first prompt begins the reasoning, which the second leaves out."""
    text = f"<|user|>{ASKED['content']}<|assistant|>"
    return len(tokenizer.encode(text, add_special=True, parse_special=True))


@pytest.mark.parametrize("num_slots", [1, 2])
@pytest.mark.parametrize("family", ["llama", "falcon-h1"])
async def test_what_is_before_dropped_reasoning_is_not_computed_again(
    family: str, num_slots: int, tmp_path: Path
) -> None:
    path = tmp_path / "model.gguf"
    can_trim = family == "llama"
    model = TinyModel("llama").write(path) if can_trim else TINY_FAMILIES[family].write(path)
    tokenizer = Tokenizer(model)
    tokenizer.chat_template = TEMPLATE
    num_checkpoints = 0 if can_trim else NUM_CHECKPOINTS
    options = RuntimeOptions(
        ctx_size=CTX_SIZE, num_slots=num_slots, exact=True, num_checkpoints=num_checkpoints
    )
    async with (
        running_stages(model, (1,), options, tmp_path / "cache") as stages,
        running_coordinator(
            stages,
            context_length=CTX_SIZE,
            num_slots=num_slots,
            n_vocab=tokenizer.n_vocab,
            can_trim=can_trim,
            num_checkpoints=num_checkpoints,
        ) as coordinator,
        running_api(coordinator, tokenizer) as api,
    ):
        first = await said(api, [ASKED], max_tokens=NUM_THOUGHTS)
        thought = first["choices"][0]["message"]["reasoning_content"]
        assert thought
        assert first["usage"]["prompt_tokens"] < NUM_THOUGHTS
        answered = {"role": "assistant", "content": "It is so.", "reasoning_content": thought}
        second = await said(api, [ASKED, answered, MORE], max_tokens=12)
        alone = await said(api, [ASKED, answered, MORE], max_tokens=12, cache_prompt=False)
        without = await said(
            api, [ASKED, {**answered, "reasoning_content": None}, MORE], max_tokens=12, cache_prompt=False
        )
    assert second["choices"][0]["token_ids"] == alone["choices"][0]["token_ids"]
    assert without["choices"][0]["token_ids"] == alone["choices"][0]["token_ids"]
    assert alone["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    cached = second["usage"]["prompt_tokens_details"]["cached_tokens"]
    least = num_shared(tokenizer)
    if can_trim:
        assert cached == least
    else:
        assert least - len(OPENING) <= cached <= least
