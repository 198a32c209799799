"""A worker that receives everything while nothing it sends arrives."""

import asyncio
import contextlib

from nats.aio.msg import Msg

from tests.hostile.scale import times
from tests.support.exact_client import until_ready
from tests.support.one_way_proxy import one_way_proxy
from tests.support.raw_client import PREFIX
from tests.support.system import System
from tokenbus.protocol.wire import codec, messages

_chunks = codec.Decoder(messages.Chunk)
_MAX_TOKENS = 900


async def test_a_worker_whose_way_out_is_blocked_under_others_traffic_adds_nothing_to_the_stream_that_goes_on(
    system: System,
) -> None:
    system.router("router")
    bare = await system.connect()
    async with one_way_proxy(system.url) as way:
        system.worker("worker", "--nats", way.url)
        for _ in range(times(1, 7)):
            await until_ready(bare, 1)
            chunks: list[messages.Chunk] = []
            ended = asyncio.Event()

            async def hear(message: Msg, chunks: list[messages.Chunk] = chunks, ended: asyncio.Event = ended) -> None:
                chunks.append(_chunks.decode(message.data, codec.Encoding.JSON))
                if chunks[-1].finish_reason is not None:
                    ended.set()

            inbox = bare.nats.new_inbox()
            subscription = await bare.nats.subscribe(inbox, cb=hear)
            asked = b'{"prompt": "Once upon a time", "max_tokens": %d, "ignore_eos": true}' % _MAX_TOKENS
            await bare.nats.publish(f"{PREFIX}.generate.demo", asked, reply=inbox)
            async with asyncio.timeout(60):
                while not any(chunk.text for chunk in chunks):
                    await asyncio.sleep(0.005)
                way.block()
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(4):
                        while True:
                            await bare.nats.publish(f"{PREFIX}.cancel.somebody-elses", b"")
                            await asyncio.sleep(0.1)
                way.unblock()
                await ended.wait()
            await until_ready(bare, 1)  # whatever the worker may still have wanted to say is said by now
            await bare.settle()
            await subscription.unsubscribe()
            reasons = [chunk.finish_reason for chunk in chunks]
            assert reasons == [None] * (len(reasons) - 1) + ["length"], chunks[-4:]
            num_tokens = 0
            for chunk in chunks:
                assert chunk.offset == num_tokens, chunk
                num_tokens += chunk.tokens
            assert num_tokens == _MAX_TOKENS
            attempts = [chunk.attempt for chunk in chunks if chunk.tokens]
            assert attempts == sorted(attempts), chunks
            assert len(set(attempts)) == 2, chunks  # an attempt that got no worker said nothing
    assert any(line["event"] == "self_fenced" for line in system.log("worker"))
