"""The page as an operator uses it: models that come and go, and chats that are still there afterwards."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest
import pytest_asyncio

from mesh.api.api_keys import ApiKeys, KeyRecord, digest_of
from mesh.status import MeshStatus, ModelDescription
from mesh.text.tokenizer import Tokenizer
from tests.support.api_harness import KEY, MODEL, ScriptedEngine
from tests.support.browser import CHROMIUM, Page, browser_page
from tests.support.on_demand import SIZES, on_demand_api

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from tests.support.on_demand import OnDemandApi

pytestmark = [
    pytest.mark.model,
    pytest.mark.skipif(CHROMIUM is None, reason="chromium is not installed: apt-get install chromium"),
    pytest.mark.asyncio(loop_scope="module"),
]

LAST = "[...document.querySelectorAll('.turn.answer')].at(-1)"
IS_OVER = f"{LAST}?.getAttribute('aria-busy') === 'false'"
READY = "document.querySelector('#state-text').textContent === 'Ready'"
CHOICE = "document.querySelector('#chat-choice')"
SAID = "document.querySelector('#models-said').textContent"
STATUS = MeshStatus(
    phase="serving", ready=True, model=ModelDescription(name=MODEL, context=256, file_bytes=10**8)
)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def browser(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Page]:
    async with browser_page(tmp_path_factory.mktemp("chromium")) as page:
        await page.show_as(1280, 820)
        yield page


@pytest.fixture(scope="module")
def tokenizer(smollm2_path: Path) -> Tokenizer:
    return Tokenizer(smollm2_path)


async def open_page(browser: Page, mesh: OnDemandApi) -> None:
    await browser.leave()
    await browser.open(f"{mesh.api.url}/")
    await browser.until(READY)


async def say(browser: Page, text: str) -> None:
    """Returns when the answer is whole."""
    num_turns = await browser.js("document.querySelectorAll('.turn').length")
    await browser.js("document.querySelector('#prompt').focus()")
    await browser.type(text)
    await browser.press("Enter")
    await browser.until(f"document.querySelectorAll('.turn').length === {num_turns + 2} && {IS_OVER}")


def row(model: str) -> str:
    """Text of a model's row."""
    return (
        "[...document.querySelectorAll('#model-list > li')]"
        f".find((row) => row.querySelector('.model-name').textContent === '{model}').innerText"
    )


async def titles(browser: Page) -> list[str]:
    found: list[str] = await browser.js(f"[...{CHOICE}.options].map((option) => option.text)")
    return found


async def test_a_model_is_loaded_talked_to_and_unloaded_and_the_chat_is_found_again(
    browser: Page, tokenizer: Tokenizer
) -> None:
    async with on_demand_api(tokenizer, status=lambda: STATUS) as mesh:
        mesh.models.engines["small"] = ScriptedEngine([(400,)], context_length=128)
        await open_page(browser, mesh)
        await browser.until(f"document.querySelectorAll('#model-list > li').length === {1 + len(SIZES)}")
        assert "loaded" in await browser.js(row(MODEL))
        assert "not loaded" in await browser.js(row("small"))
        # The first is for as long as the server.
        buttons = await browser.js(
            "[...document.querySelectorAll('#model-list button:not([hidden])')]"
            ".map((button) => button.getAttribute('aria-label'))"
        )
        assert buttons == [f"Load {name}" for name in sorted(SIZES)]

        # What is on its way is seen, and the button keeps the focus though it means something else now.
        mesh.models.may_finish.clear()
        await browser.click("[aria-label='Load small']")
        await browser.until(f"{row('small')}.includes('loading, 13 %')")
        assert "attic, layers 0 to 5: fetching, 268 MB of 1.1 GB" in await browser.js(row("small"))
        assert await browser.js("document.querySelector('#model-list progress').value") == 0.125
        assert await browser.js("document.activeElement.getAttribute('aria-label')") == "Unload small"
        mesh.models.may_finish.set()
        await browser.until(f"{SAID} === 'small is loaded.'")
        await browser.until(f"{row('small')}.includes('attic: layers 0 to 5')")
        assert await browser.js("document.querySelectorAll('#model-list progress').length") == 0

        await browser.js("document.querySelector('#model-choice').value = 'small'")
        await say(browser, "Hello")
        answer = await browser.js(f"{LAST}.querySelector('.text').textContent")
        assert answer.strip() == tokenizer.piece(400).decode().strip()
        assert "tokens read, 1 written" in await browser.js(f"{LAST}.querySelector('.foot').textContent")
        assert "of 128 tokens" in await browser.text("#tokens")

        # With the keyboard.
        await browser.js("document.querySelector(\"[aria-label='Unload small']\").focus()")
        await browser.press("Enter")
        await browser.until(f"{SAID} === 'small was unloaded.'")
        await browser.until(f"{row('small')}.includes('not loaded')")
        assert mesh.models.orders == ["load small", "unload small"]

        await browser.reload()
        await browser.until(READY)
        assert await browser.js("document.querySelectorAll('.turn').length") == 2
        assert await browser.js(f"{LAST}.querySelector('.text').textContent") == answer
        assert await titles(browser) == ["New chat", "Hello"]
        assert await browser.js(f"{CHOICE}.selectedOptions[0].text") == "Hello"
        await browser.until("document.querySelector('#model-choice').value === 'small'")
        # The next turn has the model loaded again, and says what it waits for.
        mesh.models.may_finish.clear()
        await browser.js("document.querySelector('#prompt').focus()")
        await browser.type("And you?")
        await browser.press("Enter")
        await browser.until(f"{LAST}.querySelector('.foot').textContent.startsWith('small: loading')")
        mesh.models.may_finish.set()
        await browser.until(IS_OVER)
        assert await browser.js("document.querySelectorAll('.turn').length") == 4
        assert browser.problems == []


