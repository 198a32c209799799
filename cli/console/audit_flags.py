"""The flags of whoever writes to the audit log."""

import argparse

from tokenbus.cli.console.arguments import SWITCH, whole
from tokenbus.cli.console.flags import Flag, Parser, UsageError, fields_of
from tokenbus.protocol.access.audit_log import AuditSettings

AUDIT = Flag(
    "--audit", SWITCH, "record who did what, without texts, in the broker's JetStream", variable="TOKENBUS_AUDIT"
)
TITLE = "audit log"
_MAX_DAYS = 36_500


def add_flags(parser: Parser) -> None:
    flag = parser.group(TITLE, AuditSettings)
    flag.add(AUDIT)
    flag("--audit-days", whole(1, _MAX_DAYS), "days for which the log keeps records, if this process makes it")
    flag(
        "--audit-mib",
        whole(1, metavar="MIB"),
        "size of the log, beyond which the oldest records go first, if this process makes it",
    )


def settings_of(options: argparse.Namespace) -> AuditSettings:
    """Returns the settings that parsed flags describe."""
    return AuditSettings(**fields_of(AuditSettings, options))


def is_wanted(prog: str, options: argparse.Namespace) -> bool:
    """Returns what `AUDIT` says of a command that is no server. Raises UsageError for a variable with another value."""
    try:
        return bool(SWITCH(options.audit) if isinstance(options.audit, str) else options.audit)
    except argparse.ArgumentTypeError as error:
        raise UsageError(prog, f"the variable {AUDIT.variable} {error}") from error
