"""The environment of a child process that computes: an engine, a renderer, a constraint's process, a conversion.

None of them speaks to the broker, to the Hub or to clients, and some of them read what strangers have written. So none
gets the credentials of the process that starts it."""

import os
import re
from collections.abc import Mapping

_OWN = "TOKENBUS_"
_PASSED_ON = frozenset(
    {"TOKENBUS_DEBUG", "TOKENBUS_LOG", "TOKENBUS_LOG_FORMAT", "TOKENBUS_CACHE", "TOKENBUS_HUB_CACHE"}
)
"""The project's own variables that children read."""
_is_secret = re.compile(
    r"PASSW(OR)?D$|(^|_)(TOKEN|PASSPHRASE|SECRET|CREDENTIALS?|API_?KEYS?|ACCESS_KEY(_ID)?|PRIVATE_KEY|NKEY|SEED)$",
    re.IGNORECASE,
).search


def child_environment(**variables: str) -> dict[str, str]:
    """Returns this process's environment without credentials and without settings that only it needs, together with
    `variables`, which take precedence."""
    return without_secrets(os.environ) | variables


def without_secrets(environment: Mapping[str, str]) -> dict[str, str]:
    """Returns the variables of an environment that a child process may have."""
    return {
        name: value
        for name, value in environment.items()
        if name in _PASSED_ON or not (name.startswith(_OWN) or _is_secret(name))
    }