async def test_chats_are_kept_apart_with_their_settings(browser: Page, tokenizer: Tokenizer) -> None:
    first = ScriptedEngine([(300,)], context_length=256)
    async with on_demand_api(tokenizer, first=first, status=lambda: STATUS) as mesh:
        await open_page(browser, mesh)
        await browser.js("document.querySelector('.settings').open = true")
        for field, value in (
            ("system", "Answer like a pirate."),
            ("temperature", "0"),
            ("top-p", "0.5"),
            ("top-k", "7"),
            ("seed", "11"),
        ):
            await browser.js(f"document.querySelector('#{field}').value = {json.dumps(value)}")
        await say(browser, "Where is the treasure?")
        asked = first.requests[-1]
        said = "".join(tokenizer.piece(token).decode(errors="replace") for token in asked.prompt)
        assert "Answer like a pirate." in said
        assert asked.sampling.temperature == 0
        await browser.click("#new-chat")
        assert await browser.js("document.querySelectorAll('.turn').length") == 0
        assert await browser.js("document.activeElement.id") == "prompt"
        await browser.js("document.querySelector('#system').value = ''")
        await browser.js("document.querySelector('#temperature').value = '1.5'")
        await say(browser, "Name a river.")
        sampling = first.requests[-1].sampling
        assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.seed) == (1.5, 0.5, 7, 11)
        assert await titles(browser) == ["New chat", "Name a river.", "Where is the treasure?"]

        # The other one, with what it was asked with; its next turn knows the first.
        await browser.js(f"{CHOICE}.selectedIndex = 2; {CHOICE}.dispatchEvent(new Event('change'))")
        assert "Where is the treasure?" in await browser.text("#log")
        assert "Name a river." not in await browser.text("#log")
        assert await browser.js("document.querySelector('#system').value") == "Answer like a pirate."
        assert await browser.js("document.querySelector('#temperature').value") == "0"
        await say(browser, "And the map?")
        assert len(first.requests[-1].prompt) > len(asked.prompt) + 5

        # Deleted, and back.
        await browser.click("#delete-chat")
        assert await titles(browser) == ["New chat", "Name a river."]
        assert await browser.js("document.querySelectorAll('.turn').length") == 0
        assert await browser.js("document.activeElement.id") == "undo-delete"
        await browser.press("Enter")
        assert await browser.js("document.querySelectorAll('.turn').length") == 4
        await browser.click("#delete-chat")
        await browser.reload()
        await browser.until(READY)
        assert await titles(browser) == ["New chat", "Name a river."]
        assert browser.problems == []


