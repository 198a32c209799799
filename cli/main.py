"""The `tokenbus` command line: parses the arguments, runs the command they name, and ends in one line if that fails."""

import argparse
import os
import shutil
import sys

from tokenbus.cli.console import catalog, config, needs
from tokenbus.cli.console.flags import EXIT_BAD_SETTINGS, Parser, UsageError, did_you_mean
from tokenbus.cli.console.plain_text import printable
from tokenbus.protocol import extras

_EXIT_BROKEN_PIPE = 141
"""The status that shells report for a program that SIGPIPE has ended, as it does most of them."""
_SERVER_STARTERS = (*config.SECTIONS, "up", "config")


def main() -> None:
    try:
        try:
            status = _run(sys.argv[1:])
        except SystemExit as end:
            if isinstance(end.__context__, BrokenPipeError):
                raise end.__context__ from None  # rich's tables end the process in their own way
            status = end.code  # type: ignore[assignment]
        if sys.stdout is not None:
            sys.stdout.flush()  # while an error can still be told of
    except extras.MissingExtraError as error:
        status = 1
        _print_error(f"tokenbus: {error}")
    except BrokenPipeError:
        status = _EXIT_BROKEN_PIPE
    except OSError as error:  # a broker that can't be reached, a file, or a full disk below standard output
        status = 1
        where = error.filename or ("" if isinstance(error, ConnectionError) else "the output can't be written")
        _print_error(": ".join(filter(None, ("tokenbus", where, error.strerror or str(error)))))
    try:
        if sys.stdout is not None:
            sys.stdout.flush()
    except OSError:
        # Python flushes standard output again at exit, which would fail once more and print a traceback.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    sys.exit(status)


def _run(arguments: list[str]) -> int:
    """Runs the command that the arguments name; returns the exit status. Raises SystemExit after help."""
    try:
        _check_arguments(arguments)
        if not arguments or arguments[0] in ("help", "-h", "--help"):
            return _help(arguments[1:])
        if arguments[0] in ("--version", "-V"):
            return _version()
        options = parse(arguments)
        status: int = options.run(options)
        return status
    except UsageError as error:
        _print_error(f"{error.prog}: {error}")
    except ValueError as error:
        for line in str(error).splitlines():
            _print_error(f"tokenbus: {line}")
    return EXIT_BAD_SETTINGS


def _help(commands: list[str]) -> int:
    """`tokenbus help [COMMAND]`."""
    if commands:
        _parser_of(commands[0]).print_help()
    else:
        print(catalog.overview(shutil.get_terminal_size().columns - 2))
    return 0


def _version() -> int:
    import importlib.metadata  # slow, and hardly ever needed

    print(f"tokenbus {importlib.metadata.version('tokenbus')}")
    return 0


def _print_error(line: str) -> None:
    print(printable(line), file=sys.stderr)


def _check_arguments(arguments: list[str]) -> None:
    """Raises ValueError for arguments that are not UTF-8, since no message could carry them."""
    for number, argument in enumerate(arguments, 1):
        try:
            argument.encode()
        except UnicodeEncodeError as error:
            raise ValueError(f"argument {number} is not UTF-8: {argument!r}") from error


def parse(arguments: list[str]) -> argparse.Namespace:
    """Returns the options of a command line; those of a server also come from its variables and its settings file.

    Raises UsageError for a mistake on the command line, ValueError with one line for each mistake elsewhere, and
    MissingExtraError if what the command needs is not installed."""
    name = arguments[0]
    parser = _parser_of(name)
    _warn_of_misspelled_variables(name, parser)
    if name not in config.SECTIONS:
        return parser.parse_args(arguments[1:])  # type: ignore[no-any-return]
    options = config.parse(parser, name, arguments[1:])
    options.reload = lambda: parse(arguments)
    options.reloads = frozenset(flag.dest for flag in parser.flags.values() if flag.reloads)
    return options


def _parser_of(name: str) -> Parser:
    """Returns a command's parser. Raises UsageError if there is no such command."""
    if name.startswith("-"):
        raise UsageError("tokenbus", f"options follow the command: tokenbus COMMAND {name}; `tokenbus help` lists all")
    if name not in catalog.COMMANDS:
        near = did_you_mean(name, catalog.COMMANDS) or ";"
        raise UsageError("tokenbus", f"no such command {name}{near} `tokenbus help` lists all")
    return catalog.make_parser(name)


def _warn_of_misspelled_variables(name: str, parser: Parser) -> None:
    """Warns of environment variables that no process reads but that resemble known ones."""
    parsers = {name: parser}
    if not config.unknown_variables(config.known_variables(parsers)):
        return
    missing = [section for section in config.SECTIONS if not needs.are_met(section)]
    if name in _SERVER_STARTERS:
        others = [section for section in config.SECTIONS if section not in (name, *missing)]
        parsers |= {section: catalog.make_parser(section) for section in others}
    for line in config.misspelled_variables(parsers, missing):
        _print_error(f"tokenbus: {line}")
