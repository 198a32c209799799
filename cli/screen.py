"""What `tokenbus up` shows: a live table on a terminal, plain lines elsewhere, one JSON line where asked for."""

import json
import os
import sys
from pathlib import Path
from typing import NamedTuple, Protocol

from rich.console import Console
from rich.live import Live
from rich.table import Table

from tokenbus.gateway import keys
from tokenbus.protocol.wire import messages


class SystemAddresses(NamedTuple):
    """Where a system is to be found."""

    nats: str
    """URL of the broker."""
    http: str
    """`base_url` of the HTTP API; empty where there is none."""
    model: str
    """Served name."""
    log_folder: Path
    metrics: dict[str, str] = {}
    """URL of `/metrics` by the name of the process, where it was asked for."""


class Screen(Protocol):
    """Where `up` says what it does."""

    def write(self, line: str) -> None: ...

    def loading(self, reply: messages.ModelsReply | None, workers: int) -> None:
        """Called while the system is not ready yet."""
        ...

    def ready(self, place: SystemAddresses, reply: messages.ModelsReply) -> None:
        """Called once, when it is."""
        ...

    def show(self, reply: messages.ModelsReply | None) -> None:
        """Called every second with what is being served; None when no router answered."""
        ...

    def close(self) -> None: ...


def make(*, as_json: bool) -> Screen:
    """The screen that suits standard output."""
    if as_json:
        return JsonScreen()
    return TerminalScreen() if sys.stdout.isatty() else PlainScreen()


def workers_of(reply: messages.ModelsReply, model: str) -> list[messages.Card]:
    return [card for served in reply.models if served.model == model for card in served.workers or []]


def instructions(place: SystemAddresses) -> str:
    """The first screen: what to type next."""
    url, model = place.nats, place.model
    other = "" if url.endswith(":4222") and "127.0.0.1" in url else f" --nats {url}"
    return f"""
Tokenbus is ready: model "{model}" at {url}

  .venv/bin/tokenbus generate{other} --model {model} "What is 12 + 30?"
  .venv/bin/tokenbus generate{other} --model {model} "Tell me a story about a fox."
  .venv/bin/tokenbus models{other}
{_how_to_post(place)}{_where_to_look(place)}
From any NATS client: publish JSON to tokenbus.v1.generate.<model> with a reply inbox, for example
  nats request --server {url} --replies 0 --reply-timeout 2s tokenbus.v1.generate.{model} '{{"prompt": "12 + 30 ="}}'

Logs: {place.log_folder}    Stop: Ctrl-C
"""


def _how_to_post(place: SystemAddresses) -> str:
    if not place.http:
        return ""
    body = f'{{"model": "{place.model}", "messages": [{{"role": "user", "content": "What is 12 + 30?"}}]}}'
    headers = "-H 'Content-Type: application/json'"
    if os.environ.get(keys.VARIABLE):
        headers += " -H 'Authorization: Bearer KEY'"
    return f"""
From OpenAI's clients: base_url {place.http}, for example
  curl {place.http}/chat/completions {headers} -d '{body}'
"""


def _where_to_look(place: SystemAddresses) -> str:
    if not place.metrics:
        return ""
    lines = "".join(f"  {name:<10} {url}\n" for name, url in place.metrics.items())
    return f"\nMetrics for Prometheus (dashboards: deploy/grafana):\n{lines}"


class PlainScreen:
    """Lines on standard output: what changes, once."""

    def __init__(self) -> None:
        self._states: dict[str, str] = {}
        self._loading = -1

    def write(self, line: str) -> None:
        print(line, flush=True)

    def loading(self, reply: messages.ModelsReply | None, workers: int) -> None:
        ready = sum(len(served.workers or []) for served in reply.models) if reply else 0
        if ready != self._loading:
            self._loading = ready
            self.write(f"starting: {ready} of {workers} workers have loaded the model")

    def ready(self, place: SystemAddresses, reply: messages.ModelsReply) -> None:
        self.write(instructions(place))
        self.show(reply)

    def show(self, reply: messages.ModelsReply | None) -> None:
        states = _states(reply)
        for name, state in states.items():
            if self._states.get(name) != state:
                self.write(f"{name} is {state}")
        for name in self._states.keys() - states.keys():
            self.write(f"{name} is gone")
        self._states = states

    def close(self) -> None:
        pass


class TerminalScreen:
    """A table of the workers, redrawn every second below what was said before."""

    def __init__(self) -> None:
        self._console = Console()
        self._live = Live(console=self._console, auto_refresh=False, transient=True)

    def write(self, line: str) -> None:
        self._console.print(line, highlight=False, markup=False)

    def loading(self, reply: messages.ModelsReply | None, workers: int) -> None:
        self._live.start()
        ready = sum(len(served.workers or []) for served in reply.models) if reply else 0
        self._live.update(f"starting: {ready} of {workers} workers have loaded the model …", refresh=True)

    def ready(self, place: SystemAddresses, reply: messages.ModelsReply) -> None:
        self.write(instructions(place))
        self.show(reply)

    def show(self, reply: messages.ModelsReply | None) -> None:
        self._live.start()
        self._live.update(_table(reply) if reply else "no router answers", refresh=True)

    def close(self) -> None:
        self._live.stop()


class JsonScreen:
    """One line on standard output when the system serves; everything else goes to standard error."""

    def write(self, line: str) -> None:
        print(line, file=sys.stderr, flush=True)

    def loading(self, reply: messages.ModelsReply | None, workers: int) -> None:
        pass

    def ready(self, place: SystemAddresses, reply: messages.ModelsReply) -> None:
        names = [served.model for served in reply.models]
        where = {"nats": place.nats, "http": place.http or None, "metrics": place.metrics}
        print(json.dumps({"ready": True, **where, "models": names}), flush=True)

    def show(self, reply: messages.ModelsReply | None) -> None:
        pass

    def close(self) -> None:
        pass


def _states(reply: messages.ModelsReply | None) -> dict[str, str]:
    if reply is None:
        return {}
    return {card.worker_id: str(card.state) for served in reply.models for card in served.workers or []}


def _table(reply: messages.ModelsReply) -> Table:
    table = Table("worker", "model", "state", "running", "waiting", "KV blocks used", "pids (frontend, engine)")
    for served in reply.models:
        for card in served.workers or []:
            load = card.load or messages.Load()
            table.add_row(
                card.worker_id,
                served.model,
                card.state,
                f"{load.running} of {card.max_num_seqs}",
                str(load.waiting),
                str(load.used_blocks),
                f"{card.pids.front}, {card.pids.engine}",
            )
    return table
