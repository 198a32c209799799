"""The next engine, and the next worker, begin with the blocks that the last one has computed."""

import itertools
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest

from tests.support import adapters
from tests.support.engines import DEMO, ONNX, Recorder, exact_demo, gqa_demo, stateful
from tokenbus.protocol.wire.block_hash import Adapter
from tokenbus.worker.contract import contract, engine_request
from tokenbus.worker.contract.contract import RecoveredCopies
from tokenbus.worker.contract.engine_settings import EngineSettings
from tokenbus.worker.engine.memory import claims
from tokenbus.worker.engine_client.client import EngineClient
from tokenbus.worker.engine_client.engine_process import EngineProcess
from tokenbus.worker.engine_client.listener import EngineListener, Observation

PROMPT = [10 + number * number % 200 for number in range(300)]
TOKENS = 20


def settings_of(kind: str) -> EngineSettings:
    match kind:
        case "gguf":
            return DEMO
        case "gguf without flash attention":
            return msgspec.structs.replace(DEMO, flash_attention="off")
        case "onnx":
            return ONNX
    return msgspec.structs.replace(ONNX, model=str(gqa_demo()))


class Engines(EngineListener):
    """Engines one after another in one region."""

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self.recovery = RecoveredCopies()
        self.reported: list[tuple[int, int]] = []
        self._process = EngineProcess()
        self._numbers = itertools.count()
        self._client: EngineClient | None = None
        self._pid = 0

    def observe(self, seen: Observation) -> None:
        if isinstance(seen, RecoveredCopies):
            self.recovery = seen

    async def start(self, settings: EngineSettings) -> None:
        self._client = EngineClient(lambda: self._process.open(settings, self.fd), max_waiting=64)
        self._client.listener = self
        self.reported = []
        self._client.on_kv_events = lambda removed, stored: self.reported.extend(stored)
        config = await self._client.start("w")
        self._pid = config.pid
        self._client.on_kv_events = lambda removed, stored: None

    async def settle(self) -> None:
        """Waits until all copies are made: an idle engine makes those that are left in its next step."""
        assert self._client is not None
        await self._client.export_blocks(contract.CachedPrefix("", "", (), b""), 0, 1)

    async def kill(self) -> None:
        assert self._client is not None
        os.kill(self._pid, signal.SIGKILL)
        await self._client.died()
        await self._client.close()

    async def load_adapter(self, path: Path) -> str:
        assert self._client is not None
        return await self._client.load_adapter(str(path))

    async def ask(self, salt: str = "", *used: Adapter) -> tuple[list[int], int]:
        """Returns the tokens of a completion, and how many of its prompt's tokens were cached."""
        assert self._client is not None
        recorder = Recorder()
        sampling = engine_request.Sampling(max_tokens=TOKENS, ignore_eos=True)
        request = engine_request.EngineRequest(
            key=str(next(self._numbers)), token_ids=PROMPT, sampling=sampling, cache_salt=salt, adapters=used
        )
        self._client.generate(request, recorder)
        terminal = await recorder.terminal()
        assert terminal.usage is not None
        return recorder.token_ids, terminal.usage.cached_tokens or 0

    async def clear(self) -> None:
        assert self._client is not None
        self._client.clear_cache()
        await self.ask("salt")  # commands are carried out in order

    async def close(self) -> None:
        if self._client is not None:
            await self._client.cleanup()


@pytest.fixture
async def engines() -> AsyncIterator[Engines]:
    fd = claims.open_memory()
    one = Engines(fd)
    yield one
    await one.close()
    os.close(fd)


@pytest.mark.parametrize("kind", ["gguf", "gguf without flash attention", "onnx", "onnx with rows"])
async def test_after_a_kill_a_known_prompt_computes_one_block_and_gets_the_same_tokens(
    engines: Engines, kind: str
) -> None:
    settings = msgspec.structs.replace(settings_of(kind), host_cache_mib=16)
    await engines.start(settings)
    undisturbed, cached = await engines.ask()
    assert cached == 0
    assert not engines.reported
    await engines.kill()
    await engines.start(settings)
    assert engines.recovery.blocks == len(engines.reported) == (len(PROMPT) + TOKENS - 1) // 16
    assert not engines.recovery.discarded
    tokens, cached = await engines.ask()
    assert tokens == undisturbed
    assert cached >= len(PROMPT) - 16
    tokens, cached = await engines.ask("another salt")
    assert tokens == undisturbed
    assert cached == 0


