"""A budget for reasoning goes the whole way from a client's field to the tokens, with any model."""

from pathlib import Path
from typing import Any

from tests.support import broken_models
from tests.support.exact_client import until_ready
from tests.support.raw_client import PREFIX, Answer, RawClient, check_stream
from tests.support.system import System
from tools.demo_model import tool_definitions

SUM: dict[str, Any] = {
    "messages": [{"role": "user", "content": "What is 12 + 30?"}],
    "chat_template_kwargs": {"enable_thinking": True},
    "temperature": 0,
}
THOUGHT = "2 + 0 = 2, carry 0. 1 + 3 + 0 = 4."


async def asked(bare: RawClient, model: str = "demo", **fields: Any) -> tuple[Answer, dict[str, Any]]:
    answer = await bare.ask(SUM | fields, subject=f"{PREFIX}.generate.{model}")
    if answer.terminals[0].get("error") is None:
        check_stream(answer)
    return answer, answer.terminals[0]


def reasoning_of(answer: Answer) -> str:
    return "".join(message.get("reasoning", "") for message in answer.messages)


async def test_reasoning_is_closed_when_its_budget_is_spent_and_what_cannot_be_is_refused(tmp_path: Path) -> None:
    system = await System.start(tmp_path)
    try:
        system.router("router")
        system.worker("w1", "--reasoning-budget-message", "Enough.")
        plain = broken_models.with_template(tmp_path / "plain.gguf", "{{ messages[0].content }}")
        system.worker("w2", model=plain, served_name="plain")
        bare = await system.connect()
        features = {card["model"]: card["features"] for card in await until_ready(bare, 2)}
        assert "reasoning_budget" in features["demo"]
        assert "reasoning_budget" not in features["plain"]

        whole, terminal = await asked(bare, reasoning={"max_tokens": 500})
        assert (reasoning_of(whole), whole.text) == (THOUGHT, "12 + 30 = 42.")
        needed = terminal["usage"]["reasoning_tokens"]

        cut, terminal = await asked(bare, reasoning={"max_tokens": 6})
        thought = reasoning_of(cut).removesuffix("\n\nEnough.")
        assert thought != reasoning_of(cut)
        assert THOUGHT.startswith(thought)
        assert cut.text
        assert 6 < terminal["usage"]["reasoning_tokens"] < needed

        nothing, terminal = await asked(bare, reasoning={"max_tokens": 0})
        assert (reasoning_of(nothing), bool(nothing.text)) == ("", True)
        raw, _ = await asked(bare, reasoning={"max_tokens": 6}, parse_output=False)
        assert f"{thought}\n\nEnough.\n\n" in raw.text, "the markers are special tokens, which have no text"

        low, terminal = await asked(bare, reasoning={"effort": "low"}, max_tokens=40, chat_template_kwargs=None)
        assert reasoning_of(low).endswith("Enough.")
        assert terminal["usage"]["reasoning_tokens"] > 8
        none, _ = await asked(bare, reasoning={"effort": "none"}, max_tokens=40, chat_template_kwargs=None)
        assert (reasoning_of(none), none.text) == ("", "12 + 30 = 42.")

        shape = {"type": "object", "properties": {"sum": {"type": "integer"}}, "required": ["sum"]}
        schema = {"type": "json_schema", "json_schema": {"schema": shape | {"additionalProperties": False}}}
        json_answer, _ = await asked(bare, reasoning={"max_tokens": 6}, response_format=schema, max_tokens=60)
        assert reasoning_of(json_answer).endswith("Enough.")
        assert json_answer.text.startswith('{"sum": ')
        tools = [tool_definitions.definition("get_weather")]
        called, terminal = await asked(bare, reasoning={"max_tokens": 3}, tools=tools, tool_choice="required")
        assert terminal["finish_reason"] == "tool_calls"
        assert reasoning_of(called).endswith("Enough.")

        for model, fields, code, param in (
            ("plain", {"max_tokens": 5}, "unsupported", "reasoning.max_tokens"),
            ("demo", {"max_tokens": -1}, "invalid_request", "reasoning.max_tokens"),
            ("demo", {"max_tokens": 2**31}, "invalid_request", "reasoning.max_tokens"),
            ("demo", {"max_tokens": "few"}, "invalid_request", "reasoning.max_tokens"),
            ("demo", {"effort": "e" * 65}, "invalid_request", "reasoning.effort"),
        ):
            _, refused = await asked(bare, model, reasoning=fields, max_tokens=5)
            assert (refused["error"]["code"], refused["error"]["param"]) == (code, param)
        raw_prompt = await bare.ask({"prompt": "12 + 30 =", "reasoning": {"max_tokens": 5}})
        assert raw_prompt.terminals[0]["error"]["param"] == "reasoning"

        _, terminal = await asked(bare, "plain", reasoning={"max_tokens": 5, "optional": True}, max_tokens=5)
        assert terminal["finish_reason"] in ("stop", "length")
        ignored = [line for line in system.log("w2") if line["event"] == "reasoning_limit_ignored"]
        assert [line["max_reasoning_tokens"] for line in ignored] == [5]
        ended = [line for line in system.log("w1") if line["event"] == "request_finished"]
        assert sum(line["reasoning_budget_spent"] is True for line in ended) >= 4
    finally:
        await system.stop()
