"""Where a process finds the keys of its fleet, as its settings say."""

import dataclasses
from pathlib import Path

from tokenbus.protocol.access.key_ring import DEFAULT_STALE_S, KeyRing
from tokenbus.protocol.access.key_stores import BucketKeys, FileKeys, KeyStore
from tokenbus.protocol.access.key_watch import BucketKeyWatch, FileKeyWatch, KeyWatch
from tokenbus.protocol.bus import bucket
from tokenbus.protocol.bus.bucket import Bucket
from tokenbus.protocol.bus.connection import Connection

BUCKET = "bucket"
"""Stands for the bucket of the broker; anything else is the path of a file."""
_BUCKET_NAME = "keys"


@dataclasses.dataclass(frozen=True)
class KeySettings:
    """Where the keys are, and for how long they are valid without their store."""

    keys: str = ""
    """Where API keys are kept: `bucket`, in the broker's JetStream, or the path of a JSON file; if empty, there are
    none."""
    keys_stale_s: float = DEFAULT_STALE_S
    """Seconds for which known keys stay valid while their store can't be reached; unknown ones are refused at once. 0:
    all are refused after five seconds."""

    @property
    def are_used(self) -> bool:
        return bool(self.keys)

    def store(self, connection: Connection | None, prefix: str) -> KeyStore:
        """Returns the store, for those who manage keys. A file needs no connection; `prefix` is that of all
        subjects."""
        if self.keys != BUCKET:
            return FileKeys(Path(self.keys))
        assert connection is not None
        return BucketKeys(_bucket(connection, prefix))

    def buckets(self, connection: Connection, prefix: str) -> list[Bucket]:
        """Returns the bucket, if keys are in one."""
        return [_bucket(connection, prefix)] if self.keys == BUCKET else []

    def watch(self, connection: Connection, prefix: str) -> KeyWatch:
        """Returns a watch with a new ring."""
        ring = KeyRing(self.keys_stale_s)
        if self.keys == BUCKET:
            return BucketKeyWatch(connection, _bucket(connection, prefix), ring)
        return FileKeyWatch(Path(self.keys), ring)


def _bucket(connection: Connection, prefix: str) -> Bucket:
    return Bucket(connection, bucket.bucket_name(prefix, _BUCKET_NAME))
