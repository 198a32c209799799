"""A replica answers every call, keeps no command waiting for a text, and ends when one of its threads ends. A model
that it can't load ends nothing."""

import contextlib
import queue
import socket
import threading
from collections.abc import Callable, Iterator

import pytest

from tests.support.arithmetic import ArithmeticRunner, exchanging, make_config
from tokenbus.protocol.wire import block_hash, codec, errors, internal
from tokenbus.worker.contract import engine_request
from tokenbus.worker.contract.engine_errors import DeviceError, ModelError, ModelTooLargeError
from tokenbus.worker.engine.device.runner import Runner
from tokenbus.worker.engine.process import ipc, replica

_report = ipc.report_decoder.decode


class Texts(ArithmeticRunner):
    """A runner that tokenizes texts, but for the empty one, when a gate is open; raises `fault` where there is one."""

    def __init__(self) -> None:
        super().__init__()
        assert self.embedder is not None
        self.embedder.tokenize = self._token_ids  # type: ignore[method-assign]
        self.reranker = self.embedder  # type: ignore[assignment]
        self.is_asked = threading.Event()
        self.gate = threading.Event()
        self.gate.set()
        self.fault: Exception | None = None

    def tokenize(self, request: internal.Tokenize) -> list[int]:
        return self._token_ids(request.text or "")

    def _token_ids(self, text: str) -> list[int]:
        self.is_asked.set()
        assert not text or self.gate.wait(10)
        if self.fault is not None:
            raise self.fault
        return [1] * len(text)


