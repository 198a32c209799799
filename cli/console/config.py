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
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from tokenbus.gateway.admission import keys
from tokenbus.protocol.bus.connection import redact_url
from tokenbus.protocol.telemetry import logs

SECTIONS = ("worker", "router", "gateway")
"""The commands that read settings, each from its own table."""
FILE_VARIABLE = "TOKENBUS_CONFIG"
_NATS = "nats"
"""The table of connection settings, which all of them read."""
_PREFIX = "TOKENBUS_"
_OTHER_VARIABLES = (
    FILE_VARIABLE,
    logs.LEVEL_VARIABLE,
    logs.FORMAT_VARIABLE,
    keys.VARIABLE,
    "TOKENBUS_NATS_PASSWORD",
    "TOKENBUS_NATS_TOKEN",
    "TOKENBUS_CACHE",
    "TOKENBUS_DEBUG",
)
"""Variables that stand for no flag of a server."""
_MIN_SIMILARITY = 0.8
"""Similarity of two names, from 0 to 1, above which one counts as a misspelling of the other."""
_HUB_CACHE = "hub-cache"
"""The setting that commands other than servers also read from its variable."""
_SECRETS = ("api-key",)
"""Settings that are never printed."""
_URLS = (_NATS, "otlp-traces-endpoint")
"""Settings whose URL may hold a password, which is never printed."""
_Table = dict[str, Any]
_KINDS = {"int": "whole number", "float": "number", "number": "number"}
"""Names for the types of flags, by the names of the functions that parse them."""


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
    except (OSError, tomllib.TOMLDecodeError) as error:
        raise ValueError(f"{path}: {error}") from error


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


def misspelled_variables(
    parsers: Mapping[str, argparse.ArgumentParser], unknown_sections: Collection[str] = ()
) -> Iterator[str]:
    """Yields a warning for each variable that no process reads but that is spelled almost like one.

    Variables of `unknown_sections`, which are those of servers that are not installed here, are left alone."""
    unknown = tuple(f"{_PREFIX}{section.upper()}_" for section in unknown_sections)
    known = set(_OTHER_VARIABLES)
    for section, parser in parsers.items():
        known |= {variable for name, _ in _settable(parser) for variable in _variables(section, name)}
    # Compared without the common prefix, which would make all names similar.
    endings = {name.removeprefix(_PREFIX): name for name in known} | {"NATS_URL": "TOKENBUS_NATS"}
    for name in sorted(os.environ):
        if name.startswith(_PREFIX) and name not in known and not name.startswith(unknown):
            for near in difflib.get_close_matches(name.removeprefix(_PREFIX), endings, 1, _MIN_SIMILARITY):
                yield f"the variable {name} is unknown: did you mean {endings[near]}?"


def apply(parser: argparse.ArgumentParser, section: str, tables: Mapping[str, _Table], where: str) -> dict[str, Origin]:
    """Makes the settings in a file and in variables the defaults of a command's parser; returns each setting's origin.

    Raises ValueError with one line for each unknown key and each invalid value."""
    actions = dict(_settable(parser))
    found = {name: Origin(action.default, "default", action.default) for name, action in actions.items()}
    mistakes: list[str] = []
    for title, content in tables.items():
        with collecting_errors(mistakes):
            _check_table(title, content, where)
    for table, key, value in _of_file(tables, section):
        with collecting_errors(mistakes):
            name = _name_of(table, key, actions, where)
            found[name] = Origin(_converted(actions[name], value, f"{where}: {name}"), where, value)
    # Variables override the file, and the command's own variable (last) overrides the one for all commands.
    for name, action in actions.items():
        for variable in _variables(section, name):
            if variable in os.environ:
                written = os.environ[variable]
                with collecting_errors(mistakes):
                    found[name] = Origin(_converted(action, written, variable), variable, written)
    raise_errors(mistakes)
    for name, origin in found.items():
        if origin.source != "default":
            # Lists are filled in by `complete` after parsing.
            parser.set_defaults(**{actions[name].dest: None if _is_list(actions[name]) else origin.value})
            actions[name].required = False  # a file may name what the command line must otherwise
    return found


