"""The chat templates of llama.cpp's collection are rendered, or refuse by themselves what their model can't be told.

The files come with the source of llama-cpp-python, and are cached beside its wheel.
"""

import functools
import re
from pathlib import Path
from typing import Any

import pytest

from tests.support import llama_cpp_source
from tokenbus.protocol.prompt.special_tokens import SpecialTokens
from tokenbus.protocol.prompt.template import ChatTemplate
from tokenbus.protocol.wire import errors
from tokenbus.protocol.wire.messages import ChatMessage

RENDERED: dict[str, str] = {}
EXPECTED = {
    "Apertus-8B-Instruct": RENDERED,
    "Apriel-1.6-15b-Thinker-fixed": RENDERED,
    "Bielik-11B-v3.0-Instruct": RENDERED,
    "ByteDance-Seed-OSS": RENDERED,
    "Cohere2MoE": RENDERED,
    "CohereForAI-c4ai-command-r-plus-tool_use": RENDERED,
    "CohereForAI-c4ai-command-r7b-12-2024-tool_use": RENDERED,
    "GLM-4.6": RENDERED,
    "GLM-4.7-Flash": RENDERED,
    "GigaChat3-10B-A1.8B": RENDERED,
    "GigaChat3.1-10B-A1.8B": RENDERED,
    "HuggingFaceTB-SmolLM3-3B": RENDERED,
    "Kimi-K2-Instruct": RENDERED,
    "Kimi-K2-Thinking": RENDERED,
    "Kimi-K3": RENDERED,
    "LFM2-8B-A1B": RENDERED,
    "LFM2.5-8B-A1B": RENDERED,
    "LFM2.5-Instruct": RENDERED,
    "MiMo-VL": RENDERED,
    "MiniMax-M1": RENDERED,
    "MiniMax-M2": RENDERED,
    "MiniMax-M3": RENDERED,
    "Mistral-Small-3.2-24B-Instruct-2506": RENDERED,
    "NVIDIA-Nemotron-3-Nano-30B-A3B-BF16": RENDERED,
    "NVIDIA-Nemotron-Nano-v2": RENDERED,
    "NousResearch-Hermes-2-Pro-Llama-3-8B-tool_use": RENDERED,
    "NousResearch-Hermes-3-Llama-3.1-8B-tool_use": RENDERED,
    "Qwen-QwQ-32B": RENDERED,
    "Qwen-Qwen2.5-7B-Instruct": RENDERED,
    "Qwen-Qwen3-0.6B": RENDERED,
    "Qwen3-Coder": RENDERED,
    "Qwen3.5-4B": RENDERED,
    "Reka-Edge": RENDERED,
    "Spark2.5": RENDERED,
    "StepFun3.5-Flash": RENDERED,
    "deepseek-ai-DeepSeek-R1-Distill-Llama-8B": RENDERED,
    "deepseek-ai-DeepSeek-R1-Distill-Qwen-32B": RENDERED,
    "deepseek-ai-DeepSeek-V3.1": RENDERED,
    "deepseek-ai-DeepSeek-V3.2": RENDERED,
    "deepseek-ai-DeepSeek-V4": RENDERED,
    "deepseek-ai-DeepSeek-V4-Flash-0731": RENDERED,
    "fireworks-ai-llama-3-firefunction-v2": RENDERED,
    "google-gemma-2-2b-it": {"system": "System role not supported"},
    "google-gemma-4-31B-it": RENDERED,
    "google-gemma-4-31B-it-interleaved": RENDERED,
    "ibm-granite-granite-3.3-2B-Instruct": RENDERED,
    "ibm-granite-granite-4.0": RENDERED,
    "ibm-granite-granite-4.1": RENDERED,
    "inclusionai-ling-3.0-flash": RENDERED,
    "llama-cpp-deepseek-r1": RENDERED,
    "llama-cpp-rwkv-world": RENDERED,
    "meetkai-functionary-medium-v3.1": RENDERED,
    "meetkai-functionary-medium-v3.2": RENDERED,
    "meta-llama-Llama-3.1-8B-Instruct": {"two calls": "This model only supports single tool-calls at once!"},
    "meta-llama-Llama-3.2-3B-Instruct": {"two calls": "This model only supports single tool-calls at once!"},
    "meta-llama-Llama-3.3-70B-Instruct": {"two calls": "This model only supports single tool-calls at once!"},
    "microsoft-Phi-3.5-mini-instruct": RENDERED,
    "mistralai-Ministral-3-14B-Reasoning-2512": RENDERED,
    "mistralai-Mistral-Nemo-Instruct-2407": RENDERED,
    "moonshotai-Kimi-K2": RENDERED,
    "muse-glimmer": RENDERED,
    "openai-gpt-oss-120b": RENDERED,
    "openbmb-MiniCPM5-1B": RENDERED,
    "poolside-Laguna-S-2.1": RENDERED,
    "poolside-Laguna-XS-2.1": RENDERED,
    "poolside-Laguna-XS.2": RENDERED,
    "tencent-Hy3": RENDERED,
    "unsloth-Apriel-1.5": RENDERED,
    "unsloth-mistral-Devstral-Small-2507": RENDERED,
    "upstage-Solar-Open-100B": RENDERED,
}
"""The conversations that each template refuses, and the message with which it does."""

