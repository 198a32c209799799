"""Writes the ends of a router's requests to the audit log."""

from tokenbus.protocol.access.audit_log import AuditWriter, count_records
from tokenbus.protocol.telemetry.metrics import Counter
from tokenbus.router.requests.flights.ends import RequestEnd, RequestEnds


def audit_ends(ends: RequestEnds, writer: AuditWriter, counter: Counter) -> None:
    """Has each end, and each request that is refused, written from now on, and the records counted."""
    count_records(writer, counter)

    def record(end: RequestEnd) -> None:
        writer.add(
            "request",
            end.operation,
            end.address.tenant,
            end.address.key_id,
            model=end.address.model,
            request_id=end.request_id,
            outcome=end.reason,
            code=None if end.code is None else str(end.code),
            prompt_tokens=end.prompt_tokens or None,
            cached_tokens=end.cached_tokens or None,
            completion_tokens=end.completion_tokens or None,
            adapters=end.adapters,
        )

    ends.add(record, hears_refusals=True)
