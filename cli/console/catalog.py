"""The commands of `tokenbus`, and what help says of each.

A command's module is imported only when that command is asked for: importing all of them takes a second of CPU."""

import importlib
from typing import Any, NamedTuple

from tokenbus.cli.console import needs
from tokenbus.cli.console.flags import Parser


class Command(NamedTuple):
    """One command, and what help says of it."""

    text: str
    """One sentence without its subject and full stop."""
    first: str
    """An example, without `tokenbus`."""
    second: str
    place: str = ""
    """The module in `cli/commands` that has the command, if it is not of the command's name."""

    def make_parser(self, name: str) -> Parser:
        """Returns the command's parser with all flags."""
        parser = Parser(name, f"{self.text[0].upper()}{self.text[1:]}.", (self.first, self.second))
        own = name.replace("-", "_")
        add_flags = "add_flags" if self.place in ("", own) else f"add_{own}_flags"
        getattr(module_of(self.place or own), add_flags)(parser)
        return parser


_RUN = {
    "up": Command(
        "run the whole system on this machine, in the foreground",
        *("up", "up chat.gguf --workers 1 --context-length 8192"),
    ),
    "worker": Command(
        "run one worker", "worker --model demo", "worker --model org/repo:Q4_K_M --nats nats://broker:4222 -np 32"
    ),
    "router": Command(
        "run one router", "router --nats nats://broker:4222", "router --tenant-limit 8,600,100000 --hold-s 60"
    ),
    "gateway": Command(
        "run one gateway: the OpenAI-compatible HTTP API",
        *("gateway --port 8080", "gateway --host 0.0.0.0 --api-key sk-1234=acme"),
    ),
    "auth": Command(
        "let NATS clients in by their API keys: answer the broker's auth callout",
        *("auth --nats-user auth --seeds callout.seeds", "auth --nats-user auth --keys keys.json"),
    ),
    "config": Command(
        "check a settings file, or show the settings that a server would use",
        *("config check --file tokenbus.toml", "config show worker"),
    ),
}
_ASK = {
    "generate": Command(
        "generate a completion and stream it",
        *('generate "What is 20 + 22?"', "generate -n 200 --temperature 0 - < notes.txt"),
    ),
    "chat": Command("chat with a model", "chat", 'chat --system "Answer in one word."'),
    "embed": Command(
        "compute embeddings of texts, one line of JSON each",
        *('embed "a text" "another"', "embed - < lines.txt", "generate"),
    ),
    "rerank": Command(
        "rank texts by their relevance to a query",
        *('rerank "a question" "a text" "another"', 'rerank --top-n 3 "a question" - < lines.txt', "generate"),
    ),
    "cancel": Command("cancel a running request", "cancel my-request", "cancel --tenant acme my-request", "generate"),
    "session": Command(
        "keep a session's cached prefixes for a while, or report its end",
        *("session --keep-s 600 chat-1", "session --end chat-1", "generate"),
    ),
}
_OPERATE = {
    "models": Command(
        "list the models and workers being served, or the models in the Hub's cache", "models", "models --local"
    ),
    "top": Command("watch the fleet: load, KV blocks, tokens per second", "top", "top --once"),
    "trace": Command(
        "tell how a request went: which worker and why, what was cached, what it waited for",
        *("trace my-request", "trace --slower-than-ms 2000", "traces"),
    ),
    "doctor": Command(
        "check broker, models, ports and fleet, and say how to fix what is wrong", "doctor", "doctor --model chat.gguf"
    ),
    "auth-init": Command(
        "make the seeds of `tokenbus auth`, and print the configuration of a broker with keys",
        *("auth-init callout.seeds", "auth-init callout.seeds --prefix acme.v1", "auth"),
    ),
    "health": Command(
        "check whether the process at a metrics port is ready", "health --port 9110", "health --port 9110 --live"
    ),
    "keys": Command(
        "create, list, rotate and revoke the API keys of a fleet",
        *("keys create --tenant acme --models 'chat-*' --expires 90d", "keys list"),
    ),
    "usage": Command(
        "show what was used, by day, tenant, key and model",
        *("usage", "usage --from 30d --group-by key,model --tenant acme --csv"),
    ),
    "audit": Command(
        "show who did what: requests, changes of keys, connections kept out, commands to workers",
        *("audit --since 2d --tenant acme", "audit --follow --json"),
    ),
    "pull": Command(
        "fetch a model from the Hugging Face Hub, or continue fetching it",
        *("pull org/repo:Q4_K_M", "pull --engine onnx org/repo"),
    ),
    "inspect": Command(
        "show how a model writes reasoning and tool calls", "inspect chat.gguf", "inspect org/repo:Q4_K_M", "doctor"
    ),
    "load": Command(
        "load another model, or an adapter, in a running worker",
        *("load worker-1 chat.gguf --set context-length=4096", "load worker-1 --lora style=style.gguf"),
    ),
    "unload": Command(
        "let a worker finish its requests, then free its memory",
        *("unload worker-1", "unload worker-1 --lora style", "load"),
    ),
    "stop": Command(
        "end one running request with what was generated so far", "stop my-request", "stop acme:my-request", "stopping"
    ),
    "drain": Command(
        "let a worker finish, move or stop its requests, and leave",
        *("drain worker-1", "drain worker-1 --grace-s 60 --stop", "stopping"),
    ),
}
_MEASURE = {
    "bench": Command(
        "put load on a running system and measure it",
        *("bench --model demo --concurrency 1,4,16", "bench --model demo --rate 5 --duration-s 60 --html report.html"),
    ),
    "replay": Command(
        "replay a trace on a simulated fleet and compare policies",
        *("replay conversations", "replay trace.jsonl --workers 16 --policy kv,round_robin"),
    ),
    "wire-check": Command(
        "check a running system against the rules of the wire contract", "wire-check --model demo", "wire-check --list"
    ),
}
_TITLES = {"run a system": _RUN, "send requests": _ASK, "look after a system": _OPERATE, "measure and check": _MEASURE}
COMMANDS = _RUN | _ASK | _OPERATE | _MEASURE


def module_of(name: str) -> Any:
    """Returns a module of `cli/commands`."""
    return importlib.import_module(f"tokenbus.cli.commands.{name}")


def make_parser(name: str) -> Parser:
    """Returns the parser of a command. Raises MissingExtraError if what it needs is not installed."""
    needs.check(name)
    parser = COMMANDS[name].make_parser(name)
    parser.elsewhere = lambda option: [one for one in COMMANDS if one != name and option in _options_of(one)]
    return parser


def _options_of(name: str) -> set[str]:
    """Returns the flags of a command, and their aliases; none of one whose packages are not installed."""
    if not needs.are_met(name):
        return set()
    return {option for flag in COMMANDS[name].make_parser(name).flags.values() for option in flag.names.split()}


def overview(width: int) -> str:
    """Returns what `tokenbus help` prints: every command with its sentence, in lines of at most `width` columns."""
    import textwrap

    column = max(map(len, COMMANDS)) + 4
    about = textwrap.wrap("LLM inference workers behind a NATS broker.", width)
    lines = ["usage: tokenbus COMMAND [OPTIONS]", "", *about]
    for title, commands in _TITLES.items():
        lines += ["", f"{title}:"]
        for name, command in commands.items():
            start = f"  {name}".ljust(column)
            lines += textwrap.wrap(command.text, width, initial_indent=start, subsequent_indent=" " * column)
    more = "`tokenbus COMMAND --help` lists the options of a command, `tokenbus --version` prints the version."
    return "\n".join([*lines, "", *textwrap.wrap(more, width)])
