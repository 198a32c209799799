"""A router keeps a model's tokenizer, and the process that renders its chats, for as long as a worker offers it."""

import functools
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.router.builders import RESTARTING, STOPPED, card, fleet_of, known
from tests.support.renderer_processes import ended, renderers
from tokenbus.cli.console import nats_server
from tokenbus.protocol.bus import connection
from tokenbus.protocol.prompt import tokenizer_bundle
from tokenbus.protocol.wire import codec, messages, subjects
from tokenbus.router.fleet.fleet import Fleet
from tokenbus.router.requests.tokenization.tokenizer_cache import TokenizerCache
from tokenbus.worker.tokenizers import gguf_bundle

NAMES = subjects.Subjects()
PACKED = tokenizer_bundle.pack(
    tokenizer_bundle.TokenizerBundle(
        tokenizer_json=gguf_bundle.write(
            gguf_bundle.TokenizerSpec(gguf_bundle.bpe_model({"a": 0, "b": 1}, [], byte_fallback=True)), {}
        ),
        rules=tokenizer_bundle.PromptRules(special_tokens={}, vocab_size=2, chat_template="{{ messages[0].content }}"),
    )
)
CARD = card(tokenizer_digest=tokenizer_bundle.bundle_digest(PACKED))
GONE = codec.replace(CARD, state=STOPPED)
LONG_S = 61.0


class Bed(NamedTuple):
    """A cache, and a worker that offers a tokenizer."""

    cache: TokenizerCache
    fleet: Fleet
    pid: int
    """The process that renders for the worker's model."""


@pytest.fixture
async def bed(tmp_path: Path) -> AsyncIterator[Bed]:
    before = renderers()
    broker = await nats_server.start(0, tmp_path / "nats.log")
    bus = await connection.connect(connection.BusSettings(url=broker.url), "test")
    fleet = fleet_of(CARD)
    cache = TokenizerCache(bus, NAMES, fleet)
    (part,) = tokenizer_bundle.to_parts(PACKED)
    answer = functools.partial(_answer, bus, codec.encode(part))
    await bus.subscribe(NAMES.worker(CARD.model, CARD.worker_id, "tokenizer"), answer)
    assert await cache.fetch(known(fleet)) is not None
    (pid,) = renderers() - before
    yield Bed(cache, fleet, pid)
    await bus.close()
    broker.kill()
    fleet.apply_card(GONE, time.monotonic())
    cache.drop_unused(time.monotonic() + 10_000.0)


def _answer(bus: connection.Connection, payload: bytes, message: connection.Msg) -> None:
    bus.publish(message.reply, payload)


async def test_the_renderer_of_a_model_without_workers_is_ended_after_a_minute(bed: Bed) -> None:
    now = time.monotonic()
    bed.cache.drop_unused(now)
    bed.fleet.apply_card(GONE, now)
    bed.cache.drop_unused(now + LONG_S - 2.0)
    assert bed.pid in renderers()
    bed.cache.drop_unused(now + LONG_S)
    await ended(bed.pid)
    assert repr(bed.cache) == "<TokenizerCache 0 tokenizers>"


async def test_it_is_ended_too_if_its_workers_have_another_template_now(bed: Bed) -> None:
    now = time.monotonic()
    bed.fleet.apply_card(codec.replace(CARD, tokenizer_digest="another"), now)
    bed.cache.drop_unused(now + LONG_S)
    await ended(bed.pid)


@pytest.mark.parametrize("state", [messages.WorkerState.READY, RESTARTING])
async def test_it_is_kept_while_a_worker_has_the_model_and_for_a_minute_after(
    bed: Bed, state: messages.WorkerState
) -> None:
    now = time.monotonic()
    bed.fleet.apply_card(codec.replace(CARD, state=state), now)
    bed.cache.drop_unused(now + 1_000.0)
    bed.fleet.apply_card(GONE, now)
    bed.cache.drop_unused(now + 1_000.0 + LONG_S - 2.0)
    assert bed.pid in renderers()
    bed.cache.drop_unused(now + 1_000.0 + LONG_S)
    await ended(bed.pid)
