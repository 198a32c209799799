"""The messages of earlier chats."""

import stat
from pathlib import Path

from tokenbus.cli.console import chat_history
from tokenbus.cli.console.chat_history import ChatHistory


def test_messages_of_several_lines_come_back_in_their_order(tmp_path: Path) -> None:
    history = ChatHistory(tmp_path / "state/history")
    assert history.read() == []
    for message in ("one", "two\nlines", "three\u2028"):
        history.add(message)
    assert ChatHistory(history.path).read() == ["one", "two\nlines", "three\u2028"]


def test_only_its_user_can_read_it(tmp_path: Path) -> None:
    history = ChatHistory(tmp_path / "state/history")
    history.add("secret")
    assert stat.S_IMODE(history.path.stat().st_mode) == 0o600
    assert stat.S_IMODE(history.path.parent.stat().st_mode) == 0o700
    history.path.write_text('"old"\n' * (chat_history.MAX_MESSAGES + 1))
    history.shorten()
    assert stat.S_IMODE(history.path.stat().st_mode) == 0o600


def test_a_line_that_was_cut_off_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "history"
    path.write_bytes(b'"one"\n"tw\n17\n\xff\n"three"\n')
    assert ChatHistory(path).read() == ["one", "three"]


def test_the_latest_messages_are_kept_up_to_the_limits(tmp_path: Path) -> None:
    path = tmp_path / "history"
    history = ChatHistory(path)
    path.write_text("".join(f'"{number}"\n' for number in range(chat_history.MAX_MESSAGES + 2)))
    history.shorten()
    assert history.read() == [str(number) for number in range(2, chat_history.MAX_MESSAGES + 2)]
    long = "x" * (chat_history.MAX_BYTES // 4)
    for _ in range(20):
        history.add(long)
        assert path.stat().st_size <= 2 * chat_history.MAX_BYTES + len(long) + 3
    history.shorten()
    assert history.read() == [long] * 3
    history.add("x" * chat_history.MAX_BYTES)
    assert history.read() == [long] * 3
    assert [one.name for one in tmp_path.iterdir()] == ["history"]
