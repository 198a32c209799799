"""The commands that ask: clients, an operator's, and those that look and measure."""

import argparse
from typing import Any

from cli import chat, clients, doctor, health, kinds, operate, reach, top
from cli.bench import options as bench_options
from cli.bench import run as bench
from cli.replay import options as replay_options
from cli.replay import run as replay
from cli.wirecheck import run as wirecheck
from protocol import subjects


def add(commands: Any) -> None:
    """Their parsers."""
    _add_generate(commands.add_parser("generate", help="ask for a completion and stream it"))
    _add_embed(commands.add_parser("embed", help="make embeddings of texts, one line of JSON each"))
    models = commands.add_parser("models", help="list what is being served")
    reach.add_all(models)
    models.add_argument("--json", action="store_true", help="print the reply as it came")
    models.set_defaults(run=clients.models)
    _add_chat(commands.add_parser("chat", help="talk with a model"))
    watch = commands.add_parser("top", help="watch the fleet: load, blocks, tokens per second")
    reach.add_all(watch)
    watch.add_argument(
        "--every-s", type=kinds.seconds, default=1.0, help="seconds from one look to the next (%(default)s)"
    )
    watch.add_argument("--once", action="store_true", help="print one table and end")
    watch.add_argument("--json", action="store_true", help="print the workers as JSON and end")
    watch.set_defaults(run=top.run)
    looked = commands.add_parser("doctor", help="look at broker, models, ports and fleet, and say what to mend")
    reach.add_all(looked)
    looked.add_argument("--model", action="append", default=[], metavar="MODEL", help="a file or folder to look at")
    looked.add_argument(
        "--ports",
        type=kinds.port,
        nargs="*",
        default=[4222, 8000, 9100],
        metavar="PORT",
        help="ports that shall be free",
    )
    looked.set_defaults(run=doctor.run)
    health.add_flags(commands.add_parser("health", help="say whether the process at a metrics port does its work"))
    cancel = commands.add_parser("cancel", help="cancel a running request")
    reach.add_all(cancel)
    cancel.add_argument("request_id", metavar="ID")
    cancel.set_defaults(run=clients.cancel)
    _add_operator(commands)
    played = commands.add_parser("replay", help="play a trace on a simulated fleet, policies side by side")
    replay_options.add_flags(played)
    played.set_defaults(run=replay.run)
    measured = commands.add_parser("bench", help="put load on a running system and measure it")
    reach.add_all(measured)
    bench_options.add_flags(measured)
    measured.set_defaults(run=bench.run)
    _add_wire_check(commands.add_parser("wire-check", help="hold a running system against the wire's rules"))


def _add_generate(parser: argparse.ArgumentParser) -> None:
    reach.add_all(parser)
    parser.add_argument("prompt", metavar="PROMPT", help="the text; - reads standard input")
    parser.add_argument("--model", metavar="NAME", required=True, help="the served model")
    parser.add_argument("--raw", action="store_true", help="send the text as it is, without the chat template")
    _add_sampling(parser)
    parser.add_argument("--stop", action="append", metavar="TEXT", help="text that ends the answer; may be repeated")
    parser.add_argument("--ignore-eos", action="store_true", default=None, help="go on behind the model's end token")
    parser.add_argument("--id", help="the request's id")
    parser.add_argument("--timeout-ms", type=float)
    parser.add_argument("--json", action="store_true", help="print the raw messages, one a line")
    parser.set_defaults(run=clients.generate)


def _add_embed(parser: argparse.ArgumentParser) -> None:
    reach.add_all(parser)
    parser.add_argument("--model", metavar="NAME", required=True, help="the model's name on the wire")
    parser.add_argument("--dimensions", type=kinds.at_least(1), help="numbers of each vector; all that the model makes")
    parser.add_argument("--no-normalize", action="store_true", help="leave vectors as long as the model makes them")
    parser.add_argument("--timeout-ms", type=float, help="how long to wait (60,000)")
    parser.add_argument(
        "texts", metavar="TEXT", nargs="+", help="a text; - alone reads one from each line of the input"
    )
    parser.set_defaults(run=clients.embed)


def _add_chat(parser: argparse.ArgumentParser) -> None:
    reach.add_all(parser)
    parser.add_argument("--model", metavar="NAME", required=True, help="the served model")
    _add_sampling(parser)
    parser.set_defaults(run=chat.run)


def _add_sampling(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--system", metavar="TEXT", help="a system message before it")
    parser.add_argument("--max-tokens", type=int)
    parser.add_argument("--temperature", type=float)
    parser.add_argument("--top-p", type=float)
    parser.add_argument("--top-k", type=int)
    parser.add_argument("--min-p", type=float)
    parser.add_argument("--seed", type=int)


def _add_operator(commands: Any) -> None:
    load = commands.add_parser("load", help="have a running worker load one more model")
    reach.add_all(load)
    load.add_argument("worker_id", metavar="WORKER", help="the worker beside which it is loaded")
    load.add_argument("model", metavar="MODEL", help="file, directory or name on the Hub, as that worker finds it")
    load.add_argument("--served-name", metavar="NAME", help="its name on the wire (the file's name)")
    load.add_argument("--replicas", type=kinds.at_least(1), default=1, help="on one copy of the weights (%(default)s)")
    load.add_argument(
        "--set",
        type=operate.setting,
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="an engine setting that differs from the worker's own, as context-length=2048; may be repeated",
    )
    load.set_defaults(run=operate.load)
    unload = commands.add_parser("unload", help="have a worker finish its requests and give its memory back")
    reach.add_all(unload)
    unload.add_argument("worker_id", metavar="WORKER")
    unload.set_defaults(run=operate.unload)


def _add_wire_check(parser: argparse.ArgumentParser) -> None:
    reach.add_all(parser)
    parser.add_argument("--model", metavar="NAME", default="", help="the served model")
    parser.add_argument(
        "--inbox-prefix",
        metavar="PREFIX",
        default=subjects.DEFAULT_INBOX_PREFIXES[0],
        help="what reply subjects begin with (%(default)s)",
    )
    parser.add_argument("--only", metavar="TEXT", default="", help="only the rules whose sentence has this text")
    parser.add_argument("--list", action="store_true", help="list the rules and try none")
    parser.add_argument("--json", action="store_true", help="print one JSON object a rule")
    parser.set_defaults(run=wirecheck.run)
