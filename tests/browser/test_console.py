"""The console in a real browser (`make console-check`): it shows a fleet that moves, to hands, keys and screen readers.

With a folder in TOKENBUS_PICTURES, pictures of the page are written there."""

import asyncio
import contextlib
import os
import re
import shutil
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.router.builders import card
from tests.support.exact_client import until_ready
from tests.support.system import System, running_gateway
from tokenbus.protocol.wire import codec
from tokenbus.protocol.wire.subjects import Subjects

pytestmark = pytest.mark.skipif("TOKENBUS_BROWSER" not in os.environ, reason="runs in `make console-check`")
AXE = Path(os.environ.get("TOKENBUS_BROWSER", os.devnull)).read_text()
"""The script of axe-core."""
PICTURES = os.environ.get("TOKENBUS_PICTURES")
_DESK, _PHONE = {"width": 1280, "height": 800}, {"width": 380, "height": 760}
_REFUSED = "Failed to load resource"
"""What the browser itself writes for an answer with an error's status, which the page shows."""
_HOSTILE = "<img src=x onerror=alert(1)>"


@contextlib.asynccontextmanager
async def browser():  # type: ignore[no-untyped-def]
    from playwright.async_api import async_playwright

    found = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    async with async_playwright() as driver:
        browser = await driver.chromium.launch(executable_path=found, args=["--no-sandbox"])
        yield browser
        await browser.close()


@contextlib.asynccontextmanager
async def _console(system: System, folder: Path, **context: object) -> AsyncIterator:  # type: ignore[type-arg]
    """The page of a gateway of the system; at its end it must have written nothing to the browser's console."""
    with running_gateway(system.url, folder) as gateway:
        async with browser() as one:
            page = await one.new_page(**({"viewport": _DESK} | context))
            said: list[str] = []
            page.on("console", lambda message: _REFUSED in message.text or said.append(message.text))
            page.on("pageerror", lambda error: said.append(str(error)))
            await page.goto(f"{gateway.url.removesuffix('/v1')}/console/")
            yield page
            assert said == []


async def _fleet(system: System, count: int) -> None:
    system.router("one")
    for number in range(1, count + 1):
        system.worker(f"worker-{number}", "--engine", "sim", model="dynamo")
    await until_ready(await system.connect(), count)


async def _sees(page, pattern: str) -> None:  # type: ignore[no-untyped-def]
    text = ""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(60):
            while not re.search(pattern, text):
                text = await page.evaluate("document.body.innerText")
                await asyncio.sleep(0.05)
    assert re.search(pattern, text), f"the page shows\n{text}"


@pytest.mark.parametrize(("scheme", "viewport"), [("dark", _DESK), ("light", _DESK), ("light", _PHONE)])
async def test_the_page_shows_workers_and_axe_finds_nothing_wrong(
    system: System, tmp_path: Path, scheme: str, viewport: dict[str, int]
) -> None:
    await _fleet(system, 4)
    bare = await system.connect()
    asked = [{"prompt": "to and fro " * (20 + 9 * number), "max_tokens": 6_000} for number in range(14)]
    streams = [asyncio.create_task(bare.ask(one)) for one in asked]
    async with _console(system, tmp_path, color_scheme=scheme, viewport=viewport) as page:
        await page.get_by_text("worker-2").first.click()
        await _sees(page, "Memory of host")
        await _sees(page, r"Running\s+14\b")
        width = await page.evaluate("[document.documentElement.scrollWidth, innerWidth]")
        assert width[0] <= width[1], "only tables are wider than the screen, and they scroll"
        await page.evaluate(AXE)
        found = await page.evaluate("axe.run()")
        assert [(one["id"], one["nodes"][0]["html"]) for one in found["violations"]] == []
        if PICTURES:
            name = f"console-{scheme}-{viewport['width']}.png"
            await page.screenshot(path=str(Path(PICTURES) / name))
    for stream in streams:
        stream.cancel()


async def test_keys_move_between_rows_and_show_and_close_a_worker(system: System, tmp_path: Path) -> None:
    await _fleet(system, 3)
    async with _console(system, tmp_path) as page:
        await page.locator("tr[data-worker]").first.focus()
        await page.keyboard.press("ArrowDown")
        await page.keyboard.press("Enter")
        assert await page.locator("#detail-title").inner_text() == "worker-2 of demo"
        assert await page.evaluate("document.activeElement.id") == "detail-title"
        await page.keyboard.press("Tab")
        await page.keyboard.press("Enter")
        assert not await page.locator("#detail").is_visible()
        await page.get_by_role("button", name="Worker").click()
        assert (await page.locator("tr[data-worker]").first.inner_text()).startswith("worker-3"), "sorted downwards"
        await page.get_by_label("Filter").fill("worker-1")
        await _sees(page, "1 of 3")


async def test_what_happens_is_told_and_a_gateway_that_restarts_is_found_again(system: System, tmp_path: Path) -> None:
    await _fleet(system, 1)
    async with _console(system, tmp_path) as page:
        await _sees(page, "1 ready")
        system.worker("worker-2", "--engine", "sim", model="dynamo")
        await _sees(page, "worker-2 of demo (joined|is ready)")
        system.kill("worker-2")
        await _sees(page, "worker-2 of demo is (silent|gone)")
        await system.restart_broker(0.5)
        await _sees(page, "live")


async def test_a_request_that_survived_its_worker_shows_both_workers_and_why(system: System, tmp_path: Path) -> None:
    await _fleet(system, 3)
    bare = await system.connect()
    asked = {"id": "the-survivor", "prompt": "to and fro " * 200, "max_tokens": 3_000}
    await bare.ask({"prompt": "to and fro " * 190, "max_tokens": 1})
    stream = asyncio.create_task(bare.ask(asked))
    async with _console(system, tmp_path) as page:
        await page.get_by_role("link", name="Requests").click()
        await page.get_by_role("link", name="the-survivor").click()
        await _sees(page, "was chosen by the policy kv, among 3 workers")
        first = await page.locator("#way-times .where").last.inner_text()
        system.kill(first)
        await _sees(page, rf"{first} was last heard of after [^\n]*\n+It continued at worker-\d after a pause of")
        await stream
        await _sees(page, r"It ended after .* with 3,000 tokens \(length\)")
        assert len(set(await page.locator("#way-times .where").all_inner_texts()) - {"router one"}) == 2
        assert await page.locator("#way-gaps .bar").count() > 0
        await page.evaluate(AXE)
        found = await page.evaluate("axe.run()")
        assert [(one["id"], one["nodes"][0]["html"]) for one in found["violations"]] == []
        if PICTURES:
            await page.screenshot(path=str(Path(PICTURES) / "console-request.png"))
        await page.get_by_label("Id").fill("<img src=x onerror=alert(1)>")
        await page.keyboard.press("Enter")
        await _sees(page, re.escape("no router knows a request '<img src=x onerror=alert(1)>'"))
        assert await page.locator("main img").count() == 0


async def test_names_with_markup_are_text(system: System, tmp_path: Path) -> None:
    system.router("one")
    bare = await system.connect()
    forged = card(_HOSTILE, model=_HOSTILE, host=_HOSTILE)
    async with _console(system, tmp_path) as page:
        await bare.nats.publish(Subjects().card(_HOSTILE, _HOSTILE), codec.encode(forged))
        await _sees(page, re.escape(_HOSTILE))
        assert await page.locator("main img").count() == 0
