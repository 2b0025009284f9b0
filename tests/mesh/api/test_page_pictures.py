"""Pictures on the page: dropped, pasted, chosen; shown, sent, kept over a reload; in a real browser."""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING

import pytest
import pytest_asyncio

from mesh.placement.memory_estimate import Workload
from mesh.serve.pictures import ServedPictures
from tests.support.browser import CHROMIUM, Page, browser_page
from tests.support.colour_words import NUM_ROWS, counting_encoder, data_url, png, write_colours
from tests.support.mesh_in_process import mesh_in_process

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from tests.support.mesh_in_process import MeshInProcess

pytestmark = [
    pytest.mark.model,
    pytest.mark.skipif(CHROMIUM is None, reason="chromium is not installed: apt-get install chromium"),
    pytest.mark.asyncio(loop_scope="module"),
]

LAST = "[...document.querySelectorAll('.turn.answer')].at(-1)"
# A file as the system gives it to the page.
FILE = (
    "(async () => { const bytes = Uint8Array.from(atob(%s), (c) => c.charCodeAt(0));"
    " const data = new DataTransfer(); data.items.add(new File([bytes], 'shot.png', {type: 'image/png'}));"
    " const event = %s; document.querySelector('%s').dispatchEvent(event); })()"
)
DROP = "new DragEvent('drop', {dataTransfer: data, bubbles: true, cancelable: true})"
PASTE = "new ClipboardEvent('paste', {clipboardData: data, bubbles: true, cancelable: true})"
KEPT = "JSON.parse(Object.entries(localStorage).find(([key]) => key.startsWith('spanmesh.chat.'))[1])"
NUM_IN_TRAY = "document.querySelectorAll('#pictures .picture').length"
SHOWN = "document.querySelectorAll('.turn.user .picture').length"


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def served(
    smollm2_path: Path, cut_stages: None, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[MeshInProcess]:
    projector = write_colours(tmp_path_factory.mktemp("colours") / "mmproj.gguf", smollm2_path)
    with counting_encoder(projector, smollm2_path) as encoder:
        pictures = ServedPictures.of(encoder)
        workload = Workload(ctx_size=512, num_slots=2, is_exact=True)
        async with mesh_in_process(smollm2_path, pictures=pictures, workload=workload) as served:
            yield served


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def browser(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Page]:
    async with browser_page(tmp_path_factory.mktemp("chromium")) as page:
        yield page


@pytest_asyncio.fixture(loop_scope="module")
async def page(browser: Page, served: MeshInProcess) -> AsyncIterator[Page]:
    """The page with no chats; it asked no other host, and had no errors, refused resources among them."""
    async with browser.visiting(f"{served.api.url}/"):
        await browser.js("localStorage.clear()")
        await browser.until("!document.querySelector('#attach').hidden")
        await browser.js("document.querySelector('#temperature').value = 0")
        await browser.js("document.querySelector('#max-tokens').value = 16")
        yield browser


async def give(page: Page, how: str, *words: str, to: str = "#log") -> None:
    base64 = data_url(png(*words)).partition(",")[2]
    await page.js(FILE % (json.dumps(base64), how, to))


async def ask(page: Page, text: str) -> str:
    count = await page.js("document.querySelectorAll('.turn').length")
    await page.js("document.querySelector('#prompt').focus()")
    await page.type(text)
    await page.press("Enter")
    await page.until(
        f"document.querySelectorAll('.turn').length === {count + 2} &&"
        f" {LAST}.getAttribute('aria-busy') === 'false'"
    )
    said: str = await page.js(f"{LAST}.querySelector('.text').textContent")
    return said.lower()


async def test_a_picture_is_dropped_asked_about_kept_and_asked_about_again(
    page: Page, served: MeshInProcess
) -> None:
    await give(page, DROP, " red")
    await page.until(f"{NUM_IN_TRAY} === 1")
    assert "red" in await ask(page, "Which color is it? Answer with one word.")
    assert (await page.js(NUM_IN_TRAY), await page.js(SHOWN)) == (0, 1)
    await page.reload()
    # Drawn again, with nothing fetched: its middle is red.
    pixel = (
        "(() => { const c = document.querySelector('.turn.user .picture'); if (!c?.width) return null;"
        " return [...c.getContext('2d').getImageData(c.width / 2, c.height / 2, 1, 1).data]; })()"
    )
    red, green, blue, _ = await page.until(f"({pixel})?.[3] && {pixel}")
    assert red > 240
    assert max(green, blue) < 16
    await page.until("!document.querySelector('#attach').hidden")
    said = await ask(page, "And its opposite?")
    assert await page.js(SHOWN) == 1
    # The same conversation, by the API.
    kept = json.loads(await page.js(f"JSON.stringify({KEPT}.messages.slice(0, 3))"))
    first, answer, question = kept
    picture = {"type": "image_url", "image_url": {"url": first["pictures"][0]}}
    text = {"type": "text", "text": first["content"]}
    messages = [
        {"role": "user", "content": [picture, text]},
        *({"role": each["role"], "content": each["content"]} for each in (answer, question)),
    ]
    body = {"messages": messages, "temperature": 0, "max_tokens": 16}
    same = (await served.api.http.post("/v1/chat/completions", json=body)).raise_for_status().json()
    assert same["usage"]["prompt_tokens_details"]["image_tokens"] == NUM_ROWS
    assert same["choices"][0]["message"]["content"].lower() == said


async def test_pictures_are_pasted_chosen_and_removed(page: Page, tmp_path: Path) -> None:
    await give(page, PASTE, " green", to="#prompt")
    await page.until(f"{NUM_IN_TRAY} === 1")
    path = tmp_path / "blue.png"
    await asyncio.to_thread(path.write_bytes, png(" blue"))
    document = (await page.send("DOM.getDocument"))["root"]["nodeId"]
    found = await page.send("DOM.querySelector", nodeId=document, selector="#picture-files")
    await page.send("DOM.setFileInputFiles", files=[str(path)], nodeId=found["nodeId"])
    await page.until(f"{NUM_IN_TRAY} === 2")
    names = [name for role, name in await page.accessible() if role in {"image", "button"}]
    assert {"Picture 1", "Picture 2", "Remove picture 1", "Remove picture 2", "Picture"} <= set(names)
    await page.click("#pictures li:first-child button")
    await page.until(f"{NUM_IN_TRAY} === 1")
    assert "blue" in await ask(page, "Which color is it? Answer with one word.")


async def test_what_is_no_picture_and_too_many_are_told(page: Page) -> None:
    await page.js(FILE % (json.dumps("QUJD"), DROP, "#log"))
    await page.until("document.querySelector('#tokens').textContent.includes('shot.png is no picture')")
    for _ in range(9):
        await give(page, DROP, " red")
    await page.until("document.querySelector('#tokens').textContent.includes('at most 8 pictures')")
    assert await page.js(NUM_IN_TRAY) == 8


async def test_a_large_picture_is_sent_smaller_as_jpeg(page: Page) -> None:
    draw = (
        "import('/page/pictures.js').then(async () => { const c = document.createElement('canvas');"
        " [c.width, c.height] = [4000, 1000]; c.getContext('2d').fillRect(0, 0, 4000, 1000);"
        " const blob = await new Promise((done) => c.toBlob(done)); const data = new DataTransfer();"
        " data.items.add(new File([blob], 'large.png', {type: 'image/png'}));"
        f" document.querySelector('#log').dispatchEvent({DROP}); }})"
    )
    await page.js(draw)
    await page.until(f"{NUM_IN_TRAY} === 1")
    size = "(() => { const c = document.querySelector('#pictures .picture'); return [c.width, c.height]; })()"
    assert await page.until(f"{size}[0] > 300 && {size}") == [1536, 384]
    await ask(page, "What is it?")
    kept = await page.js(f"{KEPT}.messages[0].pictures[0]")
    assert kept.startswith("data:image/jpeg;base64,")


async def test_pictures_go_before_chats_where_there_is_no_room(page: Page) -> None:
    """Of the oldest chats first; a chat that cannot keep its own keeps its texts."""
    told = await page.js(
        "import('/page/chats.js').then(({keepChat, keptChats, newChat}) => {"
        " const chat = (title, size) => ({...newChat(), title, messages: [{role: 'user', content: title,"
        "  ...(size ? {pictures: ['data:image/jpeg;base64,' + 'A'.repeat(size)]} : {})}]});"
        " const kept = [chat('text', 0), chat('old', 2e6), chat('new', 2e6)]"
        "  .map((each, index) => keepChat(each, index + 1));"
        " kept.push(keepChat(chat('newest', 2e6), 4), keepChat(chat('huge', 2e7), 5));"
        " return [kept, keptChats().map(({title, messages: [{pictures, numLost}]}) =>"
        "  [title, pictures?.length ?? 0, numLost ?? 0])]; })"
    )
    assert told == [
        ["all", "all", "all", "all", "texts"],
        [["huge", 0, 1], ["newest", 0, 1], ["new", 0, 1], ["old", 0, 1], ["text", 0, 0]],
    ]
