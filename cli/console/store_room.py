"""Whether the disk of an embedded broker has room for all that JetStream reserves for it."""

import math
import shutil
from pathlib import Path

from tokenbus.gateway.admission.settings import GatewaySettings
from tokenbus.protocol.access import key_stores, usage_store

_MIB = 1 << 20
_USABLE = 0.75
"""JetStream reserves at most this part of what is free when it starts."""


def is_used(store: Path) -> bool:
    """Whether a broker has stored something in its folder: then the room for it was reserved."""
    return any(store.glob("jetstream/*/streams/*"))


def shortage(store: Path, audit_bytes: int) -> str:
    """Returns what is missing in the folder of a broker that has stored nothing yet, and what helps; nothing if there
    is room. `audit_bytes` are those of an audit log, if there is one."""
    from tokenbus.router.access.quota import BUCKET_LIMITS  # slow

    existing = next(folder for folder in (store, *store.parents) if folder.exists())
    buckets = (key_stores.LIMITS, usage_store.LIMITS, BUCKET_LIMITS)
    needed = sum(one.max_bytes for one in buckets) + GatewaySettings.stored_responses_bytes + audit_bytes
    free = shutil.disk_usage(existing).free
    if _USABLE * free >= needed:
        return ""
    what = "keys, limits, usage and stored responses" + (", and the audit log" if audit_bytes else "")
    return (
        f"JetStream reserves {needed // _MIB:,} MiB for {what}, but at most three quarters of what is free in {store}: "
        f"make {math.ceil(needed / _USABLE / _MIB):,} MiB free there (it is {free // _MIB:,}), or set XDG_STATE_HOME "
        "to a folder of another disk"
    )
