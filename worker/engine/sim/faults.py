"""What a simulator is told to do wrong, and when; pure."""

import msgspec

_KINDS = {
    "crash": "the engine process dies when it has sampled so many tokens",
    "hang": "the step after so many tokens never ends",
    "slow": "the step after so many tokens takes that many milliseconds: slow@TOKENS=MS",
    "lose": "every n-th entry of the event log is lost on its way",
}


class Faults(msgspec.Struct, frozen=True):
    """Counts are of tokens that one replica has sampled; 0 is never."""

    crash: int = 0
    hang: int = 0
    slow: int = 0
    slow_ms: float = 0.0
    lose: int = 0


def parse(text: str) -> Faults:
    """A script as on the command line, as `crash@200,slow@50=3000,lose@20`. Raises ValueError."""
    found = Faults()
    for one in filter(None, text.split(",")):
        kind, _, when = one.partition("@")
        count, _, length = when.partition("=")
        if kind not in _KINDS or not count.isdecimal() or not int(count) or bool(length) != (kind == "slow"):
            raise ValueError(f"{one!r} is no fault: use crash@TOKENS, hang@TOKENS, slow@TOKENS=MS or lose@EVENTS")
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
