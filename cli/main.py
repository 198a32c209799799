"""The `tokenbus` command line: parses the arguments and runs the command they name.

A command's module is imported only when that command is asked for: importing all of them takes a second of CPU."""

import argparse
import contextlib
import importlib
import io
import os
import sys
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from tokenbus.cli.console import config, needs
from tokenbus.cli.console.supervisor import EXIT_BAD_SETTINGS
from tokenbus.protocol import extras
from tokenbus.protocol.telemetry import tracing

_COMMANDS = {
    "up": ("up:add_flags", "run the whole system on this machine, in the foreground"),
    "worker": ("worker:add_flags", "run one worker"),
    "router": ("router:add_flags", "run one router"),
    "gateway": ("gateway:add_flags", "run one gateway: the OpenAI-compatible HTTP API"),
    "generate": ("generate:add_flags", "generate a completion and stream it"),
    "embed": ("generate:add_embed_flags", "compute embeddings of texts, one line of JSON each"),
    "rerank": ("generate:add_rerank_flags", "rank texts by their relevance to a query"),
    "models": ("top:add_models_flags", "list the models and workers being served, or the models in the Hub's cache"),
    "pull": ("pull:add_flags", "fetch a model from the Hugging Face Hub, or continue fetching it"),
    "chat": ("chat:add_flags", "chat with a model"),
    "top": ("top:add_flags", "watch the fleet: load, KV blocks, tokens per second"),
    "doctor": ("doctor:add_flags", "check broker, models, ports and fleet, and say how to fix what is wrong"),
    "inspect": ("doctor:add_inspect_flags", "show how a model writes reasoning and tool calls"),
    "health": ("health:add_flags", "check whether the process at a metrics port is ready"),
    "cancel": ("generate:add_cancel_flags", "cancel a running request"),
    "session": ("generate:add_session_flags", "keep a session's cached prefixes for a while, or report its end"),
    "load": ("load:add_flags", "load another model in a running worker"),
    "stop": ("stopping:add_stop_flags", "end one running request with what was generated so far"),
    "drain": ("stopping:add_drain_flags", "let a worker finish, move or stop its requests, and leave"),
    "unload": ("load:add_unload_flags", "let a worker finish its requests, then free its memory"),
    "replay": ("replay:add_flags", "replay a trace on a simulated fleet and compare policies"),
    "bench": ("bench:add_flags", "put load on a running system and measure it"),
    "wire-check": ("wire_check:add_flags", "check a running system against the rules of the wire contract"),
}
"""The function that adds each command's flags, by module, and the command's help text."""


def main() -> None:
    try:
        sys.exit(_run(sys.argv[1:]))
    except extras.MissingExtraError as error:
        _print_errors(error)
        sys.exit(1)
    except BrokenPipeError:
        # Python flushes standard output again at exit, which would fail once more and print a traceback.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)


def _run(arguments: list[str]) -> int:
    """Runs the command that the arguments name; returns the exit status."""
    try:
        _check_arguments(arguments)
        options = parse(arguments)
    except ValueError as error:
        _print_errors(error)
        return EXIT_BAD_SETTINGS
    status: int = options.run(options)
    return status


def _print_errors(error: Exception) -> None:
    for line in str(error).splitlines():
        print(f"tokenbus: {line}", file=sys.stderr)


def _check_arguments(arguments: list[str]) -> None:
    """Raises ValueError for arguments that are not UTF-8, since no message could carry them."""
    for number, argument in enumerate(arguments, 1):
        try:
            argument.encode()
        except UnicodeEncodeError as error:
            raise ValueError(f"argument {number} is not UTF-8: {argument!r}") from error


def parse(arguments: list[str]) -> argparse.Namespace:
    """Returns the options of a command line; those of a server also come from its variables and its settings file.

    Raises ValueError with one line for each mistake in these, SystemExit for a mistake on the command line, and
    MissingExtraError if what the command needs is not installed."""
    if arguments:
        needs.check(arguments[0])
    parser, commands = make_parser(arguments[:1])
    _warn_of_misspelled_variables(arguments, commands)
    if not arguments or arguments[0] not in config.SECTIONS:
        return parser.parse_args(arguments)
    command = commands[arguments[0]]
    # The file's settings become defaults of the real parser, so its path must be known before that parses.
    finder = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    finder.add_argument("--config", default=os.environ.get(config.FILE_VARIABLE, ""))
    path = finder.parse_known_args(arguments[1:])[0].config
    settings = config.apply(command, arguments[0], config.read(Path(path)) if path else {}, path)
    options = parser.parse_args(arguments)
    config.complete(options, command, settings)
    options.reload = lambda: _parse_again(arguments)
    return options


