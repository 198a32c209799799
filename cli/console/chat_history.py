"""The messages that a user has typed in chats, kept in a file for the next chat."""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

import msgspec

MAX_MESSAGES = 1_000
MAX_BYTES = 1 << 20
"""Bytes of all messages in the file, as JSON."""


class ChatHistory:
    """A file with one message per line, as JSON, so that a message may have several lines. Only this user can read it.

    Several chats may use it at a time: each appends its messages with one write."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __repr__(self) -> str:
        return f"<ChatHistory {self.path}>"

    def read(self) -> list[str]:
        """Returns the messages, the oldest first; none if there is no file that can be read."""
        try:
            return list(_messages(self.path.read_bytes()))
        except OSError:
            return []

    def add(self, message: str) -> None:
        """Keeps a message, and forgets the oldest ones beyond the limits. Raises OSError if it can't be kept."""
        line = msgspec.json.encode(message) + b"\n"
        if len(line) > MAX_BYTES:
            return
        self.path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        file = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        try:
            os.write(file, line)
            has_room = os.fstat(file).st_size <= 2 * MAX_BYTES
        finally:
            os.close(file)
        if not has_room:
            self.shorten()

    def shorten(self) -> None:
        """Rewrites the file with the latest messages within the limits, if it has more. Raises OSError."""
        try:
            data = self.path.read_bytes()
        except FileNotFoundError:
            return
        kept: list[bytes] = []
        num_bytes = 0
        for line in reversed(data.splitlines(keepends=True)):
            num_bytes += len(line)
            if len(kept) == MAX_MESSAGES or num_bytes > MAX_BYTES:
                break
            kept.append(line)
        if sum(map(len, kept)) == len(data):
            return
        shorter = self.path.with_name(f"{self.path.name}.{os.getpid()}")
        try:
            with open(os.open(shorter, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
                file.writelines(reversed(kept))
            shorter.replace(self.path)
        finally:
            shorter.unlink(missing_ok=True)


def _messages(data: bytes) -> Iterator[str]:
    """Yields the messages in a file's lines; a line that a crash cut off is left out."""
    for line in data.splitlines():
        with contextlib.suppress(msgspec.DecodeError, msgspec.ValidationError):
            yield msgspec.json.decode(line, type=str)
