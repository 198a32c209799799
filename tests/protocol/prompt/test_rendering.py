"""A chat template may want all the time and memory there is: it gets little, and nobody else notices."""

import itertools
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from structlog.testing import capture_logs

from tests.support import renderer_processes
from tokenbus.protocol.prompt import rendering
from tokenbus.protocol.prompt.rendering import Renderer, RendererSetup
from tokenbus.protocol.wire import errors, limits, messages

PLAIN = "{% for message in messages %}{{ message.role }}: {{ message.content }}<|end|>{% endfor %}"
GREEDY = {
    "for ever": "{% for a in n %}{% for b in n %}{% for c in n %}{% endfor %}{% endfor %}{% endfor %}",
    "a text that doubles": "{% for i in n %}{% set it.x = it.x ~ 'ab' ~ it.x %}{% endfor %}",
    "a list of lists": "{% for i in range(40) %}{% set it.x = [it.x, it.x] %}{% endfor %}{{ it.x }}",
    "a list that grows while it is read": "{% for m in messages %}{{ messages.append(m) }}{% endfor %}",
    "a number": "{% set nine = messages | length + 8 %}{{ nine ** (nine ** nine) }}",
    "one expression": "{{ 'a' * (messages | length * 10 ** 12) }}",
}
GREED = "{% set it, n = namespace(x='ab'), range(9999) %}{% if messages[0].content == 'greed' %}(greed){% endif %}ok"


@pytest.fixture
def renderers() -> Iterator[list[Renderer]]:
    made: list[Renderer] = []
    yield made
    for one in made:
        one.close()


def said(content: str) -> list[messages.ChatMessage]:
    return [messages.ChatMessage(role="user", content=content)]


def make(renderers: list[Renderer], source: str, cpu_s: float = limits.RENDER_CPU_S) -> Renderer:
    renderers.append(Renderer(RendererSetup(source=source, special_tokens={"<|end|>": 2}, cpu_s=cpu_s)))
    return renderers[-1]


def test_a_conversation_becomes_texts_and_special_tokens(renderers: list[Renderer]) -> None:
    assert make(renderers, PLAIN).render(said("hello"), None) == ["user: hello", 2]


def test_tools_reach_the_template(renderers: list[Renderer]) -> None:
    tools = [{"type": "function", "function": {"name": "f"}}, {"type": "function", "function": {"name": "g<|end|>"}}]
    of = make(renderers, "{% for tool in tools %}{{ tool.function.name }}<|end|>{% endfor %}")
    assert of.render(said("hello"), None, tools) == ["f", 2, "g<|end|>", 2]


@pytest.mark.parametrize("greed", GREEDY.values(), ids=list(GREEDY))
def test_what_wants_too_much_is_refused_and_the_next_conversation_is_rendered(
    renderers: list[Renderer], greed: str
) -> None:
    of = make(renderers, GREED.replace("(greed)", greed), cpu_s=0.5)
    with pytest.raises(errors.RequestError) as caught:
        of.render(said("greed"), None)
    assert caught.value.error.code is errors.Code.INVALID_REQUEST
    assert caught.value.error.param == "messages"
    assert of.render(said("hello"), None) == ["ok"]


