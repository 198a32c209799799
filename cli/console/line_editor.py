"""Messages typed on a terminal: with line editing, several lines and a history. The event loop runs meanwhile."""

import sys
from collections.abc import Iterable

from prompt_toolkit import PromptSession
from prompt_toolkit.history import History
from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent
from prompt_toolkit.output import create_output
from prompt_toolkit.output.vt100 import Vt100_Output
from prompt_toolkit.utils import is_dumb_terminal

from tokenbus.cli.console.chat_history import ChatHistory

_PROMPT = "> "
_NEXT_LINE = "  "


class LineEditor:
    """Reads one message at a time from standard input, a terminal; its prompt goes to standard error.

    Enter ends a message. A pasted text keeps its lines, and Alt-Enter, or Enter after a backslash, begins another."""

    def __init__(self, history: ChatHistory | None) -> None:
        """Without a history, messages are remembered until the end of this process."""
        # On a terminal without control sequences, such as that of an editor, the library asks for plain lines.
        output = None if is_dumb_terminal() else create_output(sys.stderr)
        if isinstance(output, Vt100_Output):
            output.enable_cpr = False  # not every terminal answers, and nothing here needs the cursor's position
        self._history = _RecalledMessages(history)
        self._session: PromptSession[str] = PromptSession(
            _PROMPT,
            history=self._history,
            key_bindings=_keys(),
            prompt_continuation=_NEXT_LINE,
            output=output,
            enable_open_in_editor=True,
        )

    def __repr__(self) -> str:
        return f"<LineEditor {self._history.file!r}>"

    @property
    def problem(self) -> str:
        """The reason why messages are no longer kept for the next chat; empty if they are."""
        return self._history.problem

    async def read(self) -> str:
        """Returns the next message. Raises EOFError after Ctrl-D, and KeyboardInterrupt after Ctrl-C in an empty line;
        in any other, Ctrl-C discards what was typed."""
        while True:
            try:
                return await self._session.prompt_async()
            except KeyboardInterrupt:
                if not self._session.default_buffer.text:
                    raise


class _RecalledMessages(History):
    """The editor's view of a history file. An error in keeping a message does not end the chat."""

    def __init__(self, file: ChatHistory | None) -> None:
        super().__init__()
        self.file = file
        self.problem = ""

    def load_history_strings(self) -> Iterable[str]:
        return reversed(self.file.read()) if self.file else ()

    def store_string(self, string: str) -> None:
        if self.file is None or self.problem:
            return
        try:
            self.file.add(string)
        except OSError as error:
            self.problem = f"{self.file.path}: {error.strerror}"


def _keys() -> KeyBindings:
    keys = KeyBindings()

    @keys.add("escape", "enter")
    def begin_line(event: KeyPressEvent) -> None:
        event.current_buffer.newline(copy_margin=False)

    @keys.add("enter")
    def end_message(event: KeyPressEvent) -> None:
        buffer = event.current_buffer
        if buffer.document.char_before_cursor == "\\" and buffer.document.is_cursor_at_the_end:
            buffer.delete_before_cursor()
            buffer.newline(copy_margin=False)
        else:
            buffer.validate_and_handle()

    return keys