def complete(options: argparse.Namespace, parser: argparse.ArgumentParser, settings: Mapping[str, Origin]) -> None:
    """Fills in the lists that no flag has set. They can't be defaults, since argparse appends flags to those."""
    for name, action in _settable(parser):
        if _is_list(action) and getattr(options, action.dest) is None:
            setattr(options, action.dest, settings[name].value)


def _variables(section: str, name: str) -> Iterator[str]:
    """Yields the names of a setting's variables; the last one overrides the first."""
    spelled = name.upper().replace("-", "_")
    if name.startswith(_NATS) or name == _HUB_CACHE:
        yield f"TOKENBUS_{spelled}"
    yield f"TOKENBUS_{section.upper()}_{spelled}"


def _is_list(action: argparse.Action) -> bool:
    return isinstance(action, argparse._AppendAction)


def _settable(parser: argparse.ArgumentParser) -> Iterator[tuple[str, argparse.Action]]:
    """Yields name and action of each flag that is a setting."""
    for action in parser._actions:
        long = next((flag for flag in action.option_strings if flag.startswith("--")), None)
        if long is not None and long not in ("--help", "--config", "--json"):
            yield long.removeprefix("--"), action


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


def _name_of(table: str, key: str, actions: Mapping[str, argparse.Action], where: str) -> str:
    """Returns the name of the flag that a key stands for. Raises ValueError for an unknown key."""
    prefix = f"{_NATS}-" if table == _NATS else ""
    name = _NATS if (table, key) == (_NATS, "url") else prefix + key
    if name not in actions:
        known = ", ".join(sorted(one.removeprefix(prefix) for one in actions if one.startswith(prefix)))
        raise ValueError(f"{where}: {key} is not a setting of [{table}]; known settings: {known}")
    return name


def _converted(action: argparse.Action, value: object, what: str) -> object:
    """Converts a value the way the command line would."""
    if isinstance(action, argparse._StoreTrueAction):
        if str(value).lower() not in ("true", "false", "1", "0"):
            raise ValueError(f"{what} must be true or false, got {value}")
        return str(value).lower() in ("true", "1")
    if _is_list(action):
        values = value if isinstance(value, list) else str(value).split(",")
        return [_typed(action, one, what) for one in values]
    return _typed(action, value, what)


def _typed(action: argparse.Action, value: object, what: str) -> object:
    if isinstance(value, dict | list | bool):
        raise ValueError(f"{what} must be a single value, not a list, a table or a boolean")  # not shown: may be secret
    try:
        return action.type(str(value)) if callable(action.type) else str(value)
    except argparse.ArgumentTypeError as error:
        raise ValueError(f"{what}: {error}") from error
    except (TypeError, ValueError) as error:
        kind = _KINDS.get(getattr(action.type, "__name__", ""), "valid value")
        raise ValueError(f"{what} must be a {kind}, got {value!r}") from error


def api_keys() -> list[str]:
    """Returns the `key=tenant` pairs in the gateway's variable."""
    return [pair for pair in os.environ.get(keys.VARIABLE, "").split(",") if pair.strip()]


def show(section: str, settings: Mapping[str, Origin]) -> str:
    """Returns a command's settings in the form of a file, with the source of each in a comment."""
    lines = [f"[{section}]"]
    for name, (_, source, written) in settings.items():
        text = _toml(redact_url(written) if name in _URLS and isinstance(written, str) else written)
        if written and name in _SECRETS:
            text = '["..."]'
        lines.append(f"{name} = {text}  # {source}" if text else f"# {name} is not set")
    if section == "gateway" and (pairs := api_keys()):
        lines.append(f"# {len(pairs)} more API keys are in the variable {keys.VARIABLE}")
    return "\n".join(lines)


def _toml(value: object) -> str:
    match value:
        case None | "" | [] | ():
            return ""
        case bool():  # before int, which bool is too
            return str(value).lower()
        case int() | float():
            return str(value)
        case range():
            return f'"{value[0]}-{value[-1]}"' if value else ""
        case list():
            return "[" + ", ".join(_toml(one) for one in value) + "]"
        case tuple():  # written like the flag
            return '"' + ",".join(f"{one:g}" for one in value) + '"'
        case _:
            text = str(value).replace("\\", "\\\\").replace('"', '\\"')
            return f'"{text}"'
