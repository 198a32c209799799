"""Blocks that are corrupt, truncated, of another form or of another place are told from real ones."""

import functools
import random
import struct

import msgspec
import pytest

from tests.support.engines import DEMO, gguf_runner
from tokenbus.worker.contract.contract import KvBlockFormat
from tokenbus.worker.engine.gguf import probe, state_blob
from tokenbus.worker.kv_exchange.fetcher import block_problem

SIZE = 16


@functools.cache
def llama_blocks(flash_attention: str = "auto") -> tuple[KvBlockFormat, tuple[bytes, ...]]:
    """The form of the demo model's blocks, and its first three."""
    runner = gguf_runner(msgspec.structs.replace(DEMO, flash_attention=flash_attention))
    block_format = runner.config.kv_format
    assert block_format is not None
    assert runner._context is not None
    probe._decode(runner._context, list(range(5, 5 + 3 * SIZE)), 0, 1)
    blocks = tuple(bytes(runner.lanes.save(0, start, start + SIZE)) for start in (0, SIZE, 2 * SIZE))
    runner.close()
    return block_format, blocks


@pytest.mark.parametrize("flash_attention", ["on", "off"])
def test_each_block_of_llama_cpp_is_one_in_its_own_place_only(flash_attention: str) -> None:
    block_format, blocks = llama_blocks(flash_attention)
    for place, block in enumerate(blocks):
        verdicts = [block_problem(block_format, block, SIZE * other) == "" for other in range(4)]
        assert verdicts == [other == place for other in range(4)]


def test_blocks_with_and_without_flash_attention_are_foreign_to_each_other() -> None:
    (with_flash, blocks), (without, others) = llama_blocks("on"), llama_blocks("off")
    assert len(blocks[0]) == len(others[0])
    assert block_problem(with_flash, others[0], 0)
    assert block_problem(without, blocks[0], 0)


def test_of_ten_thousand_bad_blocks_none_passes() -> None:
    block_format, blocks = llama_blocks()
    rng = random.Random(7)
    fixed = [at for offset, expected in block_format.fixed for at in range(offset, offset + len(expected))]
    positions = [at for (offset,) in block_format.positions for at in range(offset, offset + 4)]
    for number in range(10_000):
        block, start = bytearray(blocks[1]), SIZE
        match number % 5:
            case 0:  # a wrong byte in what llama.cpp reads besides the numbers
                at = rng.choice(fixed)
                block[at] ^= rng.randrange(1, 256)
            case 1:  # another place
                at = rng.choice(positions)
                block[at] ^= rng.randrange(1, 256)
            case 2:  # cut short
                del block[rng.randrange(len(block)) :]
            case 3:  # more than a block
                block += rng.randbytes(rng.randrange(1, 64))
            case _:  # bytes of the right number
                block = bytearray(rng.randbytes(len(block)))
        assert block_problem(block_format, bytes(block), start), number


def test_any_numbers_pass_and_tokens_may_be_in_any_order() -> None:
    block_format, blocks = llama_blocks()
    block = bytearray(blocks[0])
    (first,), (second,) = block_format.positions[:2]
    block[first : first + 4], block[second : second + 4] = block[second : second + 4], block[first : first + 4]
    block[-1] ^= 255
    assert block_problem(block_format, bytes(block), 0) == ""


def test_a_position_may_not_come_twice() -> None:
    block_format, blocks = llama_blocks()
    block = bytearray(blocks[0])
    (first,), (second,) = block_format.positions[:2]
    block[first : first + 4] = block[second : second + 4]
    assert block_problem(block_format, bytes(block), 0)


def test_a_state_of_another_form_is_not_learned() -> None:
    _, blocks = llama_blocks()
    state = blocks[0]
    assert state_blob.learn(state, 0, SIZE, 640) is not None
    for at in (8, 12, 20, 24):  # streams, cells, sequences of a cell, a sequence
        changed = state[:at] + struct.pack("<I", 7) + state[at + 4 :]
        assert state_blob.learn(changed, 0, SIZE, 640) is None
    for length in range(0, len(state), 97):
        assert state_blob.learn(state[:length], 0, SIZE, 640) is None
    assert state_blob.learn(state + b"\0", 0, SIZE, 640) is None
