"""Engines find out at load how their model writes its answers, and have features by it."""

import itertools
import resource
import sys
import time

import pytest
from structlog.testing import capture_logs

from tokenbus.protocol.prompt import tokenizer_bundle
from tokenbus.protocol.wire import internal, limits
from tokenbus.protocol.wire.messages import ChatMessage
from tokenbus.worker.contract.chat_format import Calls, ChatFormat, Kind, Reasoning
from tokenbus.worker.engine.device import features
from tokenbus.worker.tokenizers.model_tokenizer import ModelTokenizer

TEMPLATE = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% for call in m.tool_calls or [] %}"
    "<call>{{ call.function | tojson }}</call>{% endfor %}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
CALLS = Calls(kind=Kind.JSON, call_open="<call>", call_close="</call>")
LIMIT_S = 0.5


@pytest.fixture
def short_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gives all renderings together a quarter of the CPU time that they may take at most."""
    assert features._CPU_S == 4 * LIMIT_S
    monkeypatch.setattr(features, "_CPU_S", LIMIT_S)


def rules(template: str | None) -> tokenizer_bundle.PromptRules:
    return tokenizer_bundle.PromptRules(special_tokens={"<|end|>": 7}, chat_template=template, vocab_size=8)


def test_a_format_is_inferred_in_a_renderer_process_and_logged() -> None:
    with capture_logs() as logs:
        found = features.infer_chat_format(rules(TEMPLATE))
    assert found is not None
    assert (found.calls, found.tokens) == (CALLS, {"<|end|>": 7})
    assert [(line["event"], line["offered"]) for line in logs] == [("chat_format_inferred", ["tools"])]


@pytest.mark.parametrize("template", [None, "", "{% for %}", "{{ messages[0].content }}"])
def test_a_model_without_a_template_that_shows_one_has_no_format(template: str | None) -> None:
    assert features.infer_chat_format(rules(template)) is None


@pytest.mark.parametrize(
    "rounds", [pytest.param(99_999, id="one rendering takes it all"), pytest.param(4_000, id="many take some each")]
)
def test_the_renderings_of_a_slow_template_delay_the_load_by_little_cpu_time_together(
    rounds: int, short_limit: None
) -> None:
    slow = f"{{% for a in range({rounds}) %}}{{% for b in range(1000) %}}{{% endfor %}}{{% endfor %}}"
    before = children_cpu_s()
    with capture_logs() as logs:
        assert features.infer_chat_format(rules(TEMPLATE + slow)) is None
    assert children_cpu_s() - before < LIMIT_S + 0.2
    assert [line["event"] for line in logs] == ["chat_format_given_up", "chat_format_inferred"]
    assert logs[-1]["offered"] == []


def test_to_compile_a_slow_template_is_part_of_that_time(short_limit: None) -> None:
    before = children_cpu_s()
    assert features.infer_chat_format(rules("{{ 9 ** (9 ** 9) }}")) is None
    assert children_cpu_s() - before < LIMIT_S + 0.2


def test_a_format_is_inferred_however_long_the_machine_takes_to_start_a_process(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(limits, "RENDER_STALL_S", 0.001)
    cpu_s = itertools.count(step=1e-6)  # little, but some whenever it is looked at
    monkeypatch.setattr(time, "clock_gettime", lambda clock: next(cpu_s))
    found = features.infer_chat_format(rules(TEMPLATE))
    assert found is not None
    assert found.calls == CALLS


def test_a_conversation_that_no_process_renders_is_logged(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with capture_logs() as logs:
        assert features.infer_chat_format(rules(TEMPLATE)) is None
    assert "chat_format_not_rendered" in [line["event"] for line in logs]


def test_features_follow_from_the_format() -> None:
    thinking = Reasoning(open="<think>", close="</think>")
    assert features.of_format(None) == ()
    assert features.of_format(ChatFormat(calls=CALLS)) == ("tools",)
    assert features.of_format(ChatFormat(reasoning=thinking)) == ("reasoning",)
    assert features.of_format(ChatFormat(calls=CALLS, reasoning=thinking)) == ("tools", "reasoning")
    assert features.with_sampler(chat=True, ends=True, fim=False, chat_format=ChatFormat(calls=CALLS))[-1] == "tools"
    assert "chat" not in features.with_sampler(chat=False, ends=True, fim=False, chat_format=None)
    assert "fim" not in features.with_sampler(chat=True, ends=True, fim=False, chat_format=None)
    assert "fim" in features.with_sampler(chat=True, ends=True, fim=True, chat_format=None)


def test_a_worker_renders_tools_too() -> None:
    source = "{% for tool in tools or [] %}{{ tool.function.name }}<|end|>{% endfor %}"
    tokenizer = ModelTokenizer(rules(source), lambda text: [len(text)])
    ask = internal.Tokenize(
        messages=[ChatMessage(role="user", content="hi")], tools=[{"type": "function", "function": {"name": "abc"}}]
    )
    assert tokenizer.tokenize(ask) == [3, 7]


def children_cpu_s() -> float:
    """CPU seconds of all processes of this one that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime
