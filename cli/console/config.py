"""Settings of the servers from a TOML file and from environment variables, named like their flags.

    [nats]                      # for all of them: --nats-user, ...
    user = "router"

    [worker]                    # tokenbus worker: --max-num-seqs, ...
    model = ["/models/a.gguf"]
    max-num-seqs = 32

A flag overrides a variable (TOKENBUS_WORKER_MAX_NUM_SEQS), which overrides the file, which overrides the default."""

import argparse
import contextlib
import difflib
import os
import tomllib
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from tokenbus.cli.console.flags import Flag, Parser, did_you_mean, text_of
from tokenbus.gateway.admission import keys
from tokenbus.protocol.telemetry import log_variables

SECTIONS = ("worker", "router", "gateway", "auth")
"""The commands that read settings, each from its own table."""
FILE_VARIABLE = "TOKENBUS_CONFIG"
_NATS = "nats"
"""The table of connection settings, which all of them read."""
_PREFIX = "TOKENBUS_"
_OTHER_VARIABLES = (
    FILE_VARIABLE,
    log_variables.LEVEL_VARIABLE,
    log_variables.FORMAT_VARIABLE,
    keys.VARIABLE,
    "TOKENBUS_NATS_PASSWORD",
    "TOKENBUS_NATS_TOKEN",
    "TOKENBUS_CACHE",
    "TOKENBUS_DEBUG",
)
"""Variables that stand for no flag of a server."""
_MIN_SIMILARITY = 0.8
"""Similarity of two names, from 0 to 1, above which one counts as a misspelling of the other."""
_FILE = "config"
"""The flag for the file, which no file or variable of a section sets."""
_URLS = (_NATS, "otlp-traces-endpoint")
"""Settings whose URL may hold a password, which is never printed."""
_Table = dict[str, Any]


class Origin(NamedTuple):
    """A setting's value and its source."""

    value: object
    source: str
    """The file, the variable, or `default`."""
    written: object
    """The value as it was written there."""


def read(path: Path) -> dict[str, _Table]:
    """Returns the tables of a settings file. Raises ValueError for a file that can't be read."""
    try:
        return tomllib.loads(path.read_bytes().decode())
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: is not UTF-8 (byte {error.start + 1})") from error
    except tomllib.TOMLDecodeError as error:
        raise ValueError(f"{path}: {error}") from error
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror}") from error


@contextlib.contextmanager
def collecting_errors(mistakes: list[str]) -> Iterator[None]:
    """Appends the lines of a ValueError raised inside it to `mistakes`, and suppresses it."""
    try:
        yield
    except ValueError as error:
        mistakes += [line for line in str(error).splitlines() if line not in mistakes]


def raise_errors(mistakes: list[str]) -> None:
    """Raises ValueError with one line for each mistake, if there is any."""
    if mistakes:
        raise ValueError("\n".join(mistakes))


def misspelled_variables(parsers: Mapping[str, Parser], unknown_sections: Collection[str] = ()) -> Iterator[str]:
    """Yields a warning for each variable that no process reads but that is spelled almost like one.

    Variables of `unknown_sections`, which are those of servers that are not installed here, are left alone."""
    unknown = tuple(f"{_PREFIX}{section.upper()}_" for section in unknown_sections)
    known = known_variables(parsers)
    # Compared without the common prefix, which would make all names similar.
    endings = {name.removeprefix(_PREFIX): name for name in known} | {"NATS_URL": "TOKENBUS_NATS"}
    for section, parser in parsers.items():
        for flag in parser.flags.values():
            for alias in flag.aliases if section in SECTIONS else ():
                ending = f"{section}_{alias.lstrip('-')}".upper().replace("-", "_")
                endings.setdefault(ending, variable_of(section, flag))
    for name in sorted(unknown_variables(known)):
        for near in difflib.get_close_matches(name.removeprefix(_PREFIX), endings, 1, _MIN_SIMILARITY):
            if not name.startswith(unknown):
                yield f"the variable {name} is unknown: did you mean {endings[near]}?"


def known_variables(parsers: Mapping[str, Parser]) -> set[str]:
    """Returns the variables that these commands read, and those that every command does."""
    return {
        variable
        for section, parser in parsers.items()
        for flag in parser.flags.values()
        for variable in _variables(section, flag)
    } | set(_OTHER_VARIABLES)


def unknown_variables(known: Collection[str]) -> list[str]:
    """Returns the variables of this process that have our prefix, and that are not among the known ones."""
    return [name for name in os.environ if name.startswith(_PREFIX) and name not in known]


