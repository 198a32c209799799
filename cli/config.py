"""Settings of the server processes from one TOML file and from variables, under the names of their flags.

    [nats]                      # of every process: --nats-user, ...
    user = "router"

    [worker]                    # tokenbus worker: --max-num-seqs, ...
    model = ["/models/a.gguf"]
    max-num-seqs = 32

A flag goes before a variable (TOKENBUS_WORKER_MAX_NUM_SEQS), that before the file, and the file before the default."""

import argparse
import os
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from protocol.connection import without_secrets

SECTIONS = ("worker", "router", "gateway")
"""Commands that can be configured; `nats` is for all of them."""
FILE_VARIABLE = "TOKENBUS_CONFIG"
_COMMON = "nats"
_SECRETS = ("api-key",)
"""Shown to nobody."""
_URLS = (_COMMON, "otlp-traces-endpoint")
"""May hold a password, which is not shown."""
_Table = dict[str, Any]
_KINDS: dict[object, str] = {int: "whole number", float: "number"}


class Origin(NamedTuple):
    """Where a setting's value comes from."""

    value: object
    source: str
    said: object
    """As it was written there."""


def read(path: Path) -> dict[str, _Table]:
    """The tables of a file. Raises ValueError for one that can't be read, and for a table that is nobody's."""
    try:
        document = tomllib.loads(path.read_text())
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ValueError(f"{path}: {error}") from error
    for name, table in document.items():
        if name not in (_COMMON, *SECTIONS):
            raise ValueError(f"{path}: [{name}] is nobody's; there are [{_COMMON}], [{'], ['.join(SECTIONS)}]")
        if not isinstance(table, dict):
            raise ValueError(f"{path}: {name} must be a table: [{name}]")
    return document


def apply(parser: argparse.ArgumentParser, section: str, tables: Mapping[str, _Table], where: str) -> dict[str, Origin]:
    """Makes a file's settings, and those in variables, the defaults of a command's parser; returns where each setting
    that has a flag comes from. Raises ValueError naming a key that is unknown, or has a value that can't be."""
    actions = dict(_settable(parser))
    found = {name: Origin(action.default, "default", action.default) for name, action in actions.items()}
    for name, value in _of_file(tables, section, actions, where):
        found[name] = Origin(_converted(actions[name], value, f"{where}: {name}"), where, value)
    for name, action in actions.items():
        for variable in _variables(section, name):
            if variable in os.environ:
                said = os.environ[variable]
                found[name] = Origin(_converted(action, said, variable), variable, said)
    for name, origin in found.items():
        if origin.source != "default":
            parser.set_defaults(**{actions[name].dest: None if _is_list(actions[name]) else origin.value})
            actions[name].required = False
    return found


def complete(options: argparse.Namespace, parser: argparse.ArgumentParser, settings: Mapping[str, Origin]) -> None:
    """Gives parsed options the lists that no flag named: argparse would add flags to a default list."""
    for name, action in _settable(parser):
        if _is_list(action) and getattr(options, action.dest) is None:
            setattr(options, action.dest, settings[name].value)


def _variables(section: str, name: str) -> Iterator[str]:
    """The names of a setting among the variables, the one that counts most last."""
    spelled = name.upper().replace("-", "_")
    if name.startswith(_COMMON):
        yield f"TOKENBUS_{spelled}"
    yield f"TOKENBUS_{section.upper()}_{spelled}"


def _is_list(action: argparse.Action) -> bool:
    return isinstance(action, argparse._AppendAction)


def _settable(parser: argparse.ArgumentParser) -> Iterator[tuple[str, argparse.Action]]:
    """The flags of a command by name, without those that are no settings."""
    for action in parser._actions:
        long = next((flag for flag in action.option_strings if flag.startswith("--")), None)
        if long is not None and long not in ("--help", "--config", "--json"):
            yield long.removeprefix("--"), action


def _of_file(
    tables: Mapping[str, _Table], section: str, actions: Mapping[str, argparse.Action], where: str
) -> Iterator[tuple[str, object]]:
    for table, prefix in ((tables.get(_COMMON, {}), f"{_COMMON}-"), (tables.get(section, {}), "")):
        for key, value in table.items():
            name = _COMMON if (prefix, key) == (f"{_COMMON}-", "url") else prefix + key
            if name not in actions:
                known = ", ".join(sorted(one.removeprefix(prefix) for one in actions if one.startswith(prefix)))
                raise ValueError(f"{where}: {key} is no setting of [{prefix[:-1] or section}]; it has {known}")
            yield name, value


def _converted(action: argparse.Action, value: object, what: str) -> object:
    """What the command line would have made of it."""
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
        raise ValueError(f"{what} must be one value, and no list or table")  # it may be a secret
    try:
        return action.type(str(value)) if callable(action.type) else str(value)
    except argparse.ArgumentTypeError as error:
        raise ValueError(f"{what}: {error}") from error
    except (TypeError, ValueError) as error:
        raise ValueError(f"{what} must be a {_KINDS.get(action.type, 'value of its kind')}, got {value!r}") from error


def show(section: str, settings: Mapping[str, Origin]) -> str:
    """A command's settings as a file would say them, and where each comes from."""
    lines = [f"[{section}]"]
    for name, (_, source, said) in settings.items():
        text = _toml(without_secrets(said) if name in _URLS and isinstance(said, str) else said)
        if said and name in _SECRETS:
            text = '["..."]'
        lines.append(f"{name} = {text}  # {source}" if text else f"# {name} is not set")
    return "\n".join(lines)


def _toml(value: object) -> str:
    match value:
        case None | "" | [] | ():
            return ""
        case bool():
            return str(value).lower()
        case int() | float():
            return str(value)
        case range():
            return f'"{value[0]}-{value[-1]}"' if value else ""
        case list():
            return "[" + ", ".join(_toml(one) for one in value) + "]"
        case tuple():  # such a setting is written as its flag is
            return '"' + ",".join(f"{one:g}" for one in value) + '"'
        case _:
            text = str(value).replace("\\", "\\\\").replace('"', '\\"')
            return f'"{text}"'
