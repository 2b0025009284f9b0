"""The page, in a real browser before a real mesh: with a mouse, a keyboard or a screen reader."""

from __future__ import annotations

import asyncio
import json
import re
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
import pytest_asyncio

from mesh.api.api_keys import ApiKeys, KeyRecord, digest_of
from mesh.status import MeshStatus, ModelDescription, RecordingStatus
from mesh.text.tokenizer import Tokenizer
from tests.mesh.api.test_page_pictures import DROP, FILE
from tests.support.api_harness import KEY, ScriptedEngine, backend_of, running_api
from tests.support.browser import CHROMIUM, Page, browser_page
from tests.support.colour_words import data_url, png
from tests.support.mesh_in_process import MeshInProcess, mesh_in_process
from tests.support.status_parts import sessions_of

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from tests.support.api_harness import Api

pytestmark = [
    pytest.mark.model,
    pytest.mark.skipif(CHROMIUM is None, reason="chromium is not installed: apt-get install chromium"),
    pytest.mark.asyncio(loop_scope="module"),
]

LAST = "[...document.querySelectorAll('.turn.answer')].at(-1)"
LONG = "Tell me a very long story about the sea, with many details."
SERVING = MeshStatus(phase="serving", ready=True, model=ModelDescription(name="smollm2", context=64))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def browser(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Page]:
    async with browser_page(tmp_path_factory.mktemp("chromium")) as page:
        yield page


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def served(smollm2_path: Path, cut_stages: None) -> AsyncIterator[MeshInProcess]:
    async with mesh_in_process(smollm2_path) as served:
        yield served


@pytest_asyncio.fixture(loop_scope="module")
async def page(browser: Page, served: MeshInProcess) -> AsyncIterator[Page]:
    """The page, opened anew; whatever a test did, it asked no other host and had no errors."""
    async with browser.visiting(f"{served.api.url}/"):
        await browser.until(state_is("Ready"))
        yield browser


def state_is(word: str) -> str:
    return f"document.querySelector('#state-text').textContent === '{word}'"


async def say(page: Page, text: str) -> None:
    """As by a keyboard: the message has the focus from the start, and after each answer."""
    assert await page.js("document.activeElement.id") == "prompt"
    await page.type(text)
    await page.press("Enter")


async def test_an_answer_streams_and_what_it_took_is_told(page: Page) -> None:
    # Drawn anew each time, it could be as long as the context, with no room for a second turn.
    await page.js("document.querySelector('#max-tokens').value = 60")
    await say(page, "Name three colours.")
    lengths = [await page.until(f"{LAST}.querySelector('.text').textContent.length")]
    assert await page.js(f"{LAST}.getAttribute('aria-busy')") == "true"
    await page.until(f"{LAST}.querySelector('.text').textContent.length > {lengths[0]}")
    await page.until(f"{LAST}.getAttribute('aria-busy') === 'false'", 200)
    foot = await page.js(f"{LAST}.querySelector('.foot').textContent")
    assert "tokens/s" in foot
    assert "first after" in foot
    # The next turn knows what was said.
    await say(page, "And their opposites?")
    await page.until(
        f"document.querySelectorAll('.turn').length === 4 && {LAST}.getAttribute('aria-busy') === 'false'", 60
    )
    # What the ring took is on show now, with a row for each stage and one for the way back.
    await page.until("document.querySelectorAll('#stages tbody tr').length === 4")
    assert "ms" in await page.until("document.querySelector('.ring .big')?.textContent")
    cells = await page.js(
        "[...document.querySelectorAll('#stages tbody tr:first-child td')].map((cell) => cell.textContent)"
    )
    assert all(cell != "–" for cell in cells), cells
    assert "tokens a trip" in await page.text("#speculation")


