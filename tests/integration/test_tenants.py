"""A tenant that exceeds its limits has to wait, without any effect on others."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.support.exact_client import until_ready
from tests.support.raw_client import PREFIX
from tests.support.system import System


@pytest.fixture
async def system(tmp_path: Path) -> AsyncIterator[System]:
    system = await System.start(tmp_path)
    yield system
    await system.stop()


async def test_a_tenant_s_limits_hold_for_it_and_for_nobody_else(system: System) -> None:
    system.router(
        "router", "--tenant-limit", "2,0,0", "--tenant-limit-for", "slow=0,1,0", "--tenant-limit-for", "wordy=0,0,50"
    )
    system.worker("worker")
    bare = await system.connect()
    await until_ready(bare, 1)
    long = {"prompt": "Once upon a time", "max_tokens": 400, "ignore_eos": True}
    first, second = [await bare.generate(long, subject=f"{PREFIX}.generate.demo.acme") for _ in range(2)]
    await second.until(3)
    third = await bare.ask(long, subject=f"{PREFIX}.generate.demo.acme")
    error = third.terminals[0]["error"]
    assert (error["code"], error["retryable"], error["retry_after_ms"]) == ("overloaded", True, 1_000)
    assert error["message"] == "tenant 'acme' has as many open requests as it may have: 2"
    short = {"prompt": "12 + 30 =", "max_tokens": 3, "temperature": 0}
    assert (await bare.ask(short, subject=f"{PREFIX}.generate.demo.globex")).text == " 42"
    for stream in (first, second):
        assert (await stream.terminal())["finish_reason"] == "length"
    assert (await bare.ask(short, subject=f"{PREFIX}.generate.demo.acme")).text == " 42"
    for tenant in ("slow", "wordy"):
        fields = short | ({"max_tokens": 60} if tenant == "wordy" else {})
        asked = [await bare.ask(fields, subject=f"{PREFIX}.generate.demo.{tenant}") for _ in range(4)]
        first, *later = [one.terminals[0] for one in asked]
        assert first["finish_reason"] != "error"
        refused = [one["error"] for one in later if one["finish_reason"] == "error"]
        assert len(refused) >= 2  # in the next four seconds there is room for the beginning of another one
        for error in refused:
            assert error["code"] == "overloaded"
            assert 0 < error["retry_after_ms"] <= 100_000
