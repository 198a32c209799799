"""Commands on a terminal, used by hand: line editing, history, keys, and what is left when they end."""

import shlex
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.system import command, running_up
from tests.support.terminal import Terminal

UP, LEFT, CTRL_C, CTRL_D, CTRL_Z = "\x1b[A", "\x1b[D", "\x03", "\x04", "\x1a"
PROMPT = "\x1b[?2004h"
"""Shown with each prompt of the editor, which asks the terminal to mark what is pasted."""


def chat(url: str, state: Path, *arguments: str) -> Terminal:
    variables = {"TOKENBUS_NATS": url, "XDG_STATE_HOME": str(state)}
    return Terminal(command("chat", "--temperature", "0", *arguments), variables)


def test_a_line_can_be_edited_and_recalled_in_the_next_chat(url: str, tmp_path: Path) -> None:
    with chat(url, tmp_path) as terminal:
        terminal.until(PROMPT)
        terminal.press(f"What is 20 + 2?{LEFT}2\r")
        terminal.until("20 + 22 = 42.")
        terminal.until(PROMPT)
        terminal.press("/exit\r")
        assert terminal.wait() == 0
        assert terminal.is_as_before
    history = tmp_path / "tokenbus/chat/history"
    assert history.stat().st_mode & 0o777 == 0o600
    with chat(url, tmp_path) as terminal:
        terminal.until(PROMPT)
        terminal.press(f"{UP}{UP}\r")
        terminal.until("20 + 22 = 42.")
        terminal.until(PROMPT)
        terminal.press(CTRL_D)
        assert terminal.wait() == 0


def test_a_pasted_text_and_a_backslash_make_one_message_of_several_lines(url: str, tmp_path: Path) -> None:
    with chat(url, tmp_path) as terminal:
        terminal.until(PROMPT)
        terminal.press("\x1b[200~first\rsecond\x1b[201~\\\rthird\r")
        terminal.until("tokens, first after")
        terminal.until(PROMPT)
        terminal.press("/undo\r")
        terminal.until(r"took back 'first\nsecond\nthird' and its answer; nothing is left")
        terminal.until(PROMPT)
        terminal.press("/bye\r")
        assert terminal.wait() == 0


def test_answers_are_broken_between_words_on_a_terminal_as_wide_as_it_is_now(url: str, tmp_path: Path) -> None:
    variables = {"TOKENBUS_NATS": url, "PATH": ""}
    asked = command("generate", "--temperature", "0", "Tell me a story.")
    whole = subprocess.run(asked, env=variables, capture_output=True, text=True, timeout=60).stdout
    assert whole.count("\n") == 1
    with chat(url, tmp_path) as terminal:
        for columns in (80, 40):
            terminal.until(PROMPT)
            terminal.resize(columns)
            terminal.press("/new\r")
            terminal.until(PROMPT)
            terminal.press("Tell me a story.\r")
            terminal.until(whole[:20])
            lines = (whole[:20] + terminal.until(" tokens, first")).split("\r\n")[:-1]
            assert " ".join(lines) == whole.rstrip("\n")
            assert max(map(len, lines)) <= columns
            assert min(map(len, lines[:-1])) > columns - 20


@pytest.fixture
def slow_url() -> Iterator[str]:
    """The broker of a system with one model, which generates a token every 50 ms and never ends by itself."""
    with running_up("--workers", "1", "--engine", "sim", "--model", "steps-of-50ms") as url:
        yield url


def test_ctrl_c_stops_an_answer_and_at_the_prompt_leaves_when_it_is_repeated(slow_url: str, tmp_path: Path) -> None:
    with chat(slow_url, tmp_path) as terminal:
        terminal.until("Chatting with steps-of-50ms.")
        terminal.until(PROMPT)
        terminal.press("Tell me a story\r")
        terminal.until(" simulated-")
        terminal.press(CTRL_C)
        stopped_at = time.monotonic()
        terminal.until("[cancelled")  # as the worker said
        assert time.monotonic() - stopped_at < 1.0
        terminal.until(PROMPT)
        terminal.press("/new\r")
        terminal.until("started over, without 1 turn")
        terminal.until(PROMPT)
        terminal.press(f"a line that is given up{CTRL_C}")
        terminal.until(PROMPT)
        terminal.press(CTRL_C)
        terminal.until("Ctrl-D, /bye or another Ctrl-C leaves")
        terminal.until(PROMPT)
        terminal.press(CTRL_C)
        assert terminal.wait() == 130
        assert terminal.is_as_before


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_chat_that_is_ended_from_outside_leaves_the_terminal_as_it_was(
    url: str, tmp_path: Path, number: signal.Signals
) -> None:
    with chat(url, tmp_path) as terminal:
        terminal.until(PROMPT)
        assert not terminal.is_as_before
        terminal.signal(number)
        assert terminal.wait() == 130
        assert terminal.is_as_before


@pytest.mark.parametrize("end", ["q", CTRL_C, signal.SIGTERM, signal.SIGHUP])
def test_top_leaves_by_q_and_by_every_signal_with_the_terminal_as_it_was(url: str, end: str | signal.Signals) -> None:
    with Terminal(command("top"), {"TOKENBUS_NATS": url}, columns=100) as terminal:
        terminal.until("worker-1")
        assert not terminal.is_as_before
        terminal.signal(end) if isinstance(end, signal.Signals) else terminal.press(end)
        assert terminal.wait() == 0
        assert terminal.is_as_before
        assert terminal.rest.endswith("\x1b[?25h\x1b[?1049l")  # the cursor is shown, and the first screen


def test_top_can_be_suspended_and_continued_from_a_shell(url: str) -> None:
    script = f"{shlex.join(command('top'))}; stty -a; fg"
    with Terminal(["sh", "-mc", script], {"TOKENBUS_NATS": url}, columns=100) as terminal:
        terminal.until("worker-1")
        terminal.press(CTRL_Z)
        terminal.until("\x1b[?1049l")
        assert " icanon " in terminal.until(" echo ")
        terminal.until("worker-1")
        terminal.press("q")
        assert terminal.wait() == 0
        assert terminal.is_as_before


def test_nothing_is_asked_of_a_terminal_where_there_is_none(url: str, tmp_path: Path) -> None:
    variables = {"TOKENBUS_NATS": url, "XDG_STATE_HOME": str(tmp_path), "PATH": ""}
    lines = "What is 20 + 22?\n/undo\n/undo\n/unknown\n/new now\n/bye\nnever\n"
    done = subprocess.run(
        command("chat", "--temperature", "0"), env=variables, input=lines, capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stdout) == (0, "20 + 22 = 42.\n")
    _, taken_back, nothing, unknown, with_more = done.stderr.splitlines()
    assert taken_back == "took back 'What is 20 + 22?' and its answer; nothing is left"
    assert nothing == "there is nothing to take back"
    assert unknown.startswith("there is no command /unknown, only /new, /undo, ")
    assert with_more == "/new takes nothing after it"
    assert not list(tmp_path.iterdir())