async def test_stop_stops_the_answer_at_every_stage(page: Page, served: MeshInProcess) -> None:
    await say(page, LONG)
    await page.until(f"{LAST}.querySelector('.text').textContent.length > 10")
    assert sessions_of(served.mesh.coordinator).running == 1
    await page.click("#stop")
    await page.until(f"{LAST}.querySelector('.foot').textContent === 'Stopped.'")
    await served.mesh.until(lambda: sessions_of(served.mesh.coordinator).running == 0)
    assert await page.js("document.activeElement.id") == "prompt"
    # Escape does it, too.
    await say(page, LONG)
    await page.until(
        f"document.querySelectorAll('.turn').length === 4 && {LAST}.querySelector('.text').textContent"
    )
    await page.press("Escape")
    await page.until(f"{LAST}.querySelector('.foot').textContent === 'Stopped.'")
    assert await page.js("document.querySelector('#stop').hidden")


async def test_enter_sends_and_shift_enter_does_not(page: Page) -> None:
    await page.type("one")
    await page.press("Enter", shift=True)
    assert await page.js("document.querySelectorAll('.turn').length") == 0
    # Nothing but blanks is no message.
    await page.js("document.querySelector('#prompt').value = '   '")
    await page.press("Enter")
    assert await page.js("document.querySelectorAll('.turn').length") == 0


async def test_markup_in_a_message_or_an_answer_stays_text(page: Page) -> None:
    await say(page, "<img src=x onerror=alert(1)><b>bold</b>")
    assert await page.text(".turn.user .text") == "<img src=x onerror=alert(1)><b>bold</b>"
    assert await page.js("document.querySelectorAll('.turn img, .turn b').length") == 0
    await page.press("Escape")
    shown = await page.js(
        "import('/page/markdown.js').then(({markdown}) => { const box = document.createElement('div');"
        "box.append(...markdown('# A\\n\\n- **b** `<i>c</i>`\\n- d\\n\\n"
        "```py\\n<script>x</script>\\n```\\n1. e\\n*f* <u>g</u>'));"
        "return box.innerHTML; })"
    )
    assert "<h3>A</h3>" in shown
    assert "<li><strong>b</strong> <code>&lt;i&gt;c&lt;/i&gt;</code></li>" in shown
    assert "<code>&lt;script&gt;x&lt;/script&gt;</code></pre>" in shown
    assert '<ol start="1"><li>e</li></ol>' in shown
    assert "<em>f</em> &lt;u&gt;g&lt;/u&gt;" in shown


GROWING = """# A

b `c`
``d ` e`` and **f** *g*
- h
- i

1. j
2. k
l
```py
m

n
```
o
```p q

r **s `t
"""


async def test_a_growing_answer_is_shown_as_the_whole_one_and_what_is_settled_is_drawn_once(
    page: Page,
) -> None:
    unlike, is_kept = await page.js(
        f"""import('/page/markdown.js').then(({{markdown, GrowingMarkdown}}) => {{
        const text = {json.dumps(GROWING)};
        const whole = document.createElement('div'), grown = document.createElement('div');
        const growing = new GrowingMarkdown(grown);
        const unlike = [];
        let first = null, isKept = true;
        for (let at = 1; at <= text.length; at += 1) {{
          growing.add(text[at - 1]);
          growing.draw();
          whole.replaceChildren(...markdown(text.slice(0, at)));
          if (whole.innerHTML !== grown.innerHTML) unlike.push(text.slice(0, at));
          if (grown.children.length === 3) first = grown.firstChild;
          if (grown.children.length > 3) isKept &&= grown.firstChild === first;
        }}
        return [unlike, isKept && grown.children.length > 5]; }})"""
    )
    assert unlike == []
    assert is_kept


async def test_runs_of_backticks_take_no_longer_than_their_length(page: Page) -> None:
    """Each run of another length: none closes another. A search from each of them would take minutes."""
    shown = await page.js(
        "import('/page/markdown.js').then(({markdown}) => {"
        "const text = Array.from({length: 2000}, (_, length) => '`'.repeat(length + 3)).join('a');"
        "return markdown(text + ' ``b`` `c` ``d').map((each) => each.innerHTML.slice(-60)); })"
    )
    assert len(shown) == 1
    assert shown[0].endswith("<code>b</code> <code>c</code> ``d")


