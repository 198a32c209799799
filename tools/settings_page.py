"""Writes docs/settings.md from tools/settings.in.md and from the flags of the servers: `python -m tools.settings_page`.

A line `{{settings COMMAND}}` becomes a table of a server's own settings, `{{common}}` that of those that all have."""

import re
from collections.abc import Iterable
from pathlib import Path

from tokenbus.cli.console import catalog, config
from tokenbus.cli.console.flags import Flag
from tools.wire_page import documented_fields

FOLDER = Path(__file__).parent
TARGET = FOLDER.parent / "docs" / "settings.md"
_DIRECTIVE = re.compile(r"^\{\{(common|settings (\w+))\}\}$", re.MULTILINE)


def render(source: str) -> str:
    """Returns the text with every directive replaced."""
    return _DIRECTIVE.sub(lambda match: _table(match[2]), source)


def settings_of(command: str | None) -> list[Flag]:
    """Returns the settings of one server that others lack, or without a command those that all have."""
    flags = {name: catalog.make_parser(name).flags for name in config.SECTIONS}
    common = set.intersection(*(set(found) for found in flags.values()))
    if command is None:
        return [flag for flag in flags[config.SECTIONS[0]].values() if flag.name in common]
    return [flag for flag in flags[command].values() if flag.name not in common]


def _table(command: str | None) -> str:
    flags = settings_of(command)
    titles = list(dict.fromkeys(flag.title for flag in flags))
    return "\n\n".join(_group(title, command, [flag for flag in flags if flag.title == title]) for title in titles)


def _group(title: str, command: str | None, flags: Iterable[Flag]) -> str:
    head = [f"### {title[0].upper()}{title[1:]}", "", "| flag | variable | default | allowed | meaning |"]
    return "\n".join([*head, "|---|---|---|---|---|", *(_row(flag, command) for flag in flags)])


def _row(flag: Flag, command: str | None) -> str:
    also = f" (also {', '.join(f'`{alias}`' for alias in flag.aliases)})" if flag.aliases else ""
    own = "" if flag.name == "config" else f"`{config.variable_of(command or '*', flag)}`"
    variables = ", ".join(part for part in (f"`{flag.variable}`" if flag.variable else "", own) if part)
    default = "required" if flag.required else flag.default_text
    reload = " *reload*" if flag.reloads else ""
    cells = (f"`{flag.option}`{also}", variables, default, flag.range_text, f"{_meaning(flag)}{reload}")
    return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"


def _meaning(flag: Flag) -> str:
    """Returns the docstring of the field that has this setting, or else the text of the flag."""
    text = f"{flag.text[0].upper()}{flag.text[1:]}."
    found = documented_fields(flag.home).get(flag.dest) if flag.home else None
    return found or (text + " May be repeated." if flag.is_list else text)


def main() -> None:
    TARGET.write_text(render((FOLDER / "settings.in.md").read_text()))


if __name__ == "__main__":
    main()
