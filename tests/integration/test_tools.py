"""Tools and past calls reach the prompt of a model that has a format for them, and mistakes in them are refused."""

from pathlib import Path

from tests.support import broken_models
from tests.support.exact_client import until_ready
from tests.support.system import System

TEMPLATE = (
    "{% for tool in tools or [] %}{{ tool | tojson }}{% endfor %}"
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% for c in m.tool_calls or [] %}"
    "<call>{{ c.function | tojson }}</call>{% endfor %}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
TOOL = {"type": "function", "function": {"name": "f", "description": "does what it does <|end|>"}}
USER = {"role": "user", "content": "hi"}


async def test_tools_and_calls_are_part_of_the_prompt_and_mistakes_name_the_field(tmp_path: Path) -> None:
    system = await System.start(tmp_path)
    try:
        system.router("router")
        system.worker("w1", model=broken_models.with_template(tmp_path / "tools.gguf", TEMPLATE))
        bare = await system.connect()
        (card,) = await until_ready(bare, 1)
        assert "tools" in card["features"]
        assert card["chat_format_digest"]

        async def terminal(**fields: object) -> dict[str, object]:
            stream = await bare.ask({"messages": [USER], "max_tokens": 1} | fields)
            return dict(stream.terminals[0])

        async def prompt_tokens(**fields: object) -> int:
            return int((await terminal(**fields))["usage"]["prompt_tokens"])  # type: ignore[index]

        def history(arguments: str) -> list[dict[str, object]]:
            called = {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": arguments}}]}
            return [USER, called, {"role": "tool", "content": "done"}]

        plain = await prompt_tokens()
        assert await prompt_tokens(tools=[TOOL]) > plain + 10
        assert await prompt_tokens(messages=history('{"a": 1}')) > await prompt_tokens(messages=history("{}"))
        error = (await terminal(messages=history('{"a": '), tools=[TOOL]))["error"]
        assert isinstance(error, dict)
        assert (error["code"], error["param"]) == (
            "invalid_request", "messages[1].tool_calls[0].function.arguments",
        )  # fmt: skip
    finally:
        await system.stop()
