"""A replica that fails again and again does not count as ready."""

from tokenbus.worker.replica.replica import MAX_FAILURES
from tokenbus.worker.telemetry.metrics import ReplicaMetrics, WorkerMetrics


def test_failures_in_a_row_are_counted_until_a_request_succeeds() -> None:
    families = WorkerMetrics()
    shown = ReplicaMetrics(families, "demo", "w0")
    for _ in range(MAX_FAILURES):
        shown.request_finished("internal", None, None, has_failed=True)
    assert shown.failures_in_a_row == MAX_FAILURES
    shown.request_finished("stop", None, None)
    assert shown.failures_in_a_row == 0
