"""`tokenbus config`: checks a settings file, or shows the settings that a server would use."""

import argparse
import os

from tokenbus.cli.console import arguments, catalog, config
from tokenbus.cli.console.flags import Parser
from tokenbus.protocol.telemetry import tracing

_PASSWORD = "TOKENBUS_NATS_PASSWORD"


def add_flags(parser: Parser) -> None:
    do, section = arguments.one_of("check", "show"), arguments.one_of(*config.SECTIONS)
    parser.add_argument("do", type=do.__call__, metavar="ACTION", help=do.allowed)
    text = f"only the settings of {section.allowed}"
    parser.add_argument("section", type=section.__call__, nargs="?", metavar="SERVER", help=text)
    parser.group("settings")("--file", arguments.PATH, "the settings file", variable=config.FILE_VARIABLE)
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Prints the settings, or that they are valid. Raises ValueError with one line for each mistake."""
    sections = [options.section] if options.section else list(config.SECTIONS)
    where = str(options.file or "")
    tables = config.read(options.file) if options.file else {}
    mistakes: list[str] = []
    shown = []
    for name in sections:
        parser = catalog.make_parser(name)
        with config.collecting_errors(mistakes):
            shown.append(config.show(parser, name, config.apply(parser, name, tables, where)))
            if options.do == "check" and (options.section or name in tables):
                _check_settings(parser, name)
    config.raise_errors(mistakes)
    print("\n\n".join(shown) if options.do == "show" else f"{options.file or 'no file'}: all settings are valid")
    return 0


def _check_settings(parser: Parser, command: str) -> None:
    """Makes a server's settings the way its process would, with any password: no file has one. Raises ValueError."""
    has_password = _PASSWORD in os.environ
    os.environ.setdefault(_PASSWORD, "any")
    try:
        settings = catalog.module_of(command).settings_of(parser.parse_args([]))
    finally:
        if not has_password:
            del os.environ[_PASSWORD]
    tracing.check_endpoint(getattr(settings, "otlp_traces_endpoint", ""))  # `auth` makes no traces