async def test_everything_has_a_name_and_the_order_of_the_keyboard_is_that_of_the_eye(page: Page) -> None:
    found = await page.accessible()
    for role in ("button", "textbox", "checkbox", "combobox", "spinbutton", "image", "table", "tab", "log"):
        names = [name for each, name in found if each == role]
        assert all(names), (role, names)
    roles = {role for role, _ in found}
    assert {"banner", "main", "complementary", "log", "textbox", "table", "status"} <= roles
    assert ("heading", "Once round the ring") in found
    await page.js("document.querySelector('.skip').focus()")
    seen = []
    for _ in range(10):
        await page.press("Tab")
        seen.append(await page.js("document.activeElement.id || document.activeElement.textContent"))
    assert seen[:4] == ["theme", "chat-choice", "new-chat", "log"]
    assert seen[7:] == ["prompt", "send", "Settings"]
    outline = await page.js("getComputedStyle(document.activeElement).outlineStyle")
    assert outline != "none"


@pytest.mark.parametrize("theme", ["light", "dark"])
async def test_text_stands_out_from_its_ground(page: Page, theme: str) -> None:
    """4.5 to 1, as WCAG 2.2 asks of text (AA)."""
    await page.show_as(1280, 820, theme=theme)
    pairs = [
        "ink paper",
        "ink card",
        "ink sunk",
        "muted paper",
        "muted card",
        "accent card",
        "on-accent accent",
    ]
    pairs += ["warn warn-soft", "bad bad-soft", "ink accent-soft", "warn card", "muted sunk"]
    for pair in pairs:
        ratio = contrast(*[await colour(page, name) for name in pair.split()])
        assert ratio >= 4.5, (pair, ratio)


async def test_the_theme_can_be_chosen_and_is_kept(page: Page) -> None:
    assert await page.text("#theme") == "Theme: system"
    light = await page.js("getComputedStyle(document.body).backgroundColor")
    for _ in range(2):
        await page.click("#theme")
    assert await page.text("#theme") == "Theme: dark"
    assert await page.js("getComputedStyle(document.body).backgroundColor") != light
    await page.reload()
    await page.until(state_is("Ready"))
    assert await page.text("#theme") == "Theme: dark"
    await page.click("#theme")
    assert await page.js("getComputedStyle(document.body).backgroundColor") == light


async def test_it_fits_a_phone(page: Page) -> None:
    await page.show_as(360, 740)
    assert await page.js("document.documentElement.scrollWidth") == 360
    assert await page.js("document.querySelector('#mesh').checkVisibility()") is False
    await say(page, "A wide answer: " + "x" * 200)
    await page.until(f"{LAST}.querySelector('.text').textContent")
    assert await page.js("document.documentElement.scrollWidth") == 360
    assert await page.js("document.querySelector('#log').scrollWidth <= 360")
    await page.press("Escape")
    await page.click("#tab-chat")
    await page.press("ArrowRight")
    assert await page.js("document.activeElement.id") == "tab-mesh"
    assert await page.js("document.querySelector('#chat').checkVisibility()") is False
    await page.until("document.querySelector('#ring svg').getBoundingClientRect().right <= 360")
    assert await page.js("document.documentElement.scrollWidth") == 360
    for selector in ("#theme", "#tab-chat", "#tab-mesh"):
        assert await page.js(f"document.querySelector('{selector}').getBoundingClientRect().height") >= 32


