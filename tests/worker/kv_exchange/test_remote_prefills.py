"""A holder computes blocks for others: what it promises, when it gives them, and what ends that."""

import asyncio
import contextlib
import time
from collections.abc import Callable, Iterator

import pytest

from tests.worker.kv_exchange.stubs import ADAPTERS, CONFIG, SIZE, StubEngine, block, given_block, prefix, serving
from tokenbus.protocol.wire import codec, errors, internal, limits, messages
from tokenbus.worker.contract import engine_output
from tokenbus.worker.contract.engine_request import EngineRequest
from tokenbus.worker.kv_exchange import holder as holders
from tokenbus.worker.kv_exchange.holder import MAX_LEASES, REMOTE_PREFILL_LEASE_S, Holder, NoBlock, RemotePrefill


class ComputingEngine(StubEngine):
    """Computes as far as a test says."""

    def __init__(self) -> None:
        super().__init__()
        self.requests: dict[str, EngineRequest] = {}
        self.refusal: errors.RequestError | None = None
        self._sinks: dict[str, Callable[[engine_output.Output], None]] = {}

    def generate(self, request: EngineRequest, sink: Callable[[engine_output.Output], None]) -> None:
        if self.refusal is not None:
            raise self.refusal
        self.requests[request.key], self._sinks[request.key] = request, sink

    def abort(self, key: str) -> None:
        self._end(key, messages.FinishReason.CANCELLED)

    def compute(self, num_tokens: int) -> None:
        """Computes so many tokens of every prompt."""
        self.blocks |= {number: block(number) for number in range(num_tokens // SIZE)}
        for key, request in list(self.requests.items()):
            progress = messages.Progress(
                prompt_tokens=len(request.token_ids), processed_tokens=num_tokens, cached_tokens=0
            )
            self._sinks[key](engine_output.Output(token_ids=[], text="", progress=progress))
            if num_tokens == len(request.token_ids):
                self._end(key, messages.FinishReason.LENGTH)

    def fail(self) -> None:
        for key in list(self.requests):
            self._end(key, messages.FinishReason.ERROR)

    def _end(self, key: str, reason: messages.FinishReason) -> None:
        if self.requests.pop(key, None) is not None:
            self._sinks[key](engine_output.Output(token_ids=[1], text="", finish_reason=reason))


class Fixture:
    def __init__(self) -> None:
        self.engine = ComputingEngine()
        self.holder = Holder(lambda epoch: epoch == "1-x")
        self.holder.engine_changed(serving(self.engine))
        self.outcomes: list[str] = []
        self.holder.on_remote_prefill = self._note

    def _note(self, remote_prefill: RemotePrefill) -> None:
        self.outcomes.append(remote_prefill.outcome)

    async def ask(self, num_blocks: int = 40, **changes: object) -> internal.BlockLease:
        return await self.holder.grant(
            codec.replace(
                internal.BlockLeaseRequest(
                    identity=CONFIG.kv_identity,
                    epoch="1-x",
                    tenant="acme",
                    cache_salt="salt",
                    adapters=[internal.RunAdapter(digest=one.digest, scale=one.scale) for one in ADAPTERS],
                    token_ids=prefix(num_blocks).token_ids[:-4],
                    computed_for="acme:r-1",
                    priority=3,
                ),
                **changes,
            )
        )


@pytest.fixture
def end(monkeypatch: pytest.MonkeyPatch) -> Fixture:
    """One end, which waits for a block for as long as this machine takes to run the task that brings it."""
    monkeypatch.setattr(holders, "_PATIENCE_S", 30.0)
    return Fixture()


@contextlib.contextmanager
def without_patience() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(holders, "_PATIENCE_S", 0.01)
        yield


async def test_all_blocks_are_promised_at_once_and_given_as_they_come(end: Fixture) -> None:
    lease = await end.ask(first=3)
    assert lease.num_blocks == 37
    ((key, request),) = end.engine.requests.items()
    assert (key, request.sampling.max_tokens, request.priority) == (lease.lease, 1, 3)
    assert (request.tenant, request.cache_salt, request.adapters) == ("acme", "salt", ADAPTERS)
    with without_patience():
        assert await end.holder.read(lease.lease, 3) is NoBlock.LATER
    end.engine.compute(11 * SIZE)  # blocks 3 to 10 are the first batch
    assert await end.holder.read(lease.lease, 3) == given_block(3)
    assert await end.holder.read(lease.lease, 10) == given_block(10)
    with without_patience():
        assert await end.holder.read(lease.lease, 11) is NoBlock.LATER
    end.engine.compute(40 * SIZE)
    assert [await end.holder.read(lease.lease, at) for at in range(11, 40)] == [given_block(at) for at in range(11, 40)]
    assert end.outcomes == ["", "complete"]


async def test_a_read_that_waits_is_answered_as_soon_as_the_block_is_there(end: Fixture) -> None:
    lease = await end.ask(8)
    reading = asyncio.create_task(end.holder.read(lease.lease, 0))
    await asyncio.sleep(0)
    assert not reading.done()
    end.engine.compute(8 * SIZE)
    assert await reading == given_block(0)


async def test_a_remote_prefill_ends_with_its_lease_and_leaves_what_is_computed(end: Fixture) -> None:
    lease = await end.ask()
    end.engine.compute(8 * SIZE)
    end.holder.end(lease.lease)
    await asyncio.sleep(0)
    assert end.outcomes == ["", "cancelled"]
    assert await end.holder.read(lease.lease, 0) is NoBlock.GONE
    assert len(end.engine.blocks) == 8


async def test_a_remote_prefill_that_nobody_reads_ends(end: Fixture) -> None:
    before = time.monotonic()
    await end.ask()
    after = time.monotonic()
    end.holder.tick(before + REMOTE_PREFILL_LEASE_S - 0.01)
    await asyncio.sleep(0)
    assert end.outcomes == [""]
    end.holder.tick(after + REMOTE_PREFILL_LEASE_S)
    await asyncio.sleep(0)
    assert end.outcomes == ["", "cancelled"]


@pytest.mark.parametrize("dies", [False, True])
async def test_what_was_computed_before_a_remote_prefill_failed_is_given_and_the_rest_is_gone(
    end: Fixture, dies: bool
) -> None:
    lease = await end.ask()
    end.engine.compute(12 * SIZE)
    if dies:
        end.holder.engine_changed(None)
        assert await end.holder.read(lease.lease, 0) is NoBlock.GONE
        return
    end.engine.fail()
    found = [await end.holder.read(lease.lease, at) for at in range(40)]
    assert found == [given_block(at) for at in range(12)] + [NoBlock.GONE] * 28
    assert end.outcomes == ["", "failed"]


async def test_an_engine_that_refuses_gives_no_lease(end: Fixture) -> None:
    end.engine.refusal = errors.request_error(errors.Code.OVERLOADED)
    assert await end.ask() == internal.BlockLease(busy=True)
    end.engine.refusal = errors.request_error(errors.Code.PROMPT_TOO_LONG)
    assert await end.ask() == internal.BlockLease()
    assert (end.holder.num_leases, end.outcomes) == (0, [])


@pytest.mark.parametrize(
    "changes", [{"identity": "other"}, {"epoch": "0-x"}, {"first": 40}, {"token_ids": b"\1\2\3\4"}]
)
async def test_nothing_is_computed_for_a_question_that_does_not_fit(end: Fixture, changes: dict[str, object]) -> None:
    assert await end.ask(**changes) == internal.BlockLease()
    assert not end.engine.requests


async def test_remote_prefills_are_bounded_and_do_not_count_as_leases_of_what_is_there(end: Fixture) -> None:
    end.engine.blocks = {number: block(number) for number in range(40)}
    remote_prefills = [await end.ask() for _ in range(limits.MAX_REMOTE_PREFILLS + 1)]
    assert [one.busy for one in remote_prefills] == [False] * limits.MAX_REMOTE_PREFILLS + [True]
    others = [await end.ask(computed_for="") for _ in range(MAX_LEASES + 1)]
    assert [one.busy for one in others] == [False] * MAX_LEASES + [True]