async def test_what_is_kept_is_text_and_what_is_damaged_is_left_out(
    browser: Page, tokenizer: Tokenizer
) -> None:
    bad = "<img src=x onerror=alert(1)>"
    chat = {
        "id": "0a",
        "title": bad,
        "changedMs": 5,
        "model": "gone",
        "settings": None,
        "tokens": 7,
        "messages": [{"role": "user", "content": bad}, {"role": "assistant", "content": bad, "foot": bad}],
    }
    kept = {"0a": json.dumps(chat), "1": "{", "2": json.dumps({**chat, "messages": [{"role": "system"}]})}
    kept |= {"3": "null", "4": json.dumps({**chat, "messages": [None]})}
    async with on_demand_api(tokenizer, status=lambda: STATUS) as mesh:
        await open_page(browser, mesh)
        for name, text in kept.items():
            await browser.js(f"localStorage.setItem('spanmesh.chat.{name}', {json.dumps(text)})")
        await browser.open(f"{mesh.api.url}/#chat-0a")
        await browser.reload()
        await browser.until(READY)
        assert await titles(browser) == ["New chat", bad]
        assert await browser.js("document.querySelectorAll('.turn').length") == 2
        assert await browser.js("document.querySelectorAll('.turn img, option img').length") == 0
        assert await browser.text(".turn.user .text") == bad
        # A model that is gone is the first.
        await browser.until("document.querySelector('#model-choice').value === 'default'")
        assert "7 of 256 tokens" in await browser.text("#tokens")
        assert browser.problems == []


async def test_a_chat_that_is_too_large_to_keep_does_not_cost_the_others(
    browser: Page, tokenizer: Tokenizer
) -> None:
    async with on_demand_api(tokenizer, status=lambda: STATUS) as mesh:
        await open_page(browser, mesh)
        await browser.js("import('/page/chats.js').then((module) => (window.chats = module)) && true")
        await browser.until("window.chats !== undefined")
        kept = await browser.js("""(() => {
            const chat = (id, length) => ({
                ...chats.newChat(), id, title: id, messages: [{ role: "user", content: "x".repeat(length) }],
            });
            const found = [];
            const note = (kept) => found.push([kept, chats.keptChats().map(({ id }) => id)]);
            note(chats.keepChat(chat("old", 1_000_000), 1));
            note(chats.keepChat(chat("new", 1_000_000), 2));
            // Never.
            note(chats.keepChat(chat("whale", 20_000_000), 3));
            // In the place of the oldest.
            note(chats.keepChat(chat("large", 4_000_000), 4));
            return found;
        })()""")
        assert kept == [
            ["all", ["old"]],
            ["all", ["new", "old"]],
            ["", ["new", "old"]],
            ["all", ["large", "new"]],
        ]
        assert browser.problems == []


async def test_a_chat_keeps_its_model_while_the_library_is_not_listed(
    browser: Page, tokenizer: Tokenizer
) -> None:
    # As of a head that was started again.
    async with on_demand_api(tokenizer, status=lambda: STATUS) as mesh:
        await open_page(browser, mesh)
        await browser.until("document.querySelector('#model-choice').options.length > 1")
        await browser.js("document.querySelector('#model-choice').value = 'small'")
        await browser.js("document.querySelector('#model-choice').dispatchEvent(new Event('change'))")
        mesh.hide_library(is_hidden=True)
        await browser.until("document.querySelector('#model-choice').options.length === 1")
        mesh.hide_library(is_hidden=False)
        await browser.until("document.querySelector('#model-choice').options.length > 1")
        assert await browser.js("document.querySelector('#model-choice').value") == "small"
        assert browser.problems == []


async def test_a_key_that_may_not_load_has_no_button_and_is_told_why(
    browser: Page, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = ApiKeys([KeyRecord("bob", digest_of(KEY))])
    monkeypatch.setattr("mesh.api.auth._comes_from_here", lambda _request: False)
    async with on_demand_api(tokenizer, keys=keys, status=lambda: STATUS) as mesh:
        await browser.open(f"{mesh.api.url}/")
        await browser.until("!document.querySelector('#gate').hidden")
        await browser.type(KEY)
        await browser.press("Enter")
        await browser.until(READY)
        await browser.until(f"document.querySelectorAll('#model-list > li').length === {1 + len(SIZES)}")
        assert await browser.js("document.querySelectorAll('#model-list button:not([hidden])').length") == 0
        await browser.js("document.querySelector('#model-choice').value = 'small'")
        await say(browser, "Hello")
        foot = await browser.js(f"{LAST}.querySelector('.foot').textContent")
        assert "may not load models" in foot
        assert "mesh keys add --may-load" in foot
        # A question without an answer is not kept.
        assert await titles(browser) == ["New chat"]
        assert mesh.models.orders == []
    await browser.js("sessionStorage.clear()")