USER = ChatMessage(role="user", content="a question")
CITY = {"type": "string", "description": "the city's name"}
TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": "forecast",
            "description": "tells the weather",
            "parameters": {"type": "object", "properties": {"city": CITY}, "required": ["city"]},
        },
    },
    {"type": "function", "function": {"name": "now"}},
]
FORECAST = {"function": {"name": "forecast", "arguments": '{"city": "Oslo"}'}}
NOW = {"function": {"name": "now", "arguments": "{}"}}


def after(*calls: dict[str, Any]) -> list[ChatMessage]:
    """A conversation in which the model has made calls and has got their results."""
    results = [ChatMessage(role="tool", content="a result") for _ in calls]
    said = [ChatMessage(role="assistant", tool_calls=list(calls)), *results]
    return [USER, *said, ChatMessage(role="assistant", content="an answer"), USER]


CASES: dict[str, tuple[list[ChatMessage], list[dict[str, Any]] | None]] = {
    "plain": ([USER], None),
    "system": ([ChatMessage(role="system", content="an order"), USER], None),
    "tools": ([USER], TOOLS),
    "a call": (after(FORECAST), TOOLS),
    "two calls": (after(FORECAST, NOW), TOOLS),
}


@pytest.fixture(scope="module")
def folder() -> Path:
    return llama_cpp_source.folder("templates")


SPECIAL = re.compile(r"<[|｜][^<>\s'\"{}]{1,40}?[|｜]>")


@functools.cache
def load(folder: Path, name: str) -> ChatTemplate:
    return ChatTemplate((folder / f"{name}.jinja").read_text(), SpecialTokens({}), "<s>", "</s>")


@functools.cache
def load_with_special_tokens(folder: Path, name: str) -> tuple[ChatTemplate, list[str]]:
    """Returns a template with the special tokens that it names, and these."""
    source = (folder / f"{name}.jinja").read_text()
    texts = sorted(set(SPECIAL.findall(source)))
    return ChatTemplate(source, SpecialTokens({text: at for at, text in enumerate(texts)}), "<s>", "</s>"), texts


def rendered(folder: Path, name: str, conversation: list[ChatMessage]) -> str:
    """Renders with the special tokens that a template names, and writes them out."""
    template, texts = load_with_special_tokens(folder, name)
    pieces = template.render(conversation, None, TOOLS)
    return "".join(piece if isinstance(piece, str) else texts[piece] for piece in pieces)


def test_the_table_names_every_template_that_there_is(folder: Path) -> None:
    assert {path.stem for path in folder.glob("*.jinja")} == set(EXPECTED)


@pytest.mark.parametrize("name", EXPECTED)
def test_a_template_renders_everything_but_what_it_refuses_by_itself(folder: Path, name: str) -> None:
    template, refused = load(folder, name), {}
    for case, (conversation, tools) in CASES.items():
        try:
            template.render(conversation, None, tools)
        except errors.RequestError as error:
            refused[case] = error.error.message.removeprefix("the model's chat template refused the messages: ")
    assert refused == EXPECTED[name]


@pytest.mark.parametrize("name", [name for name in EXPECTED if "a call" not in EXPECTED[name]])
def test_the_arguments_of_a_past_call_are_written_neither_as_a_json_string_nor_in_python(
    folder: Path, name: str
) -> None:
    (text,) = load(folder, name).render(CASES["a call"][0], None, TOOLS)
    assert r"\"city\"" not in str(text)
    assert "'city': 'Oslo'" not in str(text)


# Answers of our own that are sent back

SHOWS_NO_CALLS = {
    "HuggingFaceTB-SmolLM3-3B",
    "LFM2-8B-A1B",
    "LFM2.5-Instruct",
    "ibm-granite-granite-3.3-2B-Instruct",
}
"""Templates that write the words of past answers only."""
LEAVES_CONTENT_OUT = {
    "Cohere2MoE",
    "CohereForAI-c4ai-command-r7b-12-2024-tool_use",
    "MiniMax-M1",
    "Mistral-Small-3.2-24B-Instruct-2506",
    "NousResearch-Hermes-2-Pro-Llama-3-8B-tool_use",
    "NousResearch-Hermes-3-Llama-3.1-8B-tool_use",
    "meta-llama-Llama-3.1-8B-Instruct",
    "meta-llama-Llama-3.2-3B-Instruct",
    "meta-llama-Llama-3.3-70B-Instruct",
    "mistralai-Mistral-Nemo-Instruct-2407",
    "muse-glimmer",
    "upstage-Solar-Open-100B",
}
"""Templates that write no content beside calls."""
REFUSES_NOTHING = {"mistralai-Ministral-3-14B-Reasoning-2512"}
"""Templates that refuse an answer in which there is nothing."""
THOUGHT, WORDS = "a thought of mine", "some words of mine"


