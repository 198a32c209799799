"""The flags that say where the keys of a fleet are."""

import argparse

from tokenbus.cli.console.arguments import ArgumentType, real
from tokenbus.cli.console.flags import Flag, FlagGroup, Parser, fields_of
from tokenbus.protocol.access.key_source import BUCKET, KeySettings

_VARIABLE = "TOKENBUS_KEYS"
_STALE_MAX_S = 30 * 86_400


def _place(text: str) -> str:
    if text.lower() == BUCKET:
        return BUCKET
    if text and "/" not in text and not text.endswith(".json"):
        raise ValueError
    return text


_PLACE = ArgumentType(_place, f"{BUCKET} or a JSON file such as keys.json or ./keys", f"{BUCKET}|FILE")


_TEXT = f"where API keys are kept: {BUCKET}, in the broker's JetStream, or a JSON file"
KEYS = Flag("--keys", _PLACE, _TEXT, "", unset="there are none", variable=_VARIABLE)
_STALE = "time for which known keys stay valid while their store can't be reached; 0: all are refused"


def add_flags(parser: Parser) -> FlagGroup:
    """Adds the flags of a server that watches keys; returns their group."""
    flag = parser.group("keys", KeySettings)
    flag.add(KEYS._replace(default=None))
    flag("--keys-stale-s", real(0, _STALE_MAX_S, "SECONDS"), _STALE)
    return flag


def settings_of(options: argparse.Namespace) -> KeySettings:
    """Returns the settings that parsed flags describe."""
    return KeySettings(**fields_of(KeySettings, options))
