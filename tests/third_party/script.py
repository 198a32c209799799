"""The script of the suites and clients, with reasoning and calls as Qwen3 writes them."""

import json
from typing import Any

from canitoolcall import probe

from tests.support.scripted_model import Line

WEATHER = "It is 7 degrees in Oslo."
LONG = " ".join(str(number) for number in range(1, 20_001))
"""An answer that takes longer than any client waits before it cancels."""


def _call(name: str, **arguments: Any) -> str:
    called = json.dumps({"name": name, "arguments": arguments}, ensure_ascii=False)
    return f"<tool_call>\n{called}\n</tool_call>"


def _thinking(thought: str, answer: str) -> str:
    return f"<think>\n{thought}\n</think>\n\n{answer}"


_EVENT = {
    "title": "Design review",
    "start": "2026-10-01T15:00:00Z",
    "attendees": [{"name": "Ana", "email": "ana@example.com"}, {"name": "Bo", "email": "bo@example.com"}],
    "location": {"city": "Berlin", "room": "4.12"},
}
_PROBED = {
    "single-call": _thinking("I need the weather.", _call("get_weather", city="Paris")),
    "parallel-calls": _call("get_weather", city="Paris") + "\n" + _call("get_weather", city="Tokyo"),
    "no-call": "42",
    "nested-args": _call("create_event", **_EVENT),
    "unicode-args": _call("save_note", title="Grüße aus Zürich", body="Café ☕ in 東京 — naïve résumé 🚀"),
    "empty-args": _call("get_server_time"),
    "forced-tool-choice": _call("get_weather", city="Lisbon", unit="c"),
    "tool-result-followup": _thinking("The tool says 18 degrees.", "It is 18 °C and clear in Paris."),
    "reasoning-then-call": _thinking("9.9 is 9.90, and 90 is more than 11.", _call("record_answer", answer="9.9")),
}
"""An answer for each scenario of canitoolcall's probe."""

CLIENTS = (
    Line("What is the weather in Oslo?", _thinking("I ask the tool.", _call("get_weather", city="Oslo"))),
    Line("7 degrees", WEATHER),
    Line("Which is larger, 9.11 or 9.9?", _thinking("Compare 0.11 and 0.90.", "9.9 is larger.")),
    Line("Say something long.", LONG),
)
LANGCHAIN = (
    Line("magic_function(3)? Use the tool.", _call("magic_function", input=3)),
    Line("magic_function_no_args()? Use the tool.", _call("magic_function_no_args")),
    Line("Hello!", _call("magic_function", input=3)),
    Line("generate a Pirate greeting.", _call("greeting_generator", answer_style="Pirate")),
    Line("What is 3 + 4", _call("my_adder_tool", a=3, b=4)),
    Line("in San Francisco, CA?", _call("get_weather", location="San Francisco, CA")),
    Line("It's sunny.", "It is sunny in San Francisco."),
    Line("a Chinese technology company", _call("unicode_customer", customer_name="你好啊集团", description="(科技)")),
    Line("a Japanese company", _call("unicode_customer", customer_name="こんにちは株式会社", description="(会社)")),
    Line("Return nothing other than JSON.", json.dumps({"setup": "What is a cat?", "punchline": "A small tiger."})),
)
"""The questions of LangChain's standard tests that only a model with sense answers as they expect."""
OPENCODE = (
    Line("plum.txt", _thinking("I read the file.", _call("bash", command="cat plum.txt"))),
    Line("damson", _call("bash", command="tr a-z A-Z < plum.txt | tee capitals.txt")),
    Line("DAMSON", "The word is written in capitals."),
)
CODEX = (
    Line("pear.txt", _thinking("I read the file.", _call("exec_command", cmd="cat pear.txt"))),
    Line("quince", _call("exec_command", cmd="tr a-z A-Z < pear.txt | tee capitals.txt")),
    Line("QUINCE", "The word is written in capitals."),
)
"""Tasks of two calls, whose cues are the outputs of the commands."""


def lines() -> list[Line]:
    """Returns all lines. The cue of a scenario is the text with which it ends."""
    cues = {scenario.id: str(scenario.messages[-1]["content"]) for scenario in probe.BUILTIN_SCENARIOS}
    return [*(Line(cues[one], answer) for one, answer in _PROBED.items()), *CLIENTS, *LANGCHAIN, *OPENCODE, *CODEX]