def test_a_prompt_may_be_a_few_times_as_long_as_its_conversation_and_no_longer(renderers: list[Renderer]) -> None:
    of = make(renderers, "{% for i in range(times) %}{{ messages[0].content }}{% endfor %}")
    long = "a" * 1_000_000
    assert of.render(said(long), {"times": 4}) == [long * 4]
    with pytest.raises(errors.RequestError, match="made 5000000 characters"):
        of.render(said(long), {"times": 5})
    short = "a" * 100
    assert len(of.render(said(short), {"times": limits.MAX_TEMPLATE_BYTES // 100})) == 1
    with pytest.raises(errors.RequestError, match="characters of the messages"):
        of.render(said(short), {"times": limits.MAX_TEMPLATE_BYTES // 100 + 50})


def test_to_compile_a_template_is_bounded_too(renderers: list[Renderer]) -> None:
    of = make(renderers, "{{ 9 ** (9 ** 9) }}", cpu_s=0.5)
    for _ in range(2):  # the second time nobody tries
        with pytest.raises(ValueError, match=r"more than 0\.5 s to compile"):
            of.start()


def test_a_malformed_template_is_refused_at_the_start_and_at_each_conversation(renderers: list[Renderer]) -> None:
    of = make(renderers, "{% for %}")
    with pytest.raises(ValueError, match="malformed"):
        of.start()
    for _ in range(2):
        with pytest.raises(errors.RequestError, match="malformed") as caught:
            of.render(said("x"), None)
        assert caught.value.error.code is errors.Code.UNSUPPORTED


def test_a_number_that_no_message_can_carry_is_refused(renderers: list[Renderer]) -> None:
    of = make(renderers, PLAIN)
    with pytest.raises(errors.RequestError) as caught:
        of.render(said("x"), {"n": 1 << 70})
    assert caught.value.error.param == "chat_template_kwargs"
    with pytest.raises(errors.RequestError) as caught:
        of.render(said("x"), None, [{"type": "function", "function": {"name": "f", "parameters": {"n": 1 << 70}}}])
    assert caught.value.error.param == "tools"
    assert of.render(said("hello"), None) == ["user: hello", 2]


def test_when_its_process_is_killed_the_conversation_gets_another_and_the_log_says_so(
    renderers: list[Renderer],
) -> None:
    before, of = renderer_processes.renderers(), make(renderers, PLAIN)
    of.start()
    (pid,) = renderer_processes.renderers() - before
    os.kill(pid, signal.SIGKILL)
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    with capture_logs() as lines:
        assert of.render(said("hello"), None) == ["user: hello", 2]
    assert [line["event"] for line in lines] == ["renderer_died"]
    assert "status -9" in lines[0]["error"]


@pytest.mark.parametrize("num_chars", [5, pytest.param(900_000, id="more than the socket takes")])
def test_when_its_process_is_frozen_the_conversation_gets_another(
    renderers: list[Renderer], monkeypatch: pytest.MonkeyPatch, num_chars: int
) -> None:
    before, of = renderer_processes.renderers(), make(renderers, PLAIN)
    of.start()
    (pid,) = renderer_processes.renderers() - before
    renderer_processes.freeze(pid)
    only_frozen_ones_stall(monkeypatch, {pid})
    long = "a" * num_chars
    with capture_logs() as lines, ThreadPoolExecutor(2) as pool:
        one, other = pool.submit(of.render, said(long), None), pool.submit(of.render, said("b"), None)
        assert (one.result(), other.result()) == ([f"user: {long}", 2], ["user: b", 2])
    assert [line["error"] for line in lines] == ["the renderer process got no CPU time for 0.05 s"]
    assert pid not in renderer_processes.renderers()


def test_a_conversation_whose_processes_all_freeze_ends_in_an_error_and_the_next_is_rendered(
    renderers: list[Renderer], monkeypatch: pytest.MonkeyPatch
) -> None:
    of, frozen, start = make(renderers, PLAIN), set[int](), rendering._start_process
    only_frozen_ones_stall(monkeypatch, frozen)

    def start_frozen(fd: int) -> "subprocess.Popen[bytes]":
        process = start(fd)
        renderer_processes.freeze(process.pid)
        frozen.add(process.pid)
        return process

    with monkeypatch.context() as patched:
        patched.setattr(rendering, "_start_process", start_frozen)
        with pytest.raises(errors.RequestError, match="got no CPU time") as caught:
            of.render(said("a" * 900_000), None)
    assert caught.value.error.code is errors.Code.INTERNAL
    assert caught.value.error.retryable
    assert of.render(said("hello"), None) == ["user: hello", 2]


def test_no_process_keeps_much_memory_after_a_conversation(renderers: list[Renderer]) -> None:
    before, of = (
        renderer_processes.renderers(),
        make(renderers, GREED.replace("(greed)", GREEDY["a text that doubles"]), cpu_s=60),
    )
    of.render(said("hello"), None)
    (pid,) = renderer_processes.renderers() - before
    with capture_logs() as lines, pytest.raises(errors.RequestError, match="MemoryError"):
        of.render(said("greed"), {"n": 40 * [0]})
    if lines:  # the collector had not yet found the text when the conversation ended
        (line,) = lines
        assert line["event"] == "renderer_too_large"
        assert line["bytes"] > limits.RENDER_KEPT_BYTES
        assert pid not in renderer_processes.renderers()
    else:
        assert renderer_processes.resident_bytes(pid) <= limits.RENDER_KEPT_BYTES
    assert of.render(said("hello"), None) == ["ok"]


def test_a_process_is_kept_after_a_conversation_of_the_largest_size_there_is(renderers: list[Renderer]) -> None:
    before, of = renderer_processes.renderers(), make(renderers, PLAIN)
    of.render(said("a" * 16_000_000), None)
    (pid,) = renderer_processes.renderers() - before
    of.render(said("hello"), None)
    assert pid in renderer_processes.renderers()


def test_cpu_time_is_counted_over_all_its_processes(renderers: list[Renderer]) -> None:
    of = make(renderers, GREED.replace("(greed)", GREEDY["for ever"]), cpu_s=0.5)
    assert of.cpu_s == 0.0
    with pytest.raises(errors.RequestError):
        of.render(said("greed"), None)
    used_s = of.cpu_s
    assert used_s >= 0.4  # the kernel counts in ticks
    of.render(said("hello"), None)
    assert of.cpu_s > used_s


def test_nothing_is_left_of_one_that_is_closed_or_forgotten() -> None:
    before, of = renderer_processes.renderers(), Renderer(RendererSetup(source=PLAIN, special_tokens={}))
    of.start()
    assert len(renderer_processes.renderers() - before) == 1
    of.close()
    assert renderer_processes.renderers() == before
    of.start()
    assert len(renderer_processes.renderers() - before) == 1
    del of
    assert renderer_processes.renderers() == before


def test_several_threads_take_turns(renderers: list[Renderer]) -> None:
    of = make(renderers, PLAIN)
    contents = [f"number {number}" for number in range(40)]
    with ThreadPoolExecutor(8) as pool:
        made = list(pool.map(lambda content: of.render(said(content), None), contents))
    assert made == [[f"user: {content}", 2] for content in contents]


def only_frozen_ones_stall(monkeypatch: pytest.MonkeyPatch, frozen: set[int]) -> None:
    """Makes a stall short, and one of the frozen processes only: others would seem to stall on a busy machine."""
    cpu_s = itertools.count()

    def now(clock: int) -> float:
        return 0.0 if clock in {~pid << 3 | 2 for pid in frozen} else float(next(cpu_s))

    monkeypatch.setattr(time, "clock_gettime", now)
    monkeypatch.setattr(limits, "RENDER_STALL_S", 0.05)