@pytest.mark.parametrize("empty", [None, ""])
@pytest.mark.parametrize("name", [name for name in EXPECTED if "a call" not in EXPECTED[name]])
def test_an_answer_with_calls_can_be_sent_back_whatever_else_it_has(folder: Path, name: str, empty: str | None) -> None:
    result = ChatMessage(role="tool", content="a result")
    for content, reasoning in ((empty, empty), (WORDS, empty), (empty, THOUGHT), (WORDS, THOUGHT)):
        answer = ChatMessage(
            role="assistant", content=content, reasoning_content=reasoning, tool_calls=[FORECAST | {"id": "abcdefghi"}]
        )
        text = rendered(folder, name, [USER, answer, result])
        assert "Oslo" in text or name in SHOWS_NO_CALLS
        assert WORDS in text or not content or name in LEAVES_CONTENT_OUT
        assert text.count(THOUGHT) <= 1
        assert "None" not in text.rpartition("a question")[2]


@pytest.mark.parametrize("name", EXPECTED)
def test_an_answer_without_calls_can_be_sent_back_whatever_else_it_has(folder: Path, name: str) -> None:
    answers = [
        ChatMessage(role="assistant", content=WORDS),
        ChatMessage(role="assistant", content=WORDS, reasoning_content=THOUGHT, tool_calls=[]),
        ChatMessage(role="assistant", reasoning_content=THOUGHT),  # it was cut off before its first word
        ChatMessage(role="assistant"),
    ]
    for answer in answers[: 3 if name in REFUSES_NOTHING else 4]:
        text = rendered(folder, name, [USER, answer, USER])
        assert WORDS in text or not answer.content
        assert "None" not in text.rpartition("a question")[0].rpartition("a question")[2]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        (
            "deepseek-ai-DeepSeek-R1-Distill-Llama-8B",
            "<｜Assistant｜><｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>forecast\n"
            '```json\n{"city": "Oslo"}\n```<｜tool▁call▁end｜><｜tool▁outputs▁begin｜>',
        ),
        (
            "deepseek-ai-DeepSeek-R1-Distill-Qwen-32B",
            "<｜Assistant｜><｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>forecast\n"
            '```json\n{"city": "Oslo"}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜><｜end▁of▁sentence｜>'
            "<｜tool▁outputs▁begin｜>",
        ),
        (
            "openai-gpt-oss-120b",
            "<|end|><|start|>assistant to=functions.forecast<|channel|>commentary json<|message|>"
            '{"city": "Oslo"}<|call|>',
        ),
    ],
)
def test_a_past_call_without_content_is_one_turn(folder: Path, name: str, expected: str) -> None:
    answer = ChatMessage(role="assistant", content="", tool_calls=[FORECAST])
    text = rendered(folder, name, [USER, answer, ChatMessage(role="tool", content="a result")])
    assert text.partition("a question")[2].startswith(expected)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("openai-gpt-oss-120b", f"<|channel|>analysis<|message|>{THOUGHT}\n\n{WORDS}<|end|><|start|>assistant to="),
        (
            "deepseek-ai-DeepSeek-R1-Distill-Llama-8B",
            f"<｜Assistant｜>{WORDS}<｜end▁of▁sentence｜><｜Assistant｜><｜tool▁calls▁begin｜>",
        ),
        (
            "mistralai-Ministral-3-14B-Reasoning-2512",
            f"[THINK]{THOUGHT}[/THINK]{WORDS}[TOOL_CALLS]forecast[ARGS]",
        ),
        (
            "llama-cpp-deepseek-r1",
            f"<｜Assistant｜>{WORDS}<｜end▁of▁sentence｜><｜Assistant｜><｜tool▁calls▁begin｜>",
        ),
    ],
)
def test_content_beside_calls_is_written_where_the_template_has_a_place_for_it(
    folder: Path, name: str, expected: str
) -> None:
    answer = ChatMessage(role="assistant", content=WORDS, reasoning_content=THOUGHT, tool_calls=[FORECAST])
    text = rendered(folder, name, [USER, answer, ChatMessage(role="tool", content="a result")])
    assert expected in text
