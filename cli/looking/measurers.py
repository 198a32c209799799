"""The commands that look into things and measure: `doctor`, `replay`, `bench` and `wire-check`."""

import argparse

from tokenbus.cli import arguments, connection_flags
from tokenbus.cli.commands import bench, doctor, wire_check
from tokenbus.cli.commands import replay as replay
from tokenbus.cli.commands import replay_flags as replay_options
from tokenbus.protocol.wire import subjects
from tokenbus.replay.load import options as bench_options


def _add_doctor(parser: argparse.ArgumentParser) -> None:
    connection_flags.add_client_flags(parser)
    parser.add_argument("--model", action="append", default=[], metavar="MODEL", help="a file or folder to look at")
    parser.add_argument(
        "--ports",
        type=arguments.port,
        nargs="*",
        default=[4222, 8000, 9100],
        metavar="PORT",
        help="ports that shall be free",
    )
    parser.set_defaults(run=doctor.run)


def _add_replay(parser: argparse.ArgumentParser) -> None:
    replay_options.add_flags(parser)
    parser.set_defaults(run=replay.run)


def _add_bench(parser: argparse.ArgumentParser) -> None:
    connection_flags.add_client_flags(parser)
    bench_options.add_flags(parser)
    parser.set_defaults(run=bench.run)


def _add_wire_check(parser: argparse.ArgumentParser) -> None:
    connection_flags.add_client_flags(parser)
    parser.add_argument("--model", metavar="NAME", default="", help="the served model")
    parser.add_argument(
        "--inbox-prefix",
        metavar="PREFIX",
        default=subjects.DEFAULT_INBOX_PREFIXES[0],
        help="what reply subjects begin with (%(default)s)",
    )
    parser.add_argument("--only", metavar="TEXT", default="", help="only the rules whose sentence has this text")
    parser.add_argument("--list", action="store_true", help="list the rules and try none")
    parser.add_argument("--json", action="store_true", help="print one JSON object a rule")
    parser.set_defaults(run=wire_check.run)


FLAGS = {"doctor": _add_doctor, "replay": _add_replay, "bench": _add_bench, "wire-check": _add_wire_check}
"""What gives the parser of each command its flags."""
