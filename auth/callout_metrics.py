"""Every metric of `tokenbus auth`."""

from tokenbus.protocol.access.audit_log import LOST, STORED
from tokenbus.protocol.access.key_ring import KeyProblem
from tokenbus.protocol.telemetry.metrics import MICROSECOND_BUCKETS, Counter, Gauge, Histogram, MetricFamilies

_P = "tokenbus_auth"
ALLOWED = "allowed"
NO_KEY = "no_key"
NOT_A_CLIENT = "not_a_client"
FLOOD = "flood"
BAD_REQUEST = "bad_request"
CHANGED = "changed"
RENEWAL = "renewal"
TOO_MANY = "too_many"
"""The key has as many connections as it may have."""


class CalloutMetrics(MetricFamilies):
    """Counts connections that were let in, kept out and closed."""

    def __init__(self) -> None:
        self.connects = Counter(
            f"{_P}_connects",
            "Connects that brokers have asked about: allowed, or the reason of the refusal (invalid, not_valid_now, "
            "unavailable, no_key, not_a_client; too_many: the key has all connections that it may have; flood: too "
            "many refusals at once, left unanswered; bad_request: no question of a broker).",
            ("outcome",),
        )
        self.seconds = Histogram(
            f"{_P}_answer_seconds", "Time from a broker's question until its answer is sent.", (), MICROSECOND_BUCKETS
        )
        self.kicks = Counter(
            f"{_P}_kicks",
            "Connections that this service has closed: changed (their key no longer gives them their rights), "
            "too_many (the newest beyond those that their key may have) or renewal (they would soon have ended by "
            "themselves).",
            ("reason",),
        )
        self.known_keys = Gauge(f"{_P}_known_keys", "Keys that this process knows.")
        self.silent = Gauge(f"{_P}_keys_silent_seconds", "Time since the store of keys was last heard.")
        self.audit_records = Counter(
            f"{_P}_audit_records", "Records for the audit log, by outcome: stored or lost.", ("outcome",)
        )
        for outcome in (STORED, LOST):  # export 0, or the first increase of each would be missed
            self.audit_records.labels(outcome)
        outcomes = (*KeyProblem, ALLOWED, NO_KEY, NOT_A_CLIENT, TOO_MANY, FLOOD, BAD_REQUEST)
        for outcome in outcomes:  # export 0, or the first increase of each would be missed
            self.connects.labels(outcome)
        for reason in (CHANGED, TOO_MANY, RENEWAL):
            self.kicks.labels(reason)
