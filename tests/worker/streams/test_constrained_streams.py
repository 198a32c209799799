"""A stream with a constraint has no head before that is compiled, so that a refusal is a terminal alone."""

from collections.abc import AsyncIterator

import pytest

from tests.support.arithmetic import ArithmeticRunner, make_config
from tests.support.engines import thread_engine
from tests.worker.streams.test_resumed_streams import SCHEME, Worker
from tokenbus.protocol.wire import errors
from tokenbus.protocol.wire.params import JsonSchema, ResponseFormat


@pytest.fixture
async def worker() -> AsyncIterator[Worker]:
    one = Worker()
    # its runner samples what it likes, but everything until then is as it is with any other
    config = make_config(features=("generate", "structured_output", "grammar"))
    one.engine = thread_engine(lambda _: ArithmeticRunner(config))
    one.engine.listener = one
    await one.start()
    yield one
    await one.engine.cleanup()


async def test_the_head_comes_once_the_constraint_is_compiled(worker: Worker) -> None:
    head, *rest = await worker.answer("r", regex="a+")
    assert (head.tokens, head.finish_reason, head.hash_scheme) == (0, None, SCHEME)
    assert all(chunk.tokens for chunk in rest)
    # not yet when the run is accepted
    assert worker.accept("again", regex="a+").accepted
    assert "_INBOX.again.1" not in worker.wire.chunks
    assert worker.accept("free").accepted
    assert "_INBOX.free.1" in worker.wire.chunks


async def test_a_resumed_stream_has_a_head_too(worker: Worker) -> None:
    head, *_ = await worker.answer("r", 1 + ord("a") - 0x20, regex="a+", attempt=2)
    assert (head.offset, head.tokens, head.hash_scheme) == (1, 0, SCHEME)


@pytest.mark.parametrize("stream", [True, False])
async def test_a_refusal_is_a_terminal_alone(worker: Worker, stream: bool) -> None:
    poem = ResponseFormat(type="json_schema", json_schema=JsonSchema(schema={"type": "poem"}))
    for name, wrong in (("regex", {"regex": "(a"}), ("response_format.json_schema.schema", {"response_format": poem})):
        (terminal,) = await worker.answer(name[:5], stream=stream, **wrong)
        assert terminal.error is not None
        assert (terminal.error.code, terminal.error.param) == (errors.Code.INVALID_REQUEST, name)
        assert terminal.usage is not None
        assert terminal.usage.completion_tokens == 0


async def test_an_engine_without_the_feature_refuses_the_run() -> None:
    one = Worker()
    await one.start()
    for param, asked in (("regex", {"regex": "a"}), ("choice", {"choice": ["a"]}), ("grammar", {"grammar": "x"})):
        reply = one.accept(param, **asked)
        assert reply.error is not None
        assert (reply.error.code, reply.error.param) == (errors.Code.UNSUPPORTED, param)
    await one.engine.cleanup()
