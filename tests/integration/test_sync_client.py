"""SyncClient: streams without an event loop, from any thread, which end when they are left or interrupted."""

import asyncio
import gc
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.support.exact_client import until_idle
from tests.support.raw_client import RawClient
from tokenbus.client import InvalidRequestError, RequestCancelledError, SyncClient, UnavailableError

ENDLESS = {"prompt": "Once upon a time", "max_tokens": 100_000, "ignore_eos": True}


@pytest.fixture
def client(url: str) -> Iterator[SyncClient]:
    with SyncClient(url) as client:
        yield client


async def idle(bare: RawClient) -> None:
    """Fails unless the system has nothing to do a moment later."""
    await until_idle(bare, timeout_s=3)


def test_a_loop_reads_the_answer_that_its_stream_then_has(client: SyncClient) -> None:
    stream = client.generate("demo", prompt="12 + 30 =", max_tokens=4, temperature=0)
    chunks = list(stream)
    assert "".join(chunk.text for chunk in chunks) == stream.text() == stream.so_far.text == " 42."
    assert chunks[-1].finish_reason == stream.answer().finish_reason == "length"


def test_errors_are_raised_where_they_belong(client: SyncClient) -> None:
    with pytest.raises(InvalidRequestError, match="did you mean prompt"):
        client.generate("demo", prmpt="hi")  # type: ignore[call-arg]
    with pytest.raises(InvalidRequestError, match="temperature"):
        next(client.generate("demo", prompt="hi", temperature=-1))
    with pytest.raises(InvalidRequestError, match="1 to 128"):
        client.tokenize("", prompt="hi")


async def test_a_stream_that_is_left_ends(client: SyncClient, bare: RawClient) -> None:
    def leave() -> None:
        for chunk in client.generate("demo", **ENDLESS):  # type: ignore[arg-type]
            if chunk.text:
                break
        with client.generate("demo", **ENDLESS) as stream:  # type: ignore[arg-type]
            next(stream)
        with pytest.raises(TimeoutError, match=r"within 0\.1 s"):
            client.generate("demo", **ENDLESS).text(timeout_s=0.1)  # type: ignore[arg-type]
        stream = client.generate("demo", **ENDLESS)  # type: ignore[arg-type]
        next(stream)
        stream.cancel()
        assert stream.answer().finish_reason == "cancelled"

    await asyncio.to_thread(leave)
    await idle(bare)


def test_many_threads_share_a_client(client: SyncClient) -> None:
    def add(number: int) -> str:
        return client.generate("demo", prompt=f"{number} + 1 =", max_tokens=3, temperature=0).text()

    with ThreadPoolExecutor(8) as threads:
        assert list(threads.map(add, range(4, 9))) == [" 5.", " 6.", " 7.", " 8.", " 9."]


async def test_a_reader_in_another_thread_learns_that_the_client_was_closed(url: str, bare: RawClient) -> None:
    client = SyncClient.connect(url)
    stream = client.generate("demo", **ENDLESS)  # type: ignore[arg-type]
    reader = asyncio.create_task(asyncio.to_thread(stream.text))
    while not stream.so_far.text:
        await asyncio.sleep(0.01)
    await asyncio.to_thread(client.close)
    with pytest.raises(RequestCancelledError, match="the client was closed") as caught:
        await reader
    assert caught.value.partial
    stream.close()
    with pytest.raises(RuntimeError, match="not connected"):
        client.models()
    await idle(bare)


def test_a_client_that_nothing_refers_to_ends_its_thread(url: str) -> None:
    client = SyncClient.connect(url)
    (thread,) = [one for one in threading.enumerate() if one.name == "tokenbus client"]
    stream = client.generate("demo", **ENDLESS)  # type: ignore[arg-type]
    del client
    gc.collect()
    next(stream)  # the stream still refers to it
    del stream
    gc.collect()
    thread.join(10)
    assert not thread.is_alive()


def test_a_client_without_its_broker_leaves_no_thread() -> None:
    with pytest.raises(UnavailableError):
        SyncClient.connect("nats://127.0.0.1:1", connect_timeout_s=0.1)
    assert not [one for one in threading.enumerate() if one.name == "tokenbus client"]


_PROGRAM = """
import os, sys
from tokenbus.client import SyncClient

client = SyncClient.connect()
if os.fork() == 0:
    try:
        client.models()
    except RuntimeError as error:
        print("forked:", error, flush=True)
    sys.exit()
os.wait()
try:
    for chunk in client.generate("demo", prompt="Once upon a time", max_tokens=100_000, ignore_eos=True):
        if chunk.text:
            print("reading", flush=True)
except KeyboardInterrupt:
    print("interrupted", [model.name for model in client.models()], flush=True)
held = client.generate("demo", prompt="Once upon a time", max_tokens=100_000, ignore_eos=True)
next(held)
"""


async def test_an_interrupt_cancels_the_request_a_fork_is_refused_and_the_end_of_the_program_ends_all(
    url: str, bare: RawClient
) -> None:
    environment = os.environ | {"TOKENBUS_NATS": url}
    program = subprocess.Popen(
        [sys.executable, "-c", _PROGRAM], env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert program.stdout is not None
    line = await asyncio.to_thread(program.stdout.readline)
    assert line == "forked: this client belongs to the process that forked this one: make one in each process\n"
    assert await asyncio.to_thread(program.stdout.readline) == "reading\n"
    program.send_signal(signal.SIGINT)
    output, problems = await asyncio.to_thread(program.communicate, timeout=30)
    assert output.splitlines()[-1] == "interrupted ['demo']", problems
    assert (program.returncode, problems) == (0, "")
    await idle(bare)
