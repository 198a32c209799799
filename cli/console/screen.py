"""The output of `tokenbus up`: a live table on a terminal, plain lines elsewhere, or one line of JSON."""

import json
import os
import shutil
import sys
from pathlib import Path
from typing import NamedTuple

from rich.console import Console
from rich.live import Live
from rich.table import Table

from tokenbus.gateway.admission import keys
from tokenbus.protocol.wire import messages
from tokenbus.protocol.wire.subjects import Subjects


class SystemAddresses(NamedTuple):
    """The addresses of a running system."""

    nats: str
    """URL of the broker."""
    http: str
    """`base_url` of the HTTP API; empty if there is no gateway."""
    model: str
    """The served name."""
    log_folder: Path
    metrics: dict[str, str] = {}
    """URLs of the `/metrics` pages by process name; empty without --metrics."""


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


def make(*, as_json: bool) -> Screen:
    """Returns the screen that suits standard output."""
    if as_json:
        return JsonScreen()
    return TerminalScreen() if sys.stdout.isatty() else PlainScreen()


def instructions(addresses: SystemAddresses) -> str:
    """Returns instructions for using the system."""
    url, model = addresses.nats, addresses.model
    tokenbus = _called_as(sys.argv[0])
    subject = Subjects().generate(model)
    other = "" if url.endswith(":4222") and "127.0.0.1" in url else f" --nats {url}"
    return f"""
Tokenbus is ready: model "{model}" at {url}

  {tokenbus} generate{other} --model {model} "What is 12 + 30?"
  {tokenbus} generate{other} --model {model} "Tell me a story about a fox."
  {tokenbus} models{other}
{_http_instructions(addresses)}{_metrics_instructions(addresses)}
From any NATS client: publish JSON to {subject} with a reply inbox, for example
  nats request --server {url} --replies 0 --reply-timeout 2s {subject} '{{"prompt": "12 + 30 ="}}'

Logs: {addresses.log_folder}    Stop: Ctrl-C
"""


def _called_as(program: str) -> str:
    """Returns what a user types to run the command again: its name if that is on the PATH, else its path."""
    if Path(program).name != "tokenbus" or shutil.which("tokenbus") == program:
        return "tokenbus"
    return program


def _http_instructions(addresses: SystemAddresses) -> str:
    if not addresses.http:
        return ""
    body = f'{{"model": "{addresses.model}", "messages": [{{"role": "user", "content": "What is 12 + 30?"}}]}}'
    headers = "-H 'Content-Type: application/json'"
    if os.environ.get(keys.VARIABLE):
        headers += " -H 'Authorization: Bearer KEY'"
    return f"""
From OpenAI's clients: base_url {addresses.http}, for example
  curl {addresses.http}/chat/completions {headers} -d '{body}'
"""


def _metrics_instructions(addresses: SystemAddresses) -> str:
    if not addresses.metrics:
        return ""
    lines = "".join(f"  {name:<10} {url}\n" for name, url in addresses.metrics.items())
    return f"\nMetrics for Prometheus (dashboards: deploy/grafana):\n{lines}"


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
                self.write(f"{name} is {state}")
        for name in self._states.keys() - states.keys():
            self.write(f"{name} is gone")
        self._states = states


class TerminalScreen(Screen):
    """Redraws a table of the workers every second, below the lines written before."""

    def __init__(self) -> None:
        self._console = Console()
        self._live = Live(console=self._console, auto_refresh=False, transient=True)

    def write(self, line: str) -> None:
        self._console.print(line, highlight=False, markup=False)

    def loading(self, reply: messages.ModelsReply | None, workers: int) -> None:
        self._live.start()
        ready = len(reply.cards) if reply else 0
        self._live.update(f"starting: {ready} of {workers} workers have loaded the model …", refresh=True)

    def ready(self, addresses: SystemAddresses, reply: messages.ModelsReply) -> None:
        self.write(instructions(addresses))
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
        print(json.dumps({"ready": True, **urls, "models": [served.model for served in reply.models]}), flush=True)


def _states(reply: messages.ModelsReply | None) -> dict[str, str]:
    return {card.worker_id: card.shown_state for card in reply.cards} if reply else {}


def _table(reply: messages.ModelsReply) -> Table:
    table = Table("worker", "model", "state", "running", "waiting", "KV blocks used", "pids (frontend, engine)")
    for served in reply.models:
        for card in served.workers or []:
            load = card.load or messages.Load()
            table.add_row(
                card.worker_id,
                served.model,
                card.shown_state,
                f"{load.running} of {card.max_num_seqs}",
                str(load.waiting),
                str(load.used_blocks),
                f"{card.pids.front}, {card.pids.engine}",
            )
    return table