def _parse_again(arguments: list[str]) -> argparse.Namespace:
    """Parses the command line of a running server again. Raises ValueError where argparse would end the process."""
    output = io.StringIO()
    try:
        with contextlib.redirect_stderr(output):
            return parse(arguments)
    except SystemExit as error:
        raise ValueError(output.getvalue().strip().rpartition("\n")[2]) from error


def _warn_of_misspelled_variables(arguments: list[str], commands: Mapping[str, argparse.ArgumentParser]) -> None:
    """Warns of environment variables that no process reads but that resemble known ones."""
    command = arguments[0] if arguments and arguments[0] in commands else ""
    starts_servers = command in (*config.SECTIONS, "up", "config")
    installed = [name for name in config.SECTIONS if needs.are_met(name)]
    parsers = make_parser(installed)[1] if starts_servers else commands
    names = installed if starts_servers else [command] if command else []
    others = [name for name in config.SECTIONS if name not in installed]
    for line in config.misspelled_variables({name: parsers[name] for name in names}, others):
        print(f"tokenbus: {line}", file=sys.stderr)


def _run_config(options: argparse.Namespace) -> int:
    """`tokenbus config check` and `tokenbus config show`."""
    sections = [options.section] if options.section else list(config.SECTIONS)
    for name in sections:
        needs.check(name)
    _, commands = make_parser(sections)
    where = str(options.file or "")
    mistakes: list[str] = []
    found = {}
    try:
        tables = config.read(options.file) if options.file else {}
        for name in sections:
            with config.collecting_errors(mistakes):
                found[name] = config.apply(commands[name], name, tables, where)
                if options.do == "check" and (options.section or name in tables):
                    _check_settings(name, where)
        config.raise_errors(mistakes)
    except ValueError as error:
        _print_errors(error)
        return EXIT_BAD_SETTINGS
    if options.do == "show":
        print("\n\n".join(config.show(name, settings) for name, settings in found.items()))
    else:
        print(f"{options.file or 'no file'}: all settings are valid")
    return 0


def _check_settings(command: str, path: str) -> None:
    """Makes a server's settings the way its process would. Raises ValueError."""
    options = _parse_again([command, *(("--config", path) if path else ())])
    settings = _module(command).settings_of(options)
    settings.broker.check()
    tracing.check_endpoint(settings.otlp_traces_endpoint)


def make_parser(
    commands: Collection[str] = tuple(_COMMANDS),
) -> tuple[argparse.ArgumentParser, dict[str, argparse.ArgumentParser]]:
    """Returns the parser and the subparsers by command. Only those of `commands` get their flags."""
    parser = argparse.ArgumentParser(
        prog="tokenbus", description="LLM inference workers behind a NATS broker.", allow_abbrev=False
    )
    parser.add_argument("--version", action=_Version, nargs=0, help="print the version and exit")
    subparsers = parser.add_subparsers(metavar="COMMAND", required=True)
    for name, (place, text) in _COMMANDS.items():
        command = subparsers.add_parser(name, help=text)
        if name in commands:
            module, _, function = place.partition(":")
            getattr(_module(module), function)(command)
    for name in config.SECTIONS:
        subparsers.choices[name].add_argument(
            "--config", metavar="FILE", help=f"settings in TOML, named like the flags (variable {config.FILE_VARIABLE})"
        )
    command = subparsers.add_parser("config", help="check a settings file, or show the settings a server would use")
    command.add_argument("do", choices=("check", "show"))
    command.add_argument("section", choices=config.SECTIONS, nargs="?", help="only the settings of this command")
    command.add_argument("--file", type=Path, default=os.environ.get(config.FILE_VARIABLE), help="the settings file")
    command.set_defaults(run=_run_config)
    return parser, dict(subparsers.choices)


def _module(name: str) -> Any:
    return importlib.import_module(f"tokenbus.cli.commands.{name}")


class _Version(argparse.Action):
    """Looks the version up only when it is asked for, because that is slow."""

    def __call__(self, parser: argparse.ArgumentParser, *rest: object) -> None:
        import importlib.metadata

        print(f"tokenbus {importlib.metadata.version('tokenbus')}")
        parser.exit()
