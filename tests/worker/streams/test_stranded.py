"""A stream whose adapter is lost with its engine is offered to routers again and again, and ends if nobody takes it."""

from tests.worker.streams.test_stream import stream, terminal
from tokenbus.protocol.wire import errors, messages
from tokenbus.worker.broker.event_log import EventLog
from tokenbus.worker.contract import engine_output
from tokenbus.worker.streams.stranded import STRANDED_S, StrandedStreams
from tokenbus.worker.streams.stream import WorkerStream

LOST = terminal(reason=messages.FinishReason.ERROR, error=errors.make_error(errors.Code.WORKER_LOST))


class Worker:
    """An announcer and an outbox that write down what they are told."""

    def __init__(self) -> None:
        self.offered: list[list[str]] = []
        self.ended: list[messages.FinishReason | None] = []
        self.stranded = StrandedStreams(self, self)  # type: ignore[arg-type]
        self.log = EventLog("w1", "1-a")

    def publish_events(self) -> None:
        self.offered.append(self.log.stranded)

    def put(self, stream: WorkerStream, output: engine_output.Output, now: float) -> None:
        self.ended.append(output.finish_reason)


def stranded() -> WorkerStream:
    one = stream()
    one.is_stranded = True
    assert one.strand(LOST, now=100.0)
    return one


def test_routers_are_told_once_a_second_until_the_time_is_over_and_then_the_client_is() -> None:
    worker, streams = Worker(), [stream(), stranded()]
    for tenths in range(1000, 1000 + round(10 * STRANDED_S)):
        worker.stranded.tick(streams, tenths / 10)
    assert (worker.offered, worker.ended) == ([["acme:r-1"]] * round(STRANDED_S), [])
    for _ in range(2):
        worker.stranded.tick(streams, 100.0 + STRANDED_S)
    assert (len(worker.offered), worker.ended) == (round(STRANDED_S), [messages.FinishReason.ERROR])


def test_a_client_may_still_cancel_it() -> None:
    worker, one = Worker(), stranded()
    worker.stranded.cancel(one, 101.0)
    worker.stranded.tick([one], 200.0)
    assert (worker.offered, worker.ended) == ([], [messages.FinishReason.CANCELLED])


def test_only_the_loss_of_its_adapter_strands_a_stream() -> None:
    one = stream()
    assert not one.strand(LOST, now=100.0)
    one.is_stranded = True
    assert not one.strand(terminal(), now=100.0)
