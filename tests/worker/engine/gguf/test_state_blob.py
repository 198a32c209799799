"""A blob on which llama.cpp would abort is refused before llama.cpp sees a byte of it."""

import random
import struct
from collections.abc import Iterator

import msgspec
import pytest

from tests.architectures import tiny_model
from tests.support.engines import DEMO, gguf_runner
from tokenbus.worker.engine.gguf import probe, state_blob
from tokenbus.worker.engine.gguf.runner import GgufRunner
from tokenbus.worker.engine.gguf.state_blob import StateFormat
from tokenbus.worker.kv_exchange import fetcher

MUTATIONS = 10_000


@pytest.fixture(
    scope="module",
    params=[("on", "f16", ""), ("off", "f16", ""), ("on", "q8_0", ""), ("on", "f16", "qwen2vl")],
    ids=str,
)
def runner(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[GgufRunner]:
    """A runner whose lane 0 holds 40 tokens, of the demo model or of a tiny one of an architecture."""
    flash, cache_type, architecture = request.param
    changes = {"flash_attention": flash, "cache_type_k": cache_type, "cache_type_v": cache_type}
    if architecture:
        path = tmp_path_factory.mktemp("model") / "tiny.gguf"
        tiny_model.write(path, architecture)
        changes["model"] = str(path)
    one = gguf_runner(msgspec.structs.replace(DEMO, **changes))
    assert one._context is not None
    assert probe._decode(one._context, list(range(40)), 0, 1) is not None
    yield one
    one.close()


def blob_of(runner: GgufRunner, start: int, end: int) -> bytes:
    return bytes(runner.lanes.save(0, start, end))


def format_of(runner: GgufRunner) -> StateFormat:
    found = state_blob.learn(blob_of(runner, 0, 16), 0, 16, runner.config.vocab_size)
    assert found is not None
    return found


@pytest.mark.parametrize(("start", "end"), [(0, 1), (0, 16), (16, 32), (5, 40), (39, 40)])
def test_a_blob_of_its_own_is_fine_wherever_it_begins_and_however_long_it_is(
    runner: GgufRunner, start: int, end: int
) -> None:
    blob, known = blob_of(runner, start, end), format_of(runner)
    assert known.size(end - start) == len(blob)
    assert known.problem(blob, start, end - start) == ""
    assert known.problem(memoryview(blob), start, end - start) == ""


def test_a_blob_at_another_place_or_of_another_length_is_noticed(runner: GgufRunner) -> None:
    blob, known = blob_of(runner, 16, 32), format_of(runner)
    assert known.problem(blob, 17, 16) == "positions"
    assert known.problem(blob, 0, 16) == "positions"
    assert known.problem(blob, 16, 15) == "size"
    assert known.problem(blob[:-1], 16, 16) == "size"
    assert known.problem(blob + b"\0", 16, 16) == "size"
    assert known.problem(b"", 16, 16) == "size"


def test_cells_may_lie_in_any_order(runner: GgufRunner) -> None:
    blob, known = bytearray(blob_of(runner, 0, 16)), format_of(runner)
    size = 4 * len(known.cell)
    first, second = slice(16, 16 + size), slice(16 + size, 16 + 2 * size)
    blob[first], blob[second] = blob[second], blob[first]
    assert known.problem(bytes(blob), 0, 16) == ""
    blob[first] = blob[second]
    assert known.problem(bytes(blob), 0, 16) == "positions"


def framing(known: StateFormat, count: int) -> list[int]:
    """The places of all bytes that are no tensor's data, and of no token's id, which may be another."""
    offset = 16 + 4 * len(known.cell) * count + 8
    places = [
        place
        for place in range(offset)
        if not 16 <= place < offset - 8 or known.cell[(place - 16) // 4 % len(known.cell)] != "T"
    ]
    for tensor in known.tensors:
        places += range(offset, offset + len(tensor.framing))
        offset += len(tensor.framing) + tensor.bytes_per_token * count
    return places


def test_every_changed_byte_of_the_framing_is_noticed(runner: GgufRunner) -> None:
    blob, known = blob_of(runner, 16, 32), format_of(runner)
    places = framing(known, 16)
    choose = random.Random(3)
    for number in range(MUTATIONS):
        changed = bytearray(blob)
        place = places[number % len(places)]
        changed[place] ^= choose.randint(1, 255)
        assert known.problem(bytes(changed), 16, 16), place


def test_a_token_that_the_vocabulary_does_not_have_is_noticed(runner: GgufRunner) -> None:
    blob, known = blob_of(runner, 0, 16), format_of(runner)
    if "T" not in known.cell:
        pytest.skip("its cells have no token ids")
    at = 16 + 4 * known.cell.index("T")
    assert struct.unpack_from("<i", blob, at) == (0,)
    for token_id, problem in (
        (runner.config.vocab_size - 1, ""),
        (runner.config.vocab_size, "positions"),
        (-1, "positions"),
    ):
        changed = blob[:at] + struct.pack("<i", token_id) + blob[at + 4 :]
        assert known.problem(changed, 0, 16) == problem
        block_problem = fetcher.block_problem(known.block_format(16), changed, 0)
        assert bool(block_problem) == bool(problem), block_problem


def test_noise_and_pieces_of_blobs_are_noticed(runner: GgufRunner) -> None:
    blob, known = blob_of(runner, 0, 16), format_of(runner)
    choose = random.Random(5)
    for _ in range(1_000):
        cut = choose.randrange(1, len(blob))
        assert known.problem(blob[:cut], 0, 16)
        assert known.problem(blob[cut:] + blob[:cut], 0, 16)
        assert known.problem(choose.randbytes(len(blob)), 0, 16)


def test_an_unknown_format_is_not_learned() -> None:
    assert state_blob.learn(b"", 0, 1, 9) is None
    assert state_blob.learn(bytes(200), 0, 16, 9) is None
    assert state_blob.learn(struct.pack("<8sII", b"", 1, 0) + bytes(20), 0, 0, 9) is None


TYPES = ("f32", "f16", "bf16", "q8_0", "q5_1", "q5_0", "q4_1", "q4_0")
UNSCALED = {"f32": b"\0\0\x80\x7f", "bf16": b"\x80\x7f"}
"""Infinity where it is not one of 16 bits."""


@pytest.mark.parametrize("cache_type", TYPES)
def test_a_single_key_or_value_that_is_no_number_is_found_in_every_layer(cache_type: str) -> None:
    changes = {"cache_type_k": cache_type, "cache_type_v": cache_type, "flash_attention": "on"}
    runner = gguf_runner(msgspec.structs.replace(DEMO, **changes))
    assert runner._context is not None
    assert probe._decode(runner._context, list(range(40)), 0, 1) is not None
    blob, known = blob_of(runner, 5, 37), format_of(runner)
    assert known.problem(blob, 5, 32) == ""
    offset = 16 + 12 * 32 + 8
    for tensor in known.tensors:
        poisoned, place = bytearray(blob), offset + len(tensor.framing)
        infinity = UNSCALED.get(cache_type, b"\x00\x7c")
        poisoned[place : place + len(infinity)] = infinity
        assert known.problem(poisoned, 5, 32) == "numbers"
        offset = place + tensor.bytes_per_token * 32
    runner.close()


def test_a_value_that_is_no_number_is_found_where_values_lie_by_channel() -> None:
    runner = gguf_runner(msgspec.structs.replace(DEMO, flash_attention="off"))
    assert runner._context is not None
    assert probe._decode(runner._context, list(range(40)), 0, 1) is not None
    blob, known = bytearray(blob_of(runner, 0, 40)), format_of(runner)
    assert known.is_transposed
    assert known.problem(blob, 0, 40) == ""
    blob[-2:] = b"\x00\xfe"
    assert known.problem(blob, 0, 40) == "numbers"
    runner.close()


def test_tokens_that_were_restored_are_saved_again_as_they_were(runner: GgufRunner) -> None:
    blob = runner.lanes.save(0, 0, 16)
    runner.lanes.restore(blob, 1, 0, 16)
    again = bytes(runner.lanes.save(1, 0, 16))
    assert format_of(runner).problem(again, 0, 16) == ""
    assert again == bytes(blob)
