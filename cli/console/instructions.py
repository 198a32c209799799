"""The commands by which `tokenbus up` shows how its system is used. Each can be copied from a terminal of any width:
it is folded between words only, where a shell continues the line."""

import json
import os
import shlex
import shutil
import sys
import textwrap
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from tokenbus.protocol.wire.subjects import Subjects

_DEFAULT_URL = "nats://127.0.0.1:4222"
_NATS_VARIABLE = "TOKENBUS_NATS"
_NARROWEST = 20
UNLIMITED = 1 << 16
"""The width of an output that is no terminal."""


class SystemAddresses(NamedTuple):
    """The addresses of a running system."""

    nats: str
    """URL of the broker, without a password."""
    http: str
    """`base_url` of the HTTP API; empty if there is no gateway."""
    models: tuple[str, ...]
    """The served names."""
    log_folder: Path
    metrics: dict[str, str] = {}
    """URLs of the `/metrics` pages by process name; empty without --metrics."""
    has_password: bool = False
    """Whether the broker's URL has a user and a password, which are not shown."""
    needs_key: bool = False
    """Whether the HTTP API takes requests with a key only."""
    first_key: str = ""
    """The key of an operator that was made at this start; it is shown this once."""


def instructions(addresses: SystemAddresses, width: int = UNLIMITED) -> str:
    """Returns instructions for using the system, for a terminal with this many columns. Only words that are too long
    make longer lines."""
    return "\n".join(["", *_paragraphs(addresses, max(width, _NARROWEST)), ""])


def _paragraphs(addresses: SystemAddresses, width: int) -> Iterator[str]:
    tokenbus, broker = _called_as(sys.argv[0]), _broker_flag(addresses)
    # A model of another worker at the same broker may come later, so one of several is always named.
    model = ["--model " + shlex.quote(addresses.models[0])] if len(addresses.models) > 1 else []
    yield _text(f"Tokenbus is ready: {_names(addresses.models)} at {addresses.nats}", width)
    if addresses.has_password:
        yield _text(f"Set {_NATS_VARIABLE} to its URL, with the password, for these commands:", width)
    yield ""
    yield _command([f"{tokenbus} generate", *broker, *model, '"What is 12 + 30?"'], width)
    yield _command([f"{tokenbus} chat", *broker, *model], width)
    yield _command([f"{tokenbus} top", *broker], width)
    yield from _key_paragraph(addresses, f"{tokenbus} keys create", broker, width)
    yield from _http_paragraph(addresses, width)
    yield from _metrics_paragraph(addresses, width)
    subject = Subjects().generate(addresses.models[0])
    yield ""
    yield _text("From any NATS client: publish JSON with a reply inbox, for example", width)
    options = ["--replies 0", "--reply-timeout 2s"]
    yield _command(["nats request", f"--server {addresses.nats}", *options, subject, _json(prompt="12 + 30 =")], width)
    yield ""
    yield _text(f"Logs: {addresses.log_folder}", width)
    yield "Stop: Ctrl-C"


def _key_paragraph(addresses: SystemAddresses, create: str, broker: Sequence[str], width: int) -> Iterator[str]:
    if addresses.first_key:
        yield ""
        yield _text("The first API key, for an operator, is shown this once; the second command makes others:", width)
        yield f"  KEY={addresses.first_key}"
        yield _command([create, *broker, "--tenant acme"], width)


def _http_paragraph(addresses: SystemAddresses, width: int) -> Iterator[str]:
    if not addresses.http:
        return
    key = ['-H "Authorization: Bearer $KEY"'] if addresses.needs_key else []
    name = {"model": addresses.models[0]} if len(addresses.models) > 1 else {}
    body = f"-d {_json(**name, input='What is 12 + 30?')}"
    yield ""
    yield _text(f"From OpenAI's clients: base_url {addresses.http}, for example", width)
    header = "-H 'Content-Type: application/json'"
    yield _command(["curl", f"{addresses.http}/responses", header, *key, body], width)
    yield _text(f"In a browser on this machine: {addresses.http.removesuffix('/v1')}/console/", width)


def _metrics_paragraph(addresses: SystemAddresses, width: int) -> Iterator[str]:
    if addresses.metrics:
        yield ""
        yield _text("Metrics for Prometheus (dashboards: deploy/grafana):", width)
        yield from (f"  {name:<10} {url}" for name, url in addresses.metrics.items())


def _names(models: Sequence[str]) -> str:
    return ", ".join(f'"{name}"' for name in models)


def _json(**fields: str) -> str:
    """Returns a JSON object as one word of a shell."""
    return shlex.quote(json.dumps(fields))


def _broker_flag(addresses: SystemAddresses) -> list[str]:
    """Returns the flag with which a command in another terminal finds the broker."""
    is_default = addresses.nats == _DEFAULT_URL and os.environ.get(_NATS_VARIABLE, _DEFAULT_URL) == _DEFAULT_URL
    return [] if is_default or addresses.has_password else [f"--nats {shlex.quote(addresses.nats)}"]


def _called_as(program: str) -> str:
    """Returns what a user types to run the command again: its name if that is on the PATH, else its path."""
    if Path(program).name != "tokenbus" or shutil.which("tokenbus") == program:
        return "tokenbus"
    return shlex.quote(program)


def _text(text: str, width: int) -> str:
    return textwrap.fill(text, width, break_long_words=False, break_on_hyphens=False)


def _command(words: Sequence[str], width: int) -> str:
    """Returns a command on as few lines as the width allows; each but the last one ends with a backslash."""
    lines, line = [], f"  {words[0]}"
    for number, word in enumerate(words[1:], 2):
        end = "" if number == len(words) else " \\"
        if len(f"{line} {word}{end}") <= width:
            line += f" {word}"
        else:
            lines.append(f"{line} \\")
            line = f"    {word}"
    return "\n".join([*lines, line])
