"""A router keeps its own terminals for clients that ask again, within a bound in bytes."""

from types import SimpleNamespace
from typing import Any

from tests.router.builders import flight
from tokenbus.protocol.wire import limits, messages
from tokenbus.router.requests.terminals import TerminalPublisher
from tokenbus.router.telemetry.metrics import RouterMetrics


def test_long_last_words_of_workers_displace_earlier_ones() -> None:
    nowhere: Any = SimpleNamespace(send=lambda reply, payload, headers: None)
    terminals = TerminalPublisher(nowhere, nowhere, "router-1", RouterMetrics())
    long_text = "x" * (limits.MAX_ENDED_STREAM_BYTES // 16)
    flights = [flight(f"r{number}") for number in range(6)]
    for one in flights:
        words = messages.Chunk(id=one.request_id, text=long_text, finish_reason=messages.FinishReason.CANCELLED)
        terminals.end_with(one, words)
    kept = [terminals.replay(one.key, one.received_at) for one in flights]
    assert kept == [False, False, False, True, True, True]
