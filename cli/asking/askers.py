"""The commands that ask: clients, an operator's, and those that look."""

import argparse

from tokenbus.cli import arguments, connection_flags
from tokenbus.cli.commands import chat, generate, health, load, top


def _add_models(parser: argparse.ArgumentParser) -> None:
    connection_flags.add_client_flags(parser)
    parser.add_argument("--json", action="store_true", help="print the reply as it came")
    parser.set_defaults(run=generate.models)


def _add_top(parser: argparse.ArgumentParser) -> None:
    connection_flags.add_client_flags(parser)
    parser.add_argument(
        "--interval-s", type=arguments.seconds, default=1.0, help="seconds from one look to the next (%(default)s)"
    )
    parser.add_argument("--once", action="store_true", help="print one table and end")
    parser.add_argument("--json", action="store_true", help="print the workers as JSON and end")
    parser.set_defaults(run=top.run)


def _add_cancel(parser: argparse.ArgumentParser) -> None:
    connection_flags.add_client_flags(parser)
    parser.add_argument("request_id", metavar="ID")
    parser.set_defaults(run=generate.cancel)


def _add_generate(parser: argparse.ArgumentParser) -> None:
    connection_flags.add_client_flags(parser)
    parser.add_argument("prompt", metavar="PROMPT", help="the text; - reads standard input")
    parser.add_argument("--model", metavar="NAME", required=True, help="the served model")
    parser.add_argument("--raw", action="store_true", help="send the text as it is, without the chat template")
    _add_sampling(parser)
    parser.add_argument("--stop", action="append", metavar="TEXT", help="text that ends the answer; may be repeated")
    parser.add_argument("--ignore-eos", action="store_true", default=None, help="go on behind the model's end token")
    parser.add_argument("--id", help="the request's id")
    parser.add_argument("--timeout-ms", type=float)
    parser.add_argument("--json", action="store_true", help="print the raw messages, one a line")
    parser.set_defaults(run=generate.generate)


def _add_embed(parser: argparse.ArgumentParser) -> None:
    connection_flags.add_client_flags(parser)
    parser.add_argument("--model", metavar="NAME", required=True, help="the model's name on the wire")
    parser.add_argument(
        "--dimensions", type=arguments.at_least(1), help="numbers of each vector; all that the model makes"
    )
    parser.add_argument("--no-normalize", action="store_true", help="leave vectors as long as the model makes them")
    parser.add_argument("--timeout-ms", type=float, help="how long to wait (60,000)")
    parser.add_argument(
        "texts", metavar="TEXT", nargs="+", help="a text; - alone reads one from each line of the input"
    )
    parser.set_defaults(run=generate.embed)


def _add_chat(parser: argparse.ArgumentParser) -> None:
    connection_flags.add_client_flags(parser)
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


def _add_load(parser: argparse.ArgumentParser) -> None:
    connection_flags.add_client_flags(parser)
    parser.add_argument("worker_id", metavar="WORKER", help="the worker beside which it is loaded")
    parser.add_argument("model", metavar="MODEL", help="file, directory or name on the Hub, as that worker finds it")
    parser.add_argument("--served-name", metavar="NAME", help="its name on the wire (the file's name)")
    parser.add_argument(
        "--replicas", type=arguments.at_least(1), default=1, help="on one copy of the weights (%(default)s)"
    )
    parser.add_argument(
        "--set",
        type=load.engine_setting,
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="an engine setting that differs from the worker's own, as context-length=2048; may be repeated",
    )
    parser.set_defaults(run=load.load)


def _add_unload(parser: argparse.ArgumentParser) -> None:
    connection_flags.add_client_flags(parser)
    parser.add_argument("worker_id", metavar="WORKER")
    parser.set_defaults(run=load.unload)


FLAGS = {
    "generate": _add_generate,
    "embed": _add_embed,
    "models": _add_models,
    "chat": _add_chat,
    "top": _add_top,
    "health": health.add_flags,
    "cancel": _add_cancel,
    "load": _add_load,
    "unload": _add_unload,
}
"""What gives the parser of each command its flags."""