async def test_after_a_kill_blocks_of_adapters_are_found_for_these_alone(engines: Engines, tmp_path: Path) -> None:
    settings = msgspec.structs.replace(exact_demo(), host_cache_mib=16)
    paths = [adapters.write(tmp_path / f"{seed}.gguf", seed) for seed in (1, 2)]
    await engines.start(settings)
    one, other = [await engines.load_adapter(path) for path in paths]
    undisturbed, _ = await engines.ask("", Adapter(one, 0.5))
    await engines.kill()
    await engines.start(settings)
    assert engines.recovery.blocks == (len(PROMPT) + TOKENS - 1) // 16
    for path in paths:
        await engines.load_adapter(path)
    for used in ((), (Adapter(one, 1.0),), (Adapter(other, 0.5),), (Adapter(one, 0.5), Adapter(other, 1.0))):
        tokens, cached = await engines.ask("", *used)
        assert cached == 0, used
        assert tokens != undisturbed, used
    tokens, cached = await engines.ask("", Adapter(one, 0.5))
    assert tokens == undisturbed
    assert cached >= len(PROMPT) - 16


async def test_an_engine_of_another_kind_takes_nothing_of_what_is_there(engines: Engines) -> None:
    await engines.start(DEMO)
    await engines.ask()
    await engines.kill()
    await engines.start(msgspec.structs.replace(DEMO, cache_type_k="q8_0", cache_type_v="q8_0"))
    assert engines.recovery == RecoveredCopies()
    _, cached = await engines.ask()
    assert cached == 0


async def test_a_cleared_cache_leaves_nothing_in_the_region(engines: Engines) -> None:
    settings = msgspec.structs.replace(DEMO, host_cache_mib=4, kv_tokens=1_024)
    await engines.start(settings)
    await engines.ask()
    await engines.ask("salt")
    settings_size = os.fstat(engines.fd).st_size
    await engines.clear()
    await engines.kill()
    assert os.fstat(engines.fd).st_size == settings_size
    prompt = b"".join(token.to_bytes(4, "little") for token in PROMPT[:16])
    await engines.start(settings)
    assert engines.recovery.blocks <= 20
    assert os.pread(engines.fd, settings_size, 0).count(prompt) <= 1  # of the request behind the clearing


async def test_a_file_outlives_the_worker_and_memory_takes_its_place_where_it_can_not(tmp_path: Path) -> None:
    folder = tmp_path / "state"
    settings = msgspec.structs.replace(DEMO, host_cache_mib=16, keep_cache=str(folder), keep_cache_mib=24)
    answers: list[list[int]] = []
    for number in range(2):
        fd = claims.open_memory()
        one, other = Engines(fd), Engines(fd)
        await one.start(settings)
        await other.start(settings)  # the file is in use, and there is no room for another
        tokens, cached = await one.ask()
        assert cached >= (len(PROMPT) - 16 if number else 0)
        answers.append(tokens)
        assert await other.ask() == (tokens, 0)
        await one.kill()
        await other.close()
        os.close(fd)
    assert answers[0] == answers[1]
    (file,) = folder.iterdir()
    assert (file.stat().st_mode & 0o777, folder.stat().st_mode & 0o777) == (0o600, 0o700)


async def test_a_file_that_is_none_any_more_is_started_anew(tmp_path: Path) -> None:
    settings = msgspec.structs.replace(DEMO, host_cache_mib=16, keep_cache=str(tmp_path / "state"))
    fd = claims.open_memory()
    engines = Engines(fd)
    await engines.start(settings)
    undisturbed, _ = await engines.ask()
    await engines.kill()
    (file,) = (tmp_path / "state").iterdir()
    for damage in (b"something else", b"", file.read_bytes()[: 1 << 20]):
        file.write_bytes(damage)
        await engines.start(settings)
        tokens, cached = await engines.ask()
        assert tokens == undisturbed
        assert cached < len(PROMPT)
        await engines.kill()
    os.close(fd)


@pytest.mark.parametrize("kind", ["hybrid", "recurrent", "window"])
async def test_checkpoints_outlive_their_engine_and_the_worker(tmp_path: Path, kind: str) -> None:
    settings = msgspec.structs.replace(stateful(kind), host_cache_mib=16)
    folder = str(tmp_path / "state")
    for kept in (settings, msgspec.structs.replace(settings, keep_cache=folder)):
        engines = Engines(claims.open_memory())
        await engines.start(kept)
        undisturbed, cached = await engines.ask()
        assert cached == 0
        await engines.settle()
        await engines.kill()
        if kept.keep_cache:
            os.ftruncate(engines.fd, 0)
        await engines.start(kept)
        assert not engines.recovery.discarded
        assert engines.reported
        tokens, cached = await engines.ask()
        assert tokens == undisturbed
        assert cached >= len(PROMPT) - 24
        assert (await engines.ask("another salt")) == (undisturbed, 0)
        await engines.kill()
        await engines.start(msgspec.structs.replace(kept, cache_type_k="f16", cache_type_v="f16"))
        assert engines.recovery == RecoveredCopies()
        await engines.close()
        os.close(engines.fd)