def apply(parser: Parser, section: str, tables: Mapping[str, _Table], where: str) -> dict[str, Origin]:
    """Makes the settings in a file and in variables the defaults of a command's parser; returns each setting's origin.

    Raises ValueError with one line for each unknown key and each invalid value."""
    flags = {name: flag for name, flag in parser.flags.items() if name != _FILE}
    found = {name: Origin(flag.default, "default", flag.default) for name, flag in flags.items()}
    mistakes: list[str] = []
    for title, content in tables.items():
        with collecting_errors(mistakes):
            _check_table(title, content, where)
    for table, key, value in _of_file(tables, section):
        with collecting_errors(mistakes):
            name = _name_of(table, key, flags, where)
            found[name] = Origin(_converted(flags[name], value, f"{where}: {name}"), where, value)
    # Variables override the file, and the command's own variable (last) overrides the one for all commands.
    for name, flag in flags.items():
        for variable in _variables(section, flag):
            if written := os.environ.get(variable):
                with collecting_errors(mistakes):
                    found[name] = Origin(_converted(flag, written, variable), variable, written)
    raise_errors(mistakes)
    for name, origin in found.items():
        parser.set_default(name, origin.value, is_given=origin.source != "default")
    return found


def parse(parser: Parser, section: str, arguments: Sequence[str]) -> argparse.Namespace:
    """Returns the options of a server: from the command line, variables, and the settings file that one of these names.

    Raises UsageError for a mistake on the command line, and ValueError with one line for each mistake elsewhere."""
    # The file's settings become defaults of the real parser, so its path must be known before that parses.
    finder = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    finder.add_argument("--config", nargs="?", default=os.environ.get(FILE_VARIABLE, ""))
    path = finder.parse_known_args(arguments)[0].config
    apply(parser, section, read(Path(path)) if path else {}, path)
    return parser.parse_args(arguments)  # type: ignore[no-any-return]


def _variables(section: str, flag: Flag) -> Iterator[str]:
    """Yields the names of a setting's variables; the last one overrides the first."""
    if flag.variable:
        yield flag.variable
    if section in SECTIONS:
        yield variable_of(section, flag)


def variable_of(section: str, flag: Flag) -> str:
    """Returns the name of a setting's own variable."""
    return f"{_PREFIX}{section}_{flag.dest}".upper()


def _check_table(name: str, table: object, where: str) -> None:
    """Raises ValueError for a table that no command reads."""
    if name not in (_NATS, *SECTIONS):
        raise ValueError(f"{where}: unknown table [{name}]; there are [{_NATS}], [{'], ['.join(SECTIONS)}]")
    if not isinstance(table, dict):
        raise ValueError(f"{where}: {name} must be a table: [{name}]")


def _of_file(tables: Mapping[str, _Table], section: str) -> Iterator[tuple[str, str, object]]:
    """Yields table, key and value of each of a command's settings in a file."""
    for table in (_NATS, section):
        values = tables.get(table, {})
        for key, value in values.items() if isinstance(values, dict) else ():
            yield table, key, value


def _name_of(table: str, key: str, flags: Mapping[str, Flag], where: str) -> str:
    """Returns the name of the flag that a key stands for. Raises ValueError for an unknown key."""
    prefix = f"{_NATS}-" if table == _NATS else ""
    name = _NATS if (table, key) == (_NATS, "url") else prefix + key
    if name in flags:
        return name
    for flag in flags.values():
        if f"--{key}" in flag.aliases:
            raise ValueError(f"{where}: {key} is not a setting of [{table}]; it is called {flag.name} here")
    known = sorted(one.removeprefix(prefix) for one in flags if one.startswith(prefix))
    near = did_you_mean(key, known) or f"; known settings: {', '.join(known)}"
    raise ValueError(f"{where}: {key} is not a setting of [{table}]{near}")


def _converted(flag: Flag, value: object, what: str) -> object:
    """Converts a value the way the command line would."""
    if flag.is_list:
        values = value if isinstance(value, list) else str(value).split(",")
        return [_typed(flag, one, what) for one in values]
    return _typed(flag, value, what)


def _typed(flag: Flag, value: object, what: str) -> object:
    if isinstance(value, dict | list) or (isinstance(value, bool) and not flag.is_switch):
        raise ValueError(f"{what} must be a single value, not a list, a table or a boolean")  # not shown: may be secret
    try:
        return flag.kind(str(value))
    except argparse.ArgumentTypeError as error:
        raise ValueError(f"{what} {error}") from error


def api_keys() -> list[str]:
    """Returns the `key=tenant` pairs in the gateway's variable."""
    return [pair for pair in os.environ.get(keys.VARIABLE, "").split(",") if pair.strip()]


def show(parser: Parser, section: str, settings: Mapping[str, Origin]) -> str:
    """Returns a command's settings in the form of a file, with the source of each in a comment."""
    from tokenbus.protocol.bus.connection import redact_url  # slow

    lines = [f"[{section}]"]
    for name, (_, source, written) in settings.items():
        text = _toml(redact_url(written) if name in _URLS and isinstance(written, str) else written)
        if written and parser.flags[name].secret:
            text = '["..."]'
        lines.append(f"{name} = {text}  # {source}" if text else f"# {name} is not set")
    if section == "gateway" and (pairs := api_keys()):
        lines.append(f"# {len(pairs)} more API keys are in the variable {keys.VARIABLE}")
    return "\n".join(lines)


def _toml(value: object) -> str:
    match value:
        case bool() | int() | float():
            return text_of(value)
        case list():
            return f"[{', '.join(map(_toml, value))}]" if value else ""
        case _:
            text = text_of(value).replace("\\", "\\\\").replace('"', '\\"')
            return f'"{text}"' if text else ""
