"""Operators act in a real browser (`make console-check`), and what cuts something is asked for twice."""

import os
import re
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest

from tests.browser.test_console import AXE, PICTURES, browser
from tests.support.system import up_with_output
from tokenbus.protocol.access import audit, keys
from tokenbus.protocol.access.audit_log import AuditLog
from tokenbus.protocol.bus import connection as nats

pytestmark = pytest.mark.skipif("TOKENBUS_BROWSER" not in os.environ, reason="runs in `make console-check`")
_HOSTILE = "<img src=x onerror=alert(1)>"
_MODELS = ["--engine", "sim", "--model", "steps-of-50ms", "--served-name", "one", "--memory-budget-mib", "300"]


@pytest.fixture(scope="module")
def fleet() -> Iterator[dict[str, Any]]:
    """Two workers with a model on demand, keys, usage and an audit log."""
    with up_with_output("--keys", "--audit", "--workers", "2", "--gateway-port", "0", *_MODELS) as said:
        yield said


@pytest.fixture
async def page(fleet: dict[str, Any]) -> AsyncIterator[Any]:
    """The page of an operator who has signed in; at its end nothing may be in the browser's console but refusals."""
    async with browser() as one:
        page = await one.new_page(viewport={"width": 1280, "height": 800})
        said: list[str] = []
        page.on("console", lambda message: said.append(message.text))
        page.on("pageerror", lambda error: said.append(str(error)))
        await sign_in(page, fleet, fleet["key"])
        yield page
        assert [line for line in said if "status of 40" not in line] == []


async def sign_in(page: Any, fleet: dict[str, Any], key: str) -> None:
    await page.goto(f"{fleet['http'].removesuffix('/v1')}/console/")
    await page.get_by_label("API key").fill(key)
    await page.get_by_role("button", name="Show the fleet").click()
    await page.locator("#nav").wait_for()


async def sees(page: Any, part: str, pattern: str) -> None:
    await page.wait_for_function(
        "([part, pattern]) => new RegExp(pattern).test(document.getElementById(part).innerText)", arg=[part, pattern]
    )


async def check_accessibility(page: Any) -> None:
    await page.evaluate(AXE)
    found = await page.evaluate("axe.run()")
    assert [(one["id"], one["nodes"][0]["html"]) for one in found["violations"]] == []
    width = await page.evaluate("[document.documentElement.scrollWidth, innerWidth]")
    assert width[0] <= width[1]


async def picture(page: Any, name: str) -> None:
    if PICTURES:
        await page.screenshot(path=str(Path(PICTURES) / name))


async def recorded(fleet: dict[str, Any], kind: audit.AuditKind) -> list[tuple[str, str]]:
    connection = await nats.connect(nats.BusSettings(url=fleet["nats"]), "test")
    stored, _ = await AuditLog(connection, "tokenbus.v1").page(1, audit.pattern_of(kind=kind))
    await connection.close()
    return [(one.record.what, one.record.actor) for one in stored if one.record is not None]


async def test_a_model_is_loaded_unloaded_and_drained_through_the_page(page: Any, fleet: dict[str, Any]) -> None:
    await page.get_by_role("link", name="Operate").click()
    await sees(page, "operate", r"worker-1\s+one\s+loadable")
    assert await page.get_by_role("button", name="Load", exact=True).is_disabled()
    await page.get_by_label("Choose all that are shown").check()
    await page.get_by_role("button", name="Load", exact=True).click()
    await sees(page, "operate", r"worker-1\s+one\s+ready[\s\S]*worker-2\s+one\s+ready")
    await sees(page, "operate", "load: done by 2 workers")
    await page.get_by_label("Choose all that are shown").uncheck()
    await page.get_by_label("Choose worker-1 of one").check()
    await page.get_by_role("button", name="Unload…", exact=True).click()
    dialog = page.get_by_role("dialog")
    cut = "worker-1 of one: 0 streams running and 0 waiting there now. 1 other worker of one can take them."
    assert cut in await dialog.inner_text()
    await check_accessibility(page)
    await page.keyboard.press("Escape")
    await sees(page, "operate", r"worker-1\s+one\s+ready")
    await page.get_by_role("button", name="Unload…", exact=True).click()
    await dialog.get_by_role("button", name="Unload").click()
    await sees(page, "operate", r"worker-1\s+one\s+loadable")
    await check_accessibility(page)
    await picture(page, "console-operate.png")
    actor = keys.id_of(fleet["key"])
    assert set(await recorded(fleet, "control")) == {("load", actor), ("unload", actor)}
    await page.get_by_role("button", name="Drain…").click()
    await dialog.get_by_label("Seconds for streams to finish").fill("0")
    await dialog.get_by_role("button", name="Drain").click()
    await sees(page, "operate", "drain: done by 1 worker")