async def test_a_killed_stage_is_shown_and_its_healing_too(page: Page, served: MeshInProcess) -> None:
    mesh = served.mesh
    await say(page, LONG)
    await page.until(f"{LAST}.querySelector('.text').textContent.length > 10")
    lost = mesh.hosts()[1]
    # No host starts a stage until the page was seen.
    mesh.driver.starts.clear()
    mesh.kill(1)
    await page.until(state_is("Healing"))
    assert "are placed again" in await page.until("document.querySelector('#banner').textContent")
    assert "healing" in await page.js("document.querySelector('#ring').textContent")
    length = await page.js(f"{LAST}.querySelector('.text').textContent.length")
    mesh.driver.starts.set()
    await page.until(state_is("Ready"))
    await page.until("document.querySelector('#banner').textContent.includes('healed in')")
    # The answer went on by itself, to its end.
    await page.until(f"{LAST}.getAttribute('aria-busy') === 'false'", 200)
    assert await page.js(f"{LAST}.querySelector('.text').textContent.length") > length
    assert not await page.js(f"{LAST}.querySelector('.foot').classList.contains('error')")
    await page.until("document.querySelector('#events').innerText.includes('Healed once')")
    assert f"{lost} lost layers 10 to 19" in await page.text("#events")
    assert mesh.hosts()[1] in await page.until("document.querySelector('#stages').innerText")


async def test_a_key_is_asked_for_and_kept_in_the_tab(browser: Page, smollm2_path: Path) -> None:
    keys = ApiKeys.from_plain({"alice": KEY})
    status = MeshStatus(phase="loading", ready=False, model=ModelDescription(name="smollm2"))
    async with running_api(
        ScriptedEngine([(300,)]), Tokenizer(smollm2_path), keys=keys, status=lambda: status
    ) as api:
        await browser.show_as(1280, 820)
        await browser.open(f"{api.url}/")
        await browser.until("!document.querySelector('#gate').hidden")
        assert await browser.js("document.activeElement.id") == "key"
        assert "smollm2" not in await browser.js("document.body.innerText")
        await browser.type("guess")
        await browser.press("Enter")
        await browser.until(
            "document.querySelector('#gate-error').textContent.includes('unknown to this server')"
        )
        assert await browser.js("sessionStorage.length") == 0
        await browser.js("document.querySelector('#key').value = ''")
        await browser.type(KEY)
        await browser.press("Enter")
        # What is behind it is still loading, and says so.
        await browser.until(state_is("Loading"))
        assert await browser.js("document.querySelector('#send').disabled")
        assert "loading" in await browser.text("#empty-text")
        assert await browser.js("localStorage.length") == 0
        assert KEY not in await browser.js("location.href + document.cookie")
        await browser.reload()
        await browser.until(state_is("Loading"))
        status.ready = True
        await browser.until(state_is("Ready"))
        assert not await browser.js("document.querySelector('#send').disabled")
    await browser.until(state_is("Not reachable"))
    await browser.js("sessionStorage.clear()")


async def test_a_key_with_few_requests_is_not_used_up_by_looking(browser: Page, smollm2_path: Path) -> None:
    num_looks = 0

    def status() -> MeshStatus:
        nonlocal num_looks
        num_looks += 1
        return SERVING

    async def open_with(api: Api) -> None:
        await browser.open(f"{api.url}/")
        await browser.until("!document.querySelector('#gate').hidden")
        await browser.type(KEY)
        await browser.press("Enter")

    await browser.show_as(1280, 820)
    engine, tokenizer = ScriptedEngine([(300,)], context_length=64), Tokenizer(smollm2_path)
    for most, word in ((4, "Ready"), (1, "Waiting")):
        keys = ApiKeys([KeyRecord("alice", digest_of(KEY), requests_per_minute=most)])
        async with running_api(engine, tokenizer, keys=keys, status=status) as api:
            await open_with(api)
            await browser.until(state_is(word))
            if word == "Ready":
                # An answer as long as the context is none: less is asked for, whatever the field says.
                await browser.js("document.querySelector('#prompt').focus()")
                await browser.type("Hello")
                await browser.press("Enter")
                await browser.until(f"{LAST}?.getAttribute('aria-busy') === 'false'")
                assert not await browser.js(f"{LAST}.querySelector('.foot').classList.contains('error')")
                await asyncio.sleep(3)
                assert num_looks == 1
            else:
                banner = "document.querySelector('#banner').textContent"
                assert "1 requests a minute" in await browser.js(banner)
        await browser.js("sessionStorage.clear()")


