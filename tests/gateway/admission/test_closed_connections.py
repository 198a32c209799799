"""Connections that a gateway closes are counted, logged and told why."""

import json

from structlog.testing import capture_logs

from tokenbus.gateway.admission.metrics import ClosedConnections, GatewayMetrics
from tokenbus.gateway.dialects import refusal_response
from tokenbus.protocol.http.refusals import HttpRefusal, Reason


def test_thousands_of_ended_connections_are_counted_and_leave_a_line_every_ten_seconds() -> None:
    now, metrics = 0.0, GatewayMetrics()
    refusals = ClosedConnections(metrics, lambda: now)
    with capture_logs() as lines:
        for number in range(3_000):
            now = number / 100
            refusals.record(Reason.EVICTED, "192.0.2.7")
        refusals.record(Reason.MALFORMED, "192.0.2.8")
    said = [(line["reason"], line["address"], line["count"]) for line in lines]
    assert said == [
        ("evicted", "192.0.2.7", 1),
        ("evicted", "192.0.2.7", 1_000),
        ("evicted", "192.0.2.7", 1_000),
        ("malformed", "192.0.2.8", 1),
    ]
    (evicted,) = metrics.closed.labels(Reason.EVICTED).collect()
    assert evicted.samples[0].value == 3_000


def test_a_refused_connection_gets_the_error_of_the_api_and_when_to_come_back() -> None:
    status, headers, body = refusal_response(HttpRefusal(429, "too many", "too_many_connections", Reason.TOO_MANY), "")
    assert status == 429
    assert dict(headers)[b"retry-after"] == b"1"
    assert dict(headers)[b"content-type"] == b"application/json"
    error = {"message": "too many", "type": "rate_limit_error", "param": None, "code": "too_many_connections"}
    assert json.loads(body) == {"error": error}