async def test_a_key_is_made_changed_and_revoked_through_the_page_and_its_secret_is_nowhere_else(
    page: Any, fleet: dict[str, Any]
) -> None:
    await page.get_by_role("link", name="Keys").click()
    await page.get_by_role("button", name="New key…").click()
    dialog = page.get_by_role("dialog")
    await dialog.get_by_label("Name", exact=True).fill(_HOSTILE)
    await dialog.get_by_role("button", name="Create").click()
    secret = await page.get_by_label("The key").input_value()
    key_id = keys.id_of(secret)
    assert key_id is not None
    await check_accessibility(page)
    await page.get_by_role("button", name="I have it").click()
    await sees(page, "keys", re.escape(_HOSTILE))
    assert await page.locator("main img").count() == 0
    assert secret not in await page.evaluate(
        "document.documentElement.outerHTML + location + JSON.stringify([localStorage, sessionStorage])"
        " + [...document.querySelectorAll('input')].map((input) => input.value)"
    )
    url = f"{fleet['http'].removesuffix('/v1')}/console/me"
    assert httpx2.get(url, headers={"x-api-key": secret}).status_code == 200
    await page.get_by_role("button", name=f"Change {key_id}").click()
    await check_accessibility(page)
    await dialog.get_by_label("Open requests").fill("7")
    await dialog.get_by_role("button", name="Change").click()
    await sees(page, "keys", "7 Open requests")
    await check_accessibility(page)
    await page.get_by_role("button", name=f"Revoke {key_id}").click()
    assert _HOSTILE in await dialog.inner_text()
    await page.keyboard.press("Enter")  # the safe answer has the focus
    await page.get_by_role("button", name=f"Revoke {key_id}").click()
    await dialog.get_by_role("button", name="Revoke").click()
    await page.get_by_role("button", name=f"Revoke {key_id}").wait_for(state="detached")
    assert httpx2.get(url, headers={"x-api-key": secret}).status_code == 401
    actor = keys.id_of(fleet["key"])
    assert (await recorded(fleet, "key"))[-3:] == [("create", actor), ("change", actor), ("revoke", actor)]


async def test_usage_is_shown_by_day_and_downloaded(page: Any, fleet: dict[str, Any], tmp_path: Path) -> None:
    asked = {"model": "one", "prompt": "one two three", "max_tokens": 4}
    done = httpx2.post(f"{fleet['http']}/completions", json=asked, headers={"x-api-key": fleet["key"]}, timeout=60)
    assert done.status_code == 200, done.text
    await page.get_by_role("link", name="Usage").click()
    for _ in range(40):
        await page.get_by_label("key", exact=True).set_checked(True)
        if keys.id_of(fleet["key"]) in await page.locator("#usage").inner_text():
            break
        await page.wait_for_timeout(250)
        await page.get_by_label("key", exact=True).set_checked(False)
    await sees(page, "usage", rf"{keys.id_of(fleet['key'])}\s+one\s+1\b")
    assert await page.locator("#usage svg rect").count() == 7
    await check_accessibility(page)
    async with page.expect_download() as coming:
        await page.get_by_role("button", name="Download CSV").click()
    await (await coming.value).save_as(tmp_path / "usage.csv")
    text = (tmp_path / "usage.csv").read_text()
    assert text.startswith("day,key,model,requests")
    assert keys.id_of(fleet["key"]) in text


async def test_a_viewer_sees_no_acts(page: Any, fleet: dict[str, Any]) -> None:
    base = f"{fleet['http'].removesuffix('/v1')}/console"
    made = httpx2.post(f"{base}/keys", json={"role": "viewer"}, headers={"x-api-key": fleet["key"]}).json()
    await sign_in(page, fleet, made["key"])
    assert await page.locator("#parts").inner_text() == "Fleet\nRequests\nUsage"
    await page.goto(f"{base}/#operate")
    assert not await page.locator("#operate").is_visible()
    drain = {"op": "drain", "workers": [["one", "worker-2"]]}
    assert httpx2.post(f"{base}/control", json=drain, headers={"x-api-key": made["key"]}).status_code == 403