async def test_another_model_can_be_chosen_where_there_is_one(browser: Page, smollm2_path: Path) -> None:
    tokenizer, choice = Tokenizer(smollm2_path), "document.querySelector('#model-choice')"
    await browser.leave()
    await browser.show_as(1280, 820)
    recording = RecordingStatus(conversations=12, bytes=5_000_000, off="the disk is full")
    records = replace(SERVING, recording=recording)
    async with running_api(ScriptedEngine([(300,)]), tokenizer, status=lambda: records) as api:
        assert api.backends is not None
        await browser.open(f"{api.url}/")
        await browser.until(state_is("Ready"))
        told = await browser.text("#spares")
        assert "12 answers are recorded, 5.0 MB. Nothing is added now: the disk is full." in told
        assert await browser.js("document.querySelector('#models').hidden")
        api.backends.add(
            backend_of(
                ScriptedEngine([(400,)]),
                tokenizer,
                api=api.backends.first.api,
                model_id="tiny",
                status=lambda: replace(SERVING, model=ModelDescription(context=32)),
            )
        )
        await browser.until("!document.querySelector('#models').hidden")
        assert await browser.js(f"[...{choice}.options].map(each => each.text).join()") == "smollm2,tiny"
        for chosen, token in (("default", 300), ("tiny", 400)):
            await browser.js(f"{choice}.value = '{chosen}'; document.querySelector('#prompt').focus()")
            await browser.type("Hello")
            await browser.press("Enter")
            await browser.until(f"{LAST}?.getAttribute('aria-busy') === 'false'")
            shown = await browser.js(f"{LAST}.querySelector('.text').textContent")
            assert shown.strip() == tokenizer.piece(token).decode().strip()
        # What is gone is chosen no more.
        api.backends.remove("tiny")
        await browser.until(f"{choice}.value === 'default'")
        assert await browser.js("document.querySelector('#models').hidden")
        assert browser.problems == []


async def test_a_model_that_reasons_first_is_seen_to(page: Page) -> None:
    shown = await page.js(
        "import('/page/turn.js').then(({AnswerTurn}) => { const turn = new AnswerTurn();"
        "const foot = turn.element.querySelector('.foot'); const seen = [];"
        "turn.think(); seen.push(foot.hidden, foot.textContent); turn.add('yes'); seen.push(foot.hidden);"
        "turn.think(); seen.push(foot.hidden);"
        "turn.end('2 tokens'); seen.push(foot.hidden, foot.textContent);"
        "return seen.join(); })"
    )
    assert shown == "false,Thinking…,true,true,false,2 tokens"


async def colour(page: Page, name: str) -> tuple[int, ...]:
    # A property itself may be `light-dark(…)`: what an element makes of it counts.
    probe = "document.body.appendChild(document.createElement('i'))"
    text = await page.js(
        f"(() => {{ const i = {probe}; i.style.color = 'var(--{name})'; "
        "const found = getComputedStyle(i).color; i.remove(); return found; })()"
    )
    return tuple(int(part) for part in re.findall(r"\d+", text)[:3])


def contrast(one: tuple[int, ...], other: tuple[int, ...]) -> float:
    light, dark = sorted((luminance(one), luminance(other)), reverse=True)
    return (light + 0.05) / (dark + 0.05)


def luminance(rgb: tuple[int, ...]) -> float:
    linear = [v / 12.92 if (v := part / 255) <= 0.04045 else ((v + 0.055) / 1.055) ** 2.4 for part in rgb]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


async def test_a_file_that_is_dropped_is_refused_with_the_reason_and_does_not_replace_the_page(
    page: Page,
) -> None:
    """The browser would show the file, and the chat would be gone."""
    dropped = FILE.replace("dispatchEvent(event)", "dispatchEvent(event); return event.defaultPrevented")
    base64 = data_url(png(" red")).partition(",")[2]
    # Beside the chat as well, where nothing takes files.
    for place in ("header", "#log"):
        assert await page.js(dropped % (json.dumps(base64), DROP, place)) is True
    await page.until("document.querySelector('#said').textContent.startsWith('This model reads text only')")
