"""An engine that replaces a killed one has its sizes, and streams as long as the context go on in it."""

import os
import signal
from pathlib import Path

import pytest

from tests.architectures import tiny_model
from tests.support.exact_client import until_ready
from tests.support.raw_client import check_stream
from tests.support.system import System

KILLS = 2
SIZES = ("context_length", "max_num_seqs", "kv_block_size", "total_kv_blocks")


@pytest.mark.parametrize(
    ("architecture", "settings"),
    [
        pytest.param("gemma3", (), marks=pytest.mark.long),
        pytest.param("gpt-oss", ("--replicas", "1", "--kv-budget", "8"), marks=pytest.mark.long),
        ("jamba", ("--kv-tokens", "512", "--max-num-seqs", "2")),
    ],
    ids=["windows", "windows in a budget", "a hybrid with less memory than its context"],
)
async def test_an_engine_that_replaces_a_killed_one_has_its_sizes(
    system: System, tmp_path: Path, architecture: str, settings: tuple[str, ...]
) -> None:
    path = tmp_path / "tiny.gguf"
    tiny_model.write(path, architecture)
    system.router("router")
    system.worker("worker", *settings, model=str(path))
    bare = await system.connect()
    (first,) = await until_ready(bare, 1)
    longest = {"prompt": "Once", "max_tokens": first["context_length"] - 8, "ignore_eos": True, "temperature": 0}
    answer = await bare.generate(longest)
    card = first
    for number in range(KILLS):
        await answer.until(50 + 100 * number)
        killed = card["pids"]["engine"]
        os.kill(killed, signal.SIGKILL)
        while card["pids"]["engine"] in (0, killed):
            (card,) = await until_ready(bare, 1)
        assert {name: card[name] for name in SIZES} == {name: first[name] for name in SIZES}
    terminal = await answer.terminal(timeout_s=60)
    assert terminal["finish_reason"] == "length", terminal
    assert terminal["usage"]["completion_tokens"] == longest["max_tokens"]
    check_stream(answer)
