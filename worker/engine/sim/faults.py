"""Parses the script of faults that a simulator injects, and injects those that its engine can't."""

import itertools
from collections.abc import Sequence

import msgspec

from tokenbus.protocol.bus.bus import Bus, Outgoing
from tokenbus.worker.contract.engine_settings import EngineSettings

_KINDS = ("crash", "hang", "slow", "lose", "poison", "stain")


class Faults(msgspec.Struct, frozen=True):
    """The faults of one replica. Counts are sampled tokens; 0 means never, or no token."""

    crash: int = 0
    """The engine process dies after this many tokens."""
    hang: int = 0
    """The step after this many tokens never ends."""
    slow: int = 0
    """The step after this many tokens takes `slow_ms` longer."""
    slow_ms: float = 0.0
    lose: int = 0
    """Every n-th entry of the event log is lost in transit."""
    poison: int = 0
    """The id of a token after which its sequence's numbers are not finite."""
    stain: int = 0
    """The id of a token after which no sequence's numbers are finite any more."""


def parse(text: str) -> Faults:
    """Parses a script such as `crash@200,slow@50=3000,hang@900,lose@20`. Raises ValueError."""
    found = Faults()
    for one in filter(None, text.split(",")):
        kind, _, when = one.partition("@")
        count, _, length = when.partition("=")
        if kind not in _KINDS or not count.isdecimal() or not int(count) or bool(length) != (kind == "slow"):
            raise ValueError(
                f"{one!r} is no fault: use crash@TOKENS, hang@TOKENS, slow@TOKENS=MS, lose@EVENTS, poison@TOKEN_ID or "
                "stain@TOKEN_ID"
            )
        found = msgspec.structs.replace(found, **{kind: int(count)})
        if kind == "slow":
            found = msgspec.structs.replace(found, slow_ms=_milliseconds(length))
    return found


def _milliseconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 < value <= 3_600_000:
        raise ValueError(f"a slow step takes more than 0 and at most 3,600,000 ms, got {text!r}")
    return value


def lose_events(bus: Bus, events_subject: str, settings: EngineSettings) -> None:
    """Makes `bus` lose every n-th message to `events_subject`, if the settings are for a simulator and ask for it. A
    malformed script does nothing here: the engine refuses it."""
    try:
        every = parse(settings.sim_faults).lose if settings.engine == "sim" else 0
    except ValueError:
        return
    if not every:
        return
    publish_all, count = bus.publish_all, itertools.count(1)

    def lossy(messages: Sequence[Outgoing]) -> None:
        publish_all([one for one in messages if one.subject != events_subject or next(count) % every])

    bus.publish_all = lossy  # type: ignore[method-assign]
