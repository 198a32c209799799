"""The output of `tokenbus up`: a live table on a terminal, plain lines elsewhere, or one line of JSON."""

import contextlib
import json
import sys
from collections.abc import Callable

from rich.console import Console
from rich.live import Live
from rich.table import Table

from tokenbus.cli.console.instructions import SystemAddresses, instructions
from tokenbus.cli.console.plain_text import cells, printable
from tokenbus.protocol.wire import messages


class Screen:
    """The base of all screens: shows nothing but lines, on standard error."""

    def write(self, line: str) -> None:
        print(line, file=sys.stderr, flush=True)

    def loading(self, reply: messages.ModelsReply | None, workers: int) -> None:
        """Shows how many workers are loaded, while the system is not ready yet."""

    def ready(self, addresses: SystemAddresses, reply: messages.ModelsReply) -> None:
        """Announces, once, that the system is ready."""

    def show(self, reply: messages.ModelsReply | None) -> None:
        """Shows every second what is being served; `reply` is None if no router answered."""

    def close(self) -> None:
        """Restores the terminal."""


def make(*, as_json: bool) -> "GuardedScreen":
    """Returns the screen that suits standard output."""
    if as_json:
        return GuardedScreen(JsonScreen())
    return GuardedScreen(TerminalScreen() if sys.stdout.isatty() else PlainScreen())


class GuardedScreen(Screen):
    """Shows everything on another screen. A full disk or a closed terminal hides it, but does not end what is shown."""

    def __init__(self, screen: Screen) -> None:
        self._screen = screen
        self.on_reader_gone: Callable[[], object] = lambda: None
        """Called when whoever reads the output through a pipe has ended."""
        self.is_reader_gone = False

    def write(self, line: str) -> None:
        self._guard(lambda: self._screen.write(line))

    def loading(self, reply: messages.ModelsReply | None, workers: int) -> None:
        self._guard(lambda: self._screen.loading(reply, workers))

    def ready(self, addresses: SystemAddresses, reply: messages.ModelsReply) -> None:
        self._guard(lambda: self._screen.ready(addresses, reply))

    def show(self, reply: messages.ModelsReply | None) -> None:
        self._guard(lambda: self._screen.show(reply))

    def close(self) -> None:
        self._guard(self._screen.close)

    def _guard(self, shows: Callable[[], None]) -> None:
        with contextlib.suppress(OSError):
            try:
                shows()
            except BrokenPipeError:
                self.is_reader_gone = True
                self.on_reader_gone()


class PlainScreen(Screen):
    """Prints a line whenever something changes."""

    def __init__(self) -> None:
        self._states: dict[str, str] = {}
        self._loading = -1

    def write(self, line: str) -> None:
        print(line, flush=True)

    def loading(self, reply: messages.ModelsReply | None, workers: int) -> None:
        ready = len(reply.cards) if reply else 0
        if ready != self._loading:
            self._loading = ready
            self.write(f"starting: {ready} of {workers} workers have loaded the model")

    def ready(self, addresses: SystemAddresses, reply: messages.ModelsReply) -> None:
        self.show(reply)
        self.write(instructions(addresses))

    def show(self, reply: messages.ModelsReply | None) -> None:
        states = _states(reply)
        for name, state in states.items():
            if self._states.get(name) != state:
                self.write(printable(f"{name} is {state}"))
        for name in self._states.keys() - states.keys():
            self.write(printable(f"{name} is gone"))
        self._states = states


class TerminalScreen(Screen):
    """Redraws a table of the workers every second, below the lines written before."""

    def __init__(self) -> None:
        self._console = Console()
        self._live = Live(console=self._console, auto_refresh=False, transient=True)

    def write(self, line: str) -> None:
        self._console.print(line, highlight=False, markup=False, soft_wrap=True)  # what is copied has no line breaks

    def loading(self, reply: messages.ModelsReply | None, workers: int) -> None:
        self._live.start()
        ready = len(reply.cards) if reply else 0
        self._live.update(f"starting: {ready} of {workers} workers have loaded the model …", refresh=True)

    def ready(self, addresses: SystemAddresses, reply: messages.ModelsReply) -> None:
        self.write(instructions(addresses, self._console.width))
        self.show(reply)

    def show(self, reply: messages.ModelsReply | None) -> None:
        self._live.start()
        self._live.update(_table(reply) if reply else "no router answers", refresh=True)

    def close(self) -> None:
        self._live.stop()


class JsonScreen(Screen):
    """Prints one line of JSON on standard output when the system is ready."""

    def ready(self, addresses: SystemAddresses, reply: messages.ModelsReply) -> None:
        urls = {"nats": addresses.nats, "http": addresses.http or None, "metrics": addresses.metrics}
        urls |= {"key": addresses.first_key} if addresses.first_key else {}
        print(json.dumps({"ready": True, **urls, "models": [served.model for served in reply.models]}), flush=True)


def _states(reply: messages.ModelsReply | None) -> dict[str, str]:
    return {card.worker_id: card.shown_state for card in reply.cards} if reply else {}


def _table(reply: messages.ModelsReply) -> Table:
    table = Table("worker", "model", "state", "running", "waiting", "KV blocks used", "pids (frontend, engine)")
    for served in reply.models:
        for card in served.workers or []:
            load = card.load or messages.Load()
            row = cells(
                card.worker_id,
                served.model,
                card.shown_state,
                f"{load.running} of {card.max_num_seqs}",
                str(load.waiting),
                str(load.used_blocks),
                f"{card.pids.front}, {card.pids.engine}",
            )
            table.add_row(*row)
    return table
