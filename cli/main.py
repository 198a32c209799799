"""The `tokenbus` command: parses the arguments and hands over to the part that was asked for."""

import argparse
import os
import sys
from pathlib import Path

from cli import askers, config, servers
from cli.family import EXIT_REFUSED


def main() -> None:
    try:
        options = _options(sys.argv[1:])
    except ValueError as error:
        print(f"tokenbus: {error}", file=sys.stderr)
        sys.exit(EXIT_REFUSED)
    try:
        sys.exit(options.run(options))
    except KeyboardInterrupt:
        sys.exit(130)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)


def _options(arguments: list[str]) -> argparse.Namespace:
    """What the command line says, and, of a server process, its variables and its file. Raises ValueError."""
    parser, commands = _parser()
    if not arguments or arguments[0] not in config.SECTIONS:
        return parser.parse_args(arguments)
    command = commands[arguments[0]]
    finder = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    finder.add_argument("--config", default=os.environ.get(config.FILE_VARIABLE, ""))
    path = finder.parse_known_args(arguments[1:])[0].config
    settings = config.apply(command, arguments[0], config.read(Path(path)) if path else {}, path)
    options = parser.parse_args(arguments)
    config.complete(options, command, settings)
    options.reread = lambda: _options(arguments)
    return options


def _config(options: argparse.Namespace) -> int:
    """Checks a file, or shows what a process would be given."""
    _, commands = _parser()
    sections = [options.section] if options.section else list(config.SECTIONS)
    try:
        tables = config.read(options.file) if options.file else {}
        found = {name: config.apply(commands[name], name, tables, str(options.file or "")) for name in sections}
    except ValueError as error:
        print(f"tokenbus: {error}", file=sys.stderr)
        return EXIT_REFUSED
    if options.do == "show":
        print("\n\n".join(config.show(name, settings) for name, settings in found.items()))
    else:
        print(f"{options.file or 'no file'}: every setting is known and can be")
    return 0


def _parser() -> tuple[argparse.ArgumentParser, dict[str, argparse.ArgumentParser]]:
    """The parser, and those of its commands."""
    parser = argparse.ArgumentParser(
        prog="tokenbus", description="LLM inference workers behind a NATS broker.", allow_abbrev=False
    )
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    servers.add(commands)
    askers.add(commands)
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


if __name__ == "__main__":
    main()
