"""The console's chat in a real browser (`make console-check`), with the demo model served by a system with keys.

With a folder in TOKENBUS_PICTURES, pictures of the page are written there."""

import asyncio
import contextlib
import json
import os
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from tests.browser.test_console import AXE, PICTURES, browser
from tests.support.system import running_gateway, running_worker, up_with_output
from tokenbus.demo import MODEL_PATH
from tokenbus.protocol.access import key_changes, keys
from tokenbus.protocol.access.key_source import BUCKET, KeySettings
from tokenbus.protocol.access.keys import KeyRecord, Role
from tokenbus.protocol.bus import connection
from tokenbus.protocol.wire import subjects
from tools.demo_model.chats import CHAT_TEMPLATE

pytestmark = [
    pytest.mark.skipif("TOKENBUS_BROWSER" not in os.environ, reason="runs in `make console-check`"),
    pytest.mark.asyncio(loop_scope="module"),
]
_TOOL = {"name": "get_weather", "description": "Get the weather in a city."} | {
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
}
_PLAIN_TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}{{ '<|' ~ m.role ~ '|>' ~ m.content ~ '<|end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
_MARKUP = "<script>alert(1)</script><img src=x onerror=alert(1)>"


@pytest.fixture(scope="module")
def said() -> Iterator[dict[str, Any]]:
    """A system with keys that serves `demo`, and `slow`: a token every 50 ms, without an end of its own."""
    with up_with_output("--keys", "--gateway-port", "0", "--workers", "1", "--threads", "1") as said:
        slow = ["--engine", "sim", "--model", "steps-of-50ms", "--served-name", "slow"]
        with running_worker(said["nats"], *slow):
            yield said


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def one_browser() -> AsyncIterator[Any]:
    async with browser() as one:
        yield one


@contextlib.asynccontextmanager
async def _page(one_browser: Any, url: str, key: str = "", **context: object) -> AsyncIterator[Any]:
    """The chat; at its end it must have written nothing to the browser's console but failed calls."""
    page = await one_browser.new_page(**({"viewport": {"width": 1280, "height": 800}} | context))
    said: list[str] = []
    page.on("console", lambda message: said.append(message.text))
    page.on("pageerror", lambda error: said.append(str(error)))
    await page.goto(f"{url.removesuffix('/v1')}/console/#chat")
    if key:
        await _sign_in(page, key)
    await page.get_by_role("option", name="demo").wait_for(state="attached")
    yield page
    await page.close()
    assert [line for line in said if not line.startswith("Failed to load resource")] == []


async def _sign_in(page: Any, key: str) -> None:
    await page.get_by_label("API key").fill(key)
    await page.keyboard.press("Enter")
    await page.get_by_label("Message", exact=True).wait_for()


def _write_plain(path: Path) -> None:
    """Writes the demo model without a place for tools in its template, and without tokens for calls."""
    template = CHAT_TEMPLATE.encode()
    left = len(template) - len(_PLAIN_TEMPLATE) - len("{##}")
    plain = f"{_PLAIN_TEMPLATE}{{#{' ' * left}#}}".encode()  # of the same length, so that nothing moves in the file
    path.write_bytes(MODEL_PATH.read_bytes().replace(template, plain).replace(b"tool_call>", b"tool-call>"))


async def _say(page: Any, text: str) -> None:
    await page.get_by_label("Message", exact=True).fill(text)
    await page.keyboard.press("Enter")


async def _answer(page: Any, number: int = 1) -> str:
    """Returns the text of an answer, the first one or a later one, once it is complete."""
    article = page.locator(f"article.assistant[aria-busy=false] >> nth={number - 1}")
    return str(await article.locator(".body > .text").text_content())


async def _sees(page: Any, text: str) -> None:
    await page.get_by_text(text).first.wait_for()


@pytest.mark.parametrize(("scheme", "width"), [("dark", 1280), ("light", 380)])
async def test_calls_are_shown_and_answered_by_keys_alone_and_axe_finds_nothing_wrong(
    said: dict[str, Any], one_browser: Any, scheme: str, width: int
) -> None:
    size = {"width": width, "height": 800}
    async with _page(one_browser, said["http"], said["key"], color_scheme=scheme, viewport=size) as page:
        if width == 380:
            await page.get_by_text("Settings").press("Enter")
        await page.get_by_text("System prompt and sampling").press("Enter")
        await page.get_by_label("Temperature").fill("0")
        await page.get_by_text("System prompt and sampling").press("Enter")
        await page.get_by_text("Tools", exact=True).press("Enter")
        await page.get_by_label("Tools, as JSON").fill("[{}]")
        await _sees(page, "Tool 1 has no name")
        await page.get_by_label("Tools, as JSON").fill(json.dumps(_TOOL))
        await _say(page, "What is the weather in Paris and in Oslo?")
        await page.get_by_label("Result of get_weather").nth(1).wait_for()
        await page.keyboard.type("sunny, 21 degrees")
        await page.keyboard.press("Enter")
        await page.keyboard.type("rainy, 9 degrees")
        await page.keyboard.press("Enter")
        answer = await _answer(page, 2)
        assert "sunny in Paris" in answer
        assert "rainy in Oslo" in answer
        assert await page.evaluate("document.activeElement.getAttribute('aria-label')") == "Message"
        await _sees(page, "of them cached")
        widths = await page.evaluate("[document.documentElement.scrollWidth, innerWidth]")
        assert widths[0] <= widths[1], "nothing is wider than the screen"
        at_end = await page.evaluate("innerHeight + scrollY >= document.documentElement.scrollHeight - 2")
        assert at_end, "the page follows what grows"
        await page.evaluate(AXE)
        found = await page.evaluate("axe.run()")
        assert [(one["id"], one["nodes"][0]["html"]) for one in found["violations"]] == []
        if PICTURES:
            await page.screenshot(path=str(Path(PICTURES) / f"console-chat-{scheme}-{width}.png"))
        await page.get_by_role("link", name="Its way through the fleet").first.click()
        await page.locator("#way-story li").first.wait_for()


async def test_what_is_stopped_is_computed_no_more_and_what_was_cut_short_is_continued(
    said: dict[str, Any], one_browser: Any
) -> None:
    async with _page(one_browser, said["http"], said["key"]) as page:
        await page.get_by_text("System prompt and sampling").click()
        await page.get_by_label("Most tokens").fill("8")
        await _say(page, "Tell me a story.")
        begun = (await _answer(page)).rstrip()
        await _sees(page, "ended at the most tokens")
        await page.get_by_role("button", name="Continue").click()
        await page.locator(".numbers p >> nth=1").wait_for()
        assert (await _answer(page)).startswith(begun)
        assert len(await _answer(page)) > len(begun)
        await page.get_by_label("Most tokens").fill("")
        await page.get_by_role("combobox", name="Model", exact=True).select_option("slow")
        await page.get_by_role("button", name="New chat").click()
        await _say(page, "hello")
        await _sees(page, "simulated-")
        await page.keyboard.press("Escape")
        await _sees(page, "stopped")
        assert "simulated-" in await _answer(page)
        await page.get_by_role("button", name="Ask again").click()
        await _sees(page, "simulated-")
        await page.get_by_role("button", name="New chat").click()
        await page.get_by_role("button", name="Send").wait_for()
        assert await page.locator("article").count() == 0
        await page.goto(f"{page.url.partition('#')[0]}#fleet")
        await page.wait_for_function(r"() => /\bRunning\s+0\b/.test(document.body.innerText)")


async def test_a_schema_holds_and_markup_of_a_model_is_text(said: dict[str, Any], one_browser: Any) -> None:
    schema = {"type": "object", "properties": {"answer": {"const": _MARKUP}}, "required": ["answer"]}
    async with _page(one_browser, said["http"], said["key"]) as page:
        await page.get_by_text("JSON schema", exact=True).click()
        await page.get_by_label("Schema of the answer").fill(json.dumps(schema))
        await _say(page, _MARKUP)
        assert json.loads(await _answer(page)) == {"answer": _MARKUP}
        await _sees(page, "· valid JSON")
        assert await page.locator("main script, main img").count() == 0


async def test_settings_are_sent_and_an_edited_message_drops_what_followed_it(
    said: dict[str, Any], one_browser: Any
) -> None:
    async with _page(one_browser, said["http"], said["key"]) as page:
        asked: list[dict[str, Any]] = []
        page.on("request", lambda request: request.method == "POST" and asked.append(request.post_data_json))
        await page.get_by_text("System prompt and sampling").click()
        await page.get_by_label("System prompt", exact=True).fill("Be brief.")
        for name, value in {"Temperature": "0.5", "Top p": "0.9", "Most tokens": "40", "Seed": "7"}.items():
            await page.get_by_label(name).fill(value)
        await page.get_by_label("Reasoning").select_option("off")
        for text in ("What is 1 + 1?", "What is 2 + 2?"):
            await _say(page, text)
            await page.get_by_role("button", name="Stop").wait_for(state="hidden")
        await page.get_by_role("button", name="Edit").first.click()
        await page.get_by_label("Edited message").fill("What is 12 + 30?")
        await page.keyboard.press("Enter")
        assert await _answer(page) == "12 + 30 = 42."
        assert await page.locator("article").count() == 2
        sent = asked[-1]
        assert sent["messages"] == [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "What is 12 + 30?"},
        ]
        settings = {"temperature": 0.5, "top_p": 0.9, "max_tokens": 40, "seed": 7, "reasoning_effort": "none"}
        assert {name: sent[name] for name in settings} == settings


async def test_a_model_is_offered_before_it_is_first_loaded_and_calls_tools_that_its_template_has_no_place_for(
    said: dict[str, Any], one_browser: Any, tmp_path: Path
) -> None:
    _write_plain(tmp_path / "plain.gguf")
    on_demand = ["--model", str(tmp_path / "plain.gguf"), "--memory-budget-mib", "1024", "--threads", "1"]
    with running_worker(said["nats"], *on_demand):
        async with _page(one_browser, said["http"], said["key"]) as page:
            while "plain" not in await page.get_by_role("combobox", name="Model", exact=True).inner_text():
                await page.reload()
                await _sign_in(page, said["key"])
                await page.get_by_role("option", name="demo").wait_for(state="attached")
            await page.get_by_role("combobox", name="Model", exact=True).select_option("plain")
            await page.get_by_label("Reasoning").wait_for()
            await page.get_by_text("Tools", exact=True).click()
            await page.get_by_label("Tools, as JSON").fill(json.dumps(_TOOL))
            await page.get_by_label("Calls").select_option("at least one")
            await _say(page, "What is the weather in Oslo?")
            await page.get_by_label("Result of get_weather").first.wait_for()
            await page.get_by_label("Reasoning").wait_for(state="hidden")
            assert await page.get_by_text("Tools: get_weather").is_visible()


async def test_tools_are_neither_offered_nor_sent_where_a_model_can_not_call_them(
    said: dict[str, Any], one_browser: Any
) -> None:
    async with _page(one_browser, said["http"], said["key"]) as page:
        await page.get_by_text("Tools", exact=True).click()
        await page.get_by_label("Tools, as JSON").fill(json.dumps(_TOOL))
        await page.get_by_role("combobox", name="Model", exact=True).select_option("slow")
        await page.get_by_text("Tools: get_weather").wait_for(state="hidden")
        await _say(page, "hello")
        await _sees(page, "simulated-")
        await page.keyboard.press("Escape")


async def test_errors_are_said_in_the_gateways_words_and_with_what_helps(
    said: dict[str, Any], one_browser: Any
) -> None:
    async with _page(one_browser, said["http"], said["key"]) as page:
        await _say(page, "to and fro " * 2_000)
        await _sees(page, "maximum context length is 2048 tokens")
        body = json.dumps({"error": {"message": "the tenant has no tokens left", "code": "rate_limit_exceeded"}})
        headers = {"retry-after-ms": "1500", "x-should-retry": "true"}
        limited = {"status": 429, "body": body, "headers": headers}
        await page.route("**/v1/chat/completions", lambda route: route.fulfill(**limited))
        await page.get_by_role("button", name="Ask again").click()
        await _sees(page, "the tenant has no tokens left")
        await _sees(page, "It may succeed in 1.5 s.")


async def test_a_revoked_key_is_said_and_the_conversation_is_there_for_the_tenants_next_key(
    said: dict[str, Any], one_browser: Any
) -> None:
    operator = await connection.connect(connection.BusSettings(url=said["nats"]), "test")
    store = KeySettings(BUCKET).store(operator, subjects.DEFAULT_PREFIX)
    made = [keys.new_key() for _ in range(3)]
    for one, tenant in zip(made, ("acme", "acme", "globex"), strict=True):
        await store.add(KeyRecord(id=one.id, hash=one.hash, tenant=tenant, role=Role.USER))
    await asyncio.sleep(0.5)
    async with _page(one_browser, said["http"], made[0].text) as page:
        await _say(page, "What is 12 + 30?")
        await _answer(page)
        await page.get_by_role("combobox", name="Model", exact=True).select_option("slow")
        await _say(page, "hello")
        await _sees(page, "simulated-")
        await page.evaluate("document.body.appendChild(document.createElement('dialog')).showModal()")
        await key_changes.change(store, made[0].id, lambda record: key_changes.revoked(record, time.time()))
        await _sees(page, "The gateway does not accept this key")
        assert "42" not in await page.inner_text("body")
        assert await page.locator("dialog[open]").count() == 0
        await _sign_in(page, made[1].text)
        assert await _answer(page) == "12 + 30 = 42."
        await page.keyboard.press("Escape")
        await _sees(page, "stopped")
        assert made[1].text not in page.url
        assert await page.evaluate("localStorage.length + sessionStorage.length + document.cookie.length") == 0
        await page.evaluate("dispatchEvent(new PageTransitionEvent('pageshow', {persisted: true}))")
        await _sign_in(page, made[1].text)
        await _sees(page, "The conversation stays in this tab")
        await page.get_by_role("button", name="Sign out").click()
        await _sign_in(page, made[2].text)
        await _sees(page, "The conversation stays in this tab")
    await operator.close()


async def test_text_is_kept_when_the_gateway_restarts_in_the_middle(
    said: dict[str, Any], one_browser: Any, tmp_path: Path
) -> None:
    with contextlib.ExitStack() as stack:
        gateway = stack.enter_context(running_gateway(said["nats"], tmp_path))
        port = gateway.url.removesuffix("/v1").rpartition(":")[2]
        async with _page(one_browser, gateway.url) as page:
            await page.get_by_role("combobox", name="Model", exact=True).select_option("slow")
            await _say(page, "hello")
            await _sees(page, "simulated-")
            gateway.process.kill()
            await _sees(page, "The connection to the gateway broke before the answer was complete.")
            assert "simulated-" in await _answer(page)
            with running_gateway(said["nats"], tmp_path, "--port", port):
                await page.get_by_role("button", name="Ask again").click()
                await _sees(page, "simulated-")
                await page.keyboard.press("Escape")
                await _sees(page, "stopped")
