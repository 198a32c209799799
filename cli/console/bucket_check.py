"""Finds out for `tokenbus doctor` in how many copies buckets are kept, and which can't be reached."""

import asyncio
from typing import NamedTuple

from tokenbus.protocol.access.audit_log import AuditLog
from tokenbus.protocol.bus.bucket import (
    NUM_COPIES,
    Bucket,
    BucketError,
    BucketLateError,
    BucketMissingError,
    Copies,
    StreamContents,
    bucket_name,
)
from tokenbus.protocol.bus.connection import Connection

_NAMES = ("keys", "quota", "usage", "responses")


class BucketFinding(NamedTuple):
    """One result: its mark is `ok`, `note` or `bad`."""

    mark: str
    what: str
    advice: str = ""


async def check_buckets(connection: Connection, prefix: str) -> list[BucketFinding]:
    """Finds out how many copies there are of each bucket that has been made, and which can't be reached."""
    buckets: list[StreamContents] = [Bucket(connection, bucket_name(prefix, name)) for name in _NAMES]
    buckets.append(AuditLog(connection, prefix))
    forbidden: list[str] = []
    connection.on_permissions_violation = forbidden.append
    found = await asyncio.gather(*(one.copies() for one in buckets), return_exceptions=True)
    findings = []
    for bucket, copies in zip(buckets, found, strict=True):
        if isinstance(copies, BucketLateError) and any(f".{bucket.stream}".lower() in one.lower() for one in forbidden):
            findings.append(BucketFinding("note", f"this user may not ask about {bucket.name}"))
        elif isinstance(copies, BucketMissingError):
            continue
        elif isinstance(copies, BucketError):
            advice = "start the brokers that are away: what is in it can't be read until then, and is not lost"
            findings.append(BucketFinding("bad", f"{bucket.name} can't be reached: {copies}", advice))
        elif isinstance(copies, BaseException):
            raise copies
        else:
            findings.append(_of_copies(bucket, copies))
    return findings


def _of_copies(bucket: StreamContents, copies: Copies) -> BucketFinding:
    if copies.num_missing:
        what = f"the cluster keeps {bucket.name} in {copies.num} of {NUM_COPIES} copies, and a broker's end can end it"
        command = f"nats stream edit {bucket.stream} --replicas {NUM_COPIES}"
        advice = f"routers and gateways that may change it make the others; otherwise {command}"
        return BucketFinding("bad", what, advice)
    where = "the cluster" if copies.is_clustered else "the broker"
    return BucketFinding("ok", f"{where} keeps {bucket.name} in {copies.num} cop{'y' if copies.num == 1 else 'ies'}")
