"""The configuration of a broker whose clients show API keys."""

import importlib.resources

from tokenbus.auth.seeds import Seeds
from tokenbus.protocol.wire import subjects

_TEMPLATE = "nats-keys.conf"


def broker_config(seeds: Seeds, prefix: str = subjects.DEFAULT_PREFIX) -> str:
    """Returns the configuration with the public keys of the service; its users' passwords stay variables. `prefix` is
    that of all subjects."""
    text = importlib.resources.files("tokenbus.auth").joinpath(_TEMPLATE).read_text()
    replaced = {
        "$TOKENBUS_CALLOUT_ISSUER": seeds.signer.public,
        "$TOKENBUS_CALLOUT_XKEY": seeds.sealing.public,
        subjects.DEFAULT_PREFIX: prefix,
        subjects.DEFAULT_PREFIX.replace(".", "_"): prefix.replace(".", "_"),
    }
    for old, new in replaced.items():
        text = text.replace(old, new)
    return text