class Replica:
    """A replica on a thread, as its frontend sees it."""

    def __init__(self, runner: Texts) -> None:
        self.runner = runner
        self.sock, self._theirs = socket.socketpair()
        self.sock.settimeout(10)
        self._reports = map(_report, ipc.receive(self.sock))
        self._end: queue.SimpleQueue[BaseException | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()
        assert isinstance(next(self._reports), ipc.Ready)

    def send(self, *commands: ipc.Command) -> None:
        for command in commands:
            self.sock.sendall(ipc.encode(command))

    def until(self, is_it: Callable[[ipc.Report], bool]) -> ipc.Report:
        return next(report for report in self._reports if is_it(report))

    def ended(self) -> BaseException | None:
        """Waits for its end; returns the exception that it raised."""
        return self._end.get(timeout=10)

    def close(self) -> None:
        self.runner.gate.set()
        with contextlib.suppress(OSError):
            self.sock.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        self.sock.close()
        self._theirs.close()

    def _serve(self) -> None:
        try:
            replica.serve(self._theirs, lambda progress: self.runner, step_target_s=0.05)
        except BaseException as error:
            self._end.put(error)
        else:
            self._end.put(None)


@pytest.fixture
def one() -> Iterator[Replica]:
    one = Replica(Texts())
    yield one
    one.close()


def embed(call_id: int, *inputs: str) -> ipc.EmbedCall:
    return ipc.EmbedCall(call_id, internal.Embed(inputs=list(inputs), remaining_ms=9_000))


def add(seq_no: int) -> ipc.Add:
    return ipc.Add(seq_no, block_hash.pack_token_ids([1, 2, 3]), engine_request.Sampling(max_tokens=2, ignore_eos=True))


def ends(report: ipc.Report) -> bool:
    return isinstance(report, ipc.StepReport) and any(output.finish_reason for output in report.outputs)


def code_of(report: ipc.Report) -> errors.Code | None:
    error = report.error if isinstance(report, ipc.TokenizeCallResult | ipc.PoolResult) else None
    return None if error is None else error.code


def rerank(call_id: int, *documents: str) -> ipc.RerankCall:
    return ipc.RerankCall(call_id, internal.Rerank(query="q", documents=list(documents), remaining_ms=9_000))


@pytest.mark.parametrize("ask", [embed(7, "a", "b"), rerank(7, "a", "b")])
def test_a_call_that_is_aborted_while_its_texts_are_tokenized_is_never_answered(one: Replica, ask: ipc.Command) -> None:
    one.runner.gate.clear()
    one.send(ask)
    assert one.runner.is_asked.wait(10)
    one.send(ipc.AbortPooling(7))
    one.send(ipc.ClearCache())
    one.until(lambda report: isinstance(report, ipc.StepReport))  # so the abort before it was read
    one.send(embed(8, "a"))
    one.runner.gate.set()
    answered = one.until(lambda report: isinstance(report, ipc.PoolResult))
    assert isinstance(answered, ipc.PoolResult)
    assert answered.call_id == 8


ASKS = [embed(7, "a", "b"), rerank(7, "a", "b"), ipc.TokenizeCall(7, internal.Tokenize(text="a"))]


@pytest.mark.parametrize("ask", ASKS)
def test_no_command_waits_for_texts_that_are_being_tokenized(one: Replica, ask: ipc.Command) -> None:
    one.runner.gate.clear()
    one.send(ask)
    assert one.runner.is_asked.wait(10)
    one.send(add(1))
    one.until(ends)
    one.runner.gate.set()
    assert code_of(one.until(lambda report: not isinstance(report, ipc.StepReport | ipc.PoolingBatch))) is None


def test_a_prompt_is_tokenized_while_inputs_to_embed_are(one: Replica) -> None:
    one.runner.gate.clear()
    one.send(embed(1, "a"), ipc.TokenizeCall(2, internal.Tokenize(text="")))
    assert isinstance(one.until(lambda report: True), ipc.TokenizeCallResult)
    one.runner.gate.set()
    assert isinstance(one.until(lambda report: isinstance(report, ipc.PoolResult)), ipc.PoolResult)


@pytest.mark.parametrize("ask", ASKS)
def test_an_unexpected_error_of_a_tokenizer_costs_one_request_and_no_replica(one: Replica, ask: ipc.Command) -> None:
    one.runner.fault = ZeroDivisionError("by a text")
    one.send(ask)
    assert code_of(one.until(lambda report: True)) is errors.Code.INTERNAL
    one.runner.fault = None
    one.send(add(1))
    one.until(ends)
    one.send(ask)
    assert code_of(one.until(lambda report: not isinstance(report, ipc.StepReport | ipc.PoolingBatch))) is None


def test_a_replica_ends_when_the_thread_that_reads_its_commands_ends(one: Replica) -> None:
    one.sock.sendall(b"\x01\x00\x00\x00\xc1")
    assert isinstance(one.ended(), ValueError)
    assert one.runner.closed


def test_a_replica_closes_its_model_when_the_last_text_has_been_tokenized(one: Replica) -> None:
    one.runner.gate.clear()
    one.send(embed(7, "a"))
    assert one.runner.is_asked.wait(10)
    one.sock.shutdown(socket.SHUT_RDWR)
    assert not one.runner.closed
    one.runner.gate.set()
    assert isinstance(one.ended(), ConnectionError | None)  # the answer may still have been tried
    assert one.runner.closed


class _Panic(BaseException):
    """What a library of Rust raises, which is no Exception."""


FAILURES = {
    "refused": (ModelError("wrong"), ipc.LoadFailed("wrong")),
    "name that is no text": (ModelError("a\udcff.gguf: is wrong"), ipc.LoadFailed("a\\udcff.gguf: is wrong")),
    "panic with such a name": (
        _Panic("at \udcff"),
        ipc.LoadFailed("the engine failed while it loaded the model: _Panic: at \\udcff"),
    ),
    "too large": (ModelTooLargeError("too large"), ipc.LoadFailed("too large", is_too_large=True)),
    "no memory": (MemoryError(), ipc.LoadFailed("there is too little memory to load the model", is_too_large=True)),
    "device": (DeviceError("gone"), ipc.LoadFailed("the device failed: gone", may_pass=True)),
    "bug": (KeyError("x"), ipc.LoadFailed("the engine failed while it loaded the model: KeyError: 'x'")),
    "panic": (_Panic("at 1"), ipc.LoadFailed("the engine failed while it loaded the model: _Panic: at 1")),
}


def load_reported(load: Callable[[Callable[[float], None]], Runner]) -> ipc.Report:
    """Returns what a frontend is told about a load that fails."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        replica.serve(theirs, load, step_target_s=0.05)
        theirs.shutdown(socket.SHUT_WR)
        (report,) = map(_report, ipc.receive(ours))
        return report


@pytest.mark.parametrize("kind", FAILURES)
def test_whatever_happens_while_a_model_is_loaded_is_told_and_ends_no_process(kind: str) -> None:
    error, told = FAILURES[kind]

    def fail(_: Callable[[float], None]) -> Runner:
        raise error

    assert load_reported(fail) == told


@pytest.mark.parametrize("sizes", [{"total_kv_blocks": 0}, {"context_length": 10**20}])
def test_a_model_that_can_not_be_served_or_described_is_closed_and_told(sizes: dict[str, int]) -> None:
    runner = Texts()
    closed: list[str] = []
    runner.config = codec.replace(runner.config, **sizes)
    runner.close = lambda: closed.append("closed")  # type: ignore[method-assign]
    report = load_reported(lambda _: runner)
    assert isinstance(report, ipc.LoadFailed)
    assert "Error: " in report.message
    assert closed == ["closed"]


def test_a_load_that_fails_after_its_copies_were_opened_closes_them() -> None:
    runner = ArithmeticRunner(exchanging(make_config()))
    copies = runner.opened_copies()

    def fail(*_: object) -> None:
        assert copies.is_open
        raise ModelError("no place in the pool")

    ours, theirs = socket.socketpair()
    with ours, theirs:
        replica.serve(theirs, lambda _: runner, step_target_s=0.05, join_pool=fail)
    assert not copies.is_open


def test_a_load_whose_frontend_has_gone_ends_without_a_word() -> None:
    ours, theirs = socket.socketpair()
    ours.close()

    def load(progress: Callable[[float], None]) -> Runner:
        progress(0.5)
        raise AssertionError

    with theirs, pytest.raises(ConnectionError):
        replica.serve(theirs, load, step_target_s=0.05)
