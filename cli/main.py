"""The `tokenbus` command: parses the arguments and hands over to the part that was asked for."""

import argparse
import contextlib
import io
import os
import sys
from collections.abc import Collection, Mapping
from pathlib import Path

from tokenbus.cli import config
from tokenbus.cli.supervisor import EXIT_BAD_SETTINGS
from tokenbus.protocol.telemetry import tracing

_COMMANDS = {
    "up": "run everything on this machine, in the foreground",
    "worker": "run one worker",
    "router": "run one router",
    "gateway": "run one gateway: the OpenAI-compatible HTTP API",
    "generate": "ask for a completion and stream it",
    "embed": "make embeddings of texts, one line of JSON each",
    "models": "list what is being served",
    "chat": "talk with a model",
    "top": "watch the fleet: load, blocks, tokens per second",
    "doctor": "look at broker, models, ports and fleet, and say what to mend",
    "health": "say whether the process at a metrics port does its work",
    "cancel": "cancel a running request",
    "load": "have a running worker load one more model",
    "unload": "have a worker finish its requests and give its memory back",
    "replay": "play a trace on a simulated fleet, policies side by side",
    "bench": "put load on a running system and measure it",
    "wire-check": "hold a running system against the wire's rules",
}


def main() -> None:
    try:
        _check_arguments(sys.argv[1:])
        options = _options(sys.argv[1:])
    except ValueError as error:
        _complain(error)
        sys.exit(EXIT_BAD_SETTINGS)
    try:
        sys.exit(options.run(options))
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)


def _complain(error: ValueError) -> None:
    """A line for each mistake."""
    for line in str(error).splitlines():
        print(f"tokenbus: {line}", file=sys.stderr)


def _check_arguments(arguments: list[str]) -> None:
    """Raises ValueError for bytes that no message could carry."""
    for number, argument in enumerate(arguments, 1):
        try:
            argument.encode()
        except UnicodeEncodeError as error:
            raise ValueError(f"argument {number} is not UTF-8: {argument!r}") from error


def _options(arguments: list[str]) -> argparse.Namespace:
    """What the command line says, and, of a server process, its variables and its file. Raises ValueError."""
    parser, commands = _parser(arguments[:1])
    _warn_of_variables(arguments, commands)
    if not arguments or arguments[0] not in config.SECTIONS:
        return parser.parse_args(arguments)
    command = commands[arguments[0]]
    finder = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    finder.add_argument("--config", default=os.environ.get(config.FILE_VARIABLE, ""))
    path = finder.parse_known_args(arguments[1:])[0].config
    settings = config.apply(command, arguments[0], config.read(Path(path)) if path else {}, path)
    options = parser.parse_args(arguments)
    config.complete(options, command, settings)
    options.reload = lambda: _reloaded_options(arguments)
    return options


def _reloaded_options(arguments: list[str]) -> argparse.Namespace:
    """The same, of a process that runs: what would end it at its start is a ValueError here."""
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said):
            return _options(arguments)
    except SystemExit as error:
        raise ValueError(said.getvalue().strip().rpartition("\n")[2]) from error


def _config(options: argparse.Namespace) -> int:
    """Checks a file, or shows what a process would be given."""
    sections = [options.section] if options.section else list(config.SECTIONS)
    _, commands = _parser(sections)
    where = str(options.file or "")
    mistakes: list[str] = []
    found = {}
    try:
        tables = config.read(options.file) if options.file else {}
        for name in sections:
            with config.collecting_errors(mistakes):
                found[name] = config.apply(commands[name], name, tables, where)
                if options.do == "check" and (options.section or name in tables):
                    _try(name, where)
        config.raise_errors(mistakes)
    except ValueError as error:
        _complain(error)
        return EXIT_BAD_SETTINGS
    if options.do == "show":
        print("\n\n".join(config.show(name, settings) for name, settings in found.items()))
    else:
        print(f"{options.file or 'no file'}: every setting is known and can be")
    return 0


def _warn_of_variables(arguments: list[str], commands: Mapping[str, argparse.ArgumentParser]) -> None:
    """Says which variables are nobody's but look like somebody's: those of servers where a server is started."""
    asked = arguments[0] if arguments and arguments[0] in commands else ""
    serves = asked in (*config.SECTIONS, "up", "config")
    parsers = _parser(config.SECTIONS)[1] if serves else commands
    names = config.SECTIONS if serves else [asked] if asked else []
    for line in config.misspelled_variables({name: parsers[name] for name in names}):
        print(f"tokenbus: {line}", file=sys.stderr)


def _try(command: str, path: str) -> None:
    """Makes a command's settings as its process would. Raises ValueError."""
    from tokenbus.cli.serving import servers

    made = servers.SETTINGS_FACTORIES[command](_reloaded_options([command, *(("--config", path) if path else ())]))
    made.broker.check()
    tracing.check_endpoint(made.otlp_traces_endpoint)


def _parser(
    asked: Collection[str] = tuple(_COMMANDS),
) -> tuple[argparse.ArgumentParser, dict[str, argparse.ArgumentParser]]:
    """The parser, and those of its commands; only the commands that are asked for have their flags."""
    parser = argparse.ArgumentParser(
        prog="tokenbus", description="LLM inference workers behind a NATS broker.", allow_abbrev=False
    )
    parser.add_argument("--version", action=_Version, nargs=0, help="print the version and end")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    for name, text in _COMMANDS.items():
        command = commands.add_parser(name, help=text)
        if name in asked:
            _add_flags(name, command)
    for name in config.SECTIONS:
        commands.choices[name].add_argument(
            "--config",
            metavar="FILE",
            help=f"settings in TOML, under the flags' names (variable {config.FILE_VARIABLE})",
        )
    settings = commands.add_parser("config", help="check a file of settings, or show what a process would be given")
    settings.add_argument("do", choices=("check", "show"))
    settings.add_argument("section", choices=config.SECTIONS, nargs="?", help="only of this command")
    settings.add_argument("--file", type=Path, default=os.environ.get(config.FILE_VARIABLE), help="the file")
    settings.set_defaults(run=_config)
    return parser, dict(commands.choices)


class _Version(argparse.Action):
    """Looks the version up when it is asked for: that takes a while."""

    def __call__(self, parser: argparse.ArgumentParser, *rest: object) -> None:
        import importlib.metadata

        print(f"tokenbus {importlib.metadata.version('tokenbus')}")
        parser.exit()


def _add_flags(name: str, parser: argparse.ArgumentParser) -> None:
    """Imports the code of a command, and of those like it: half a second that the others need not wait for."""
    match name:
        case "up" | "worker" | "router" | "gateway":
            from tokenbus.cli.serving import servers

            servers.FLAGS[name](parser)
        case "doctor" | "replay" | "bench" | "wire-check":
            from tokenbus.cli.looking import measurers

            measurers.FLAGS[name](parser)
        case _:
            from tokenbus.cli.asking import askers

            askers.FLAGS[name](parser)
