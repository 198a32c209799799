"""Slots hold whole copies or nothing, whenever the engine that writes them dies and whatever becomes of the region."""

import os
import random
import struct
from array import array
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tokenbus.worker.contract.engine_errors import DeviceError
from tokenbus.worker.engine.host_cache import slot_store, slots
from tokenbus.worker.engine.host_cache.slot_store import RegionError, SlotStore
from tokenbus.worker.engine.host_cache.slots import SlotHeader, SlotLayout
from tokenbus.worker.engine.kv.pool import BlockPool
from tokenbus.worker.engine.kv.prefix_tree import Block, BlockLabel, Domain, PrefixTree

BLOCK = 4
TOKEN_BYTES = 10
LAYOUT = SlotLayout(BLOCK, BLOCK * TOKEN_BYTES, 6)
MUTATIONS = int(os.environ.get("TOKENBUS_MUTATIONS", "10000"))


def find_problem(data: memoryview, start: int, count: int) -> str:
    return "" if len(data) == count * TOKEN_BYTES else "size"


def make_store(fd: int, identity: str = "model", layout: SlotLayout = LAYOUT) -> SlotStore:
    store = SlotStore(identity, layout, find_problem)
    store.open(os.dup(fd))
    return store


def path_of(texts: list[str], tenant: str = "acme") -> list[Block]:
    """Blocks of a prefix, each behind the one before."""
    tree = PrefixTree(BLOCK, "f")
    block: Block = tree.make_root(Domain(tenant))
    path = []
    for text in texts:
        block = tree.insert(block, array("I", map(ord, text)).tobytes())
        path.append(block)
    return path


def data_of(block: Block, salt: int = 0) -> bytes:
    count = len(block.tokens) // 4
    return random.Random(f"{block.digest.hex()} {salt}").randbytes(count * TOKEN_BYTES)


@pytest.fixture
def region() -> Iterator[int]:
    fd = os.memfd_create("test")
    yield fd
    os.close(fd)


def test_what_was_sealed_is_found_by_the_next_store_the_oldest_first(region: int) -> None:
    first = make_store(region)
    path = path_of(["aaaa", "bbbb", "cc"])
    for number, block in enumerate(path, start=1):
        first.write(number, data_of(block))
    first.seal([(2, path[1].label()), (1, path[0].label()), (3, path[2].label())])
    first.close()
    second = make_store(region)
    assert [label for _, label in second.recovered] == [path[1].label(), path[0].label(), path[2].label()]
    for (copy_id, _), block in zip(second.recovered, (path[1], path[0], path[2]), strict=True):
        assert bytes(second.read(copy_id)) == data_of(block)
    assert (second.recovery.blocks, second.recovery.num_bytes) == (3, 10 * TOKEN_BYTES)
    second.close()


def test_a_copy_that_is_not_sealed_is_not_found(region: int) -> None:
    first = make_store(region)
    (block,) = path_of(["aaaa"])
    first.write(1, data_of(block))
    assert bytes(first.read(1)) == data_of(block)
    first.close()
    assert not make_store(region).recovered


def test_a_discarded_copy_is_not_found_and_its_slot_is_used_again(region: int) -> None:
    first = make_store(region)
    (block,) = path_of(["aaaa"])
    for number in range(1, 20):
        first.write(number, data_of(block))
        first.seal([(number, block.label())])
        first.discard(number)
    assert len(first) == 0
    assert not make_store(region).recovered


def test_copies_that_were_sealed_after_a_number_are_discarded_and_found_by_no_store(region: int) -> None:
    store, (one, two, three) = make_store(region), path_of(["once", "upon", "a"])
    for copy_id, block in enumerate((one, two), start=1):
        store.write(copy_id, data_of(block))
        store.seal([(copy_id, block.label())])
    number = store.last_number
    store.write(3, data_of(three))
    store.seal([(3, three.label())])
    store.discard_after(number)
    again = make_store(region)
    assert [label for _, label in again.recovered] == [one.label(), two.label()]
    assert again.last_number == number
    again.discard_after(1)
    assert len(make_store(region).recovered) == 1


def test_zeroing_leaves_nothing_of_what_is_not_held(region: int) -> None:
    first = make_store(region)
    one, two = path_of(["aaaa", "bbbb"])
    for number, block in enumerate((one, two), start=1):
        first.write(number, data_of(block))
        first.seal([(number, block.label())])
    first.discard(2)
    assert data_of(two) in os.pread(region, LAYOUT.region_bytes, 0)
    first.zero()
    left = os.pread(region, LAYOUT.region_bytes, 0)
    assert data_of(two) not in left
    assert two.tokens not in left
    assert data_of(one) in left
    again = make_store(region)
    again.discard(1)
    again.zero()
    assert not any(os.pread(region, LAYOUT.region_bytes, slots.REGION_HEADER_BYTES))


def test_data_that_change_while_they_are_held_are_never_read(region: int) -> None:
    store = make_store(region)
    (block,) = path_of(["aaaa"])
    store.write(1, data_of(block))
    at = os.pread(region, LAYOUT.region_bytes, 0).index(data_of(block))
    os.pwrite(region, b"?", at + 7)
    with pytest.raises(DeviceError, match="changed"):
        store.read(1)
    os.ftruncate(region, at + 3)
    with pytest.raises(DeviceError, match="changed"):
        store.read(1)


@pytest.mark.parametrize(
    "other",
    [
        ("another model", LAYOUT),
        ("model", LAYOUT._replace(block_bytes=50)),
        ("model", LAYOUT._replace(block_size=5)),
    ],
)
def test_a_region_of_another_identity_or_size_is_started_anew(region: int, other: tuple[str, SlotLayout]) -> None:
    first = make_store(region)
    (block,) = path_of(["aaaa"])
    first.write(1, data_of(block))
    first.seal([(1, block.label())])
    identity, layout = other
    second = make_store(region, identity, layout)
    assert not second.recovered
    assert data_of(block) not in os.pread(region, LAYOUT.region_bytes, 0)
    second.write(1, data_of(block))
    second.seal([(1, block.label())])
    assert len(make_store(region, identity, layout).recovered) == 1


def test_a_region_may_get_more_slots_or_fewer(region: int) -> None:
    first, path = make_store(region), path_of(["aaaa", "bbbb", "cccc"])
    for number, block in enumerate(path, start=1):
        first.write(number, data_of(block))
        first.seal([(number, block.label())])
    first.close()
    for num_slots, num_found in ((9, 3), (2, 2), (9, 2)):
        store = make_store(region, layout=LAYOUT._replace(num_slots=num_slots))
        assert len(store.recovered) == num_found
        store.close()


def test_a_file_of_something_else_is_started_anew(region: int) -> None:
    os.pwrite(region, b"alias ll='ls -l'\n" * 1_000, 0)
    assert not make_store(region).recovered
    assert b"alias" not in os.pread(region, LAYOUT.region_bytes, 0)


def test_a_region_whose_making_was_cut_off_is_made_anew(region: int) -> None:
    os.ftruncate(region, 12_345)
    store = make_store(region)
    (block,) = path_of(["aaaa"])
    store.write(1, data_of(block))
    store.seal([(1, block.label())])
    assert len(make_store(region).recovered) == 1


def test_a_disk_without_room_is_a_typed_error(tmp_path: object, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_room(fd: int, offset: int, size: int) -> None:
        raise OSError(28, os.strerror(28))

    monkeypatch.setattr(slot_store.os, "posix_fallocate", no_room)
    fd = os.open(f"{tmp_path}/slots", os.O_RDWR | os.O_CREAT)
    with pytest.raises(RegionError, match=r"no room for 0 MiB .*--host-cache-mib"):
        make_store(fd)
    os.close(fd)


def test_a_file_takes_its_room_at_once(tmp_path: object) -> None:
    fd = os.open(f"{tmp_path}/slots", os.O_RDWR | os.O_CREAT)
    layout = LAYOUT._replace(num_slots=2_000)
    make_store(fd, layout=layout)
    assert os.fstat(fd).st_blocks * 512 >= layout.region_bytes
    os.close(fd)


def label_of(name: str, num_tokens: int) -> BlockLabel:
    """The label of a copy of a checkpoint."""
    (block,) = path_of(["aaaa"])
    return block.label()._replace(tokens=random.Random(name).randbytes(4 * num_tokens))


@given(st.integers(1, 6 * LAYOUT.block_bytes), st.integers(0, 6 * BLOCK))
def test_a_copy_takes_as_many_slots_as_its_data_or_its_tokens_need(num_bytes: int, num_tokens: int) -> None:
    fd = os.memfd_create("test")
    store = SlotStore("model", LAYOUT, lambda *_: "")
    store.open(os.dup(fd))
    data, label = random.Random(num_bytes).randbytes(num_bytes), label_of("x", num_tokens)
    store.write(1, data)
    store.seal([(1, label)])
    assert bytes(store.read(1)) == data
    again = SlotStore("model", LAYOUT, lambda *_: "")
    again.open(fd)
    assert [found for _, found in again.recovered] == [label]
    assert bytes(again.read(1)) == data
    again.discard(1)
    again.write(2, bytes(LAYOUT.num_slots * LAYOUT.block_bytes))
    again.close()


@settings(max_examples=300, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 100), st.integers(1, 10)), max_size=12), st.randoms(use_true_random=False))
def test_after_any_prefix_of_its_writes_only_whole_copies_of_several_slots_are_found(
    steps: list[tuple[int, int]], choose: random.Random
) -> None:
    written: list[tuple[int, bytes]] = []
    known: set[tuple[BlockLabel, bytes]] = set()

    class Recording(SlotStore):
        def _pwrite(self, data: bytes | memoryview, offset: int) -> None:
            written.append((offset, bytes(data)))
            super()._pwrite(data, offset)

    fd = os.memfd_create("written")
    store = Recording("model", LAYOUT, lambda *_: "")
    store.open(fd)
    start = os.pread(fd, LAYOUT.region_bytes, 0)
    held: list[int] = []
    for copy_id, (num_bytes, num_tokens) in enumerate(steps, start=1):
        while LAYOUT.parts(num_bytes, num_tokens) > len(store._free):
            store.discard(held.pop(choose.randrange(len(held))))
        data, label = choose.randbytes(num_bytes), label_of(str(copy_id), num_tokens)
        store.write(copy_id, data)
        store.seal([(copy_id, label)])
        known.add((label, data))
        held.append(copy_id)
    store.close()
    died = bytearray(start)
    for offset, data in written[: choose.randint(0, len(written))]:
        died[offset : offset + len(data)] = data
    fd = os.memfd_create("died")
    os.pwrite(fd, bytes(died), 0)
    found = SlotStore("model", LAYOUT, lambda *_: "")
    found.open(fd)
    for copy_id, label in found.recovered:
        assert (label, bytes(found.read(copy_id))) in known
    found.close()


STEPS = st.lists(st.sampled_from(["write", "seal", "discard", "zero"]), max_size=25)


@settings(max_examples=300, deadline=None)
@given(STEPS, st.randoms(use_true_random=False))
def test_after_any_prefix_of_its_writes_only_whole_slots_are_found(steps: list[str], choose: random.Random) -> None:
    written: list[tuple[int, bytes]] = []
    blocks = path_of(["aaaa", "bbbb", "cccc", "dd"])
    known: set[tuple[BlockLabel, bytes]] = set()

    class Recording(SlotStore):
        def _pwrite(self, data: bytes | memoryview, offset: int) -> None:
            written.append((offset, bytes(data)))
            super()._pwrite(data, offset)

    fd = os.memfd_create("written")
    store = Recording("model", LAYOUT, find_problem)
    store.open(fd)
    start = os.pread(fd, LAYOUT.region_bytes, 0)
    held: dict[int, tuple[Block, bytes]] = {}
    for number, step in enumerate(steps, start=1):
        if step == "write" and len(held) < LAYOUT.num_slots:
            block = choose.choice(blocks)
            held[number] = block, data_of(block, number)
            store.write(number, held[number][1])
        elif step == "zero":
            store.zero()
        elif held:
            copy_id = choose.choice(sorted(held))
            block, data = held[copy_id]
            if step == "seal":
                known.add((block.label(), data))
                store.seal([(copy_id, block.label())])
            else:
                store.discard(copy_id)
                del held[copy_id]
    store.close()
    died = bytearray(start)
    for offset, data in written[: choose.randint(0, len(written))]:
        died[offset : offset + len(data)] = data
    if written:
        offset, data = choose.choice(written)  # this write was under way
        cut = choose.randint(0, len(data))
        died[offset : offset + cut] = data[:cut]
    fd = os.memfd_create("died")
    os.pwrite(fd, bytes(died), 0)
    found = SlotStore("model", LAYOUT, find_problem)
    found.open(fd)
    for copy_id, label in found.recovered:
        assert (label, bytes(found.read(copy_id))) in known
    found.close()


def lie(header: SlotHeader, choose: random.Random) -> SlotHeader:
    """Returns a header that says something else, with a right checksum."""
    label = header.label
    field = choose.choice(["start", "tokens", "parent", "root", "hash", "bytes", "data"])
    noise = choose.randbytes(16)
    match field:
        case "start":
            return header._replace(label=label._replace(start=choose.choice([0, 4, 8, 3, 1 << 31])))
        case "tokens":
            return header._replace(label=label._replace(tokens=noise[: 4 * choose.randint(0, 4)]))
        case "parent":
            return header._replace(label=label._replace(parent_digest=choose.choice([noise, label.root_digest])))
        case "root":
            return header._replace(label=label._replace(root_digest=noise))
        case "hash":
            return header._replace(label=label._replace(root_hash=choose.getrandbits(64)))
        case "bytes":
            return header._replace(num_bytes=choose.choice([0, 1, 39, 41, 1 << 31]))
    return header._replace(data_checksum=choose.getrandbits(64))


def test_no_corrupted_truncated_or_lying_slot_reaches_an_engine(region: int) -> None:
    store = make_store(region)
    path = path_of(["aaaa", "bbbb", "cccc", "dd"])
    for number, block in enumerate(path, start=1):
        store.write(number, data_of(block))
        store.seal([(number, block.label())])
    store.close()
    whole = os.pread(region, LAYOUT.region_bytes, 0)
    right = {block.label(): data_of(block) for block in path}
    choose = random.Random(7)
    discarded = 0
    for _ in range(MUTATIONS):
        image = bytearray(whole)
        offset = LAYOUT.offset(choose.randrange(len(path)))
        kind = choose.choice(["flip", "truncate", "lie", "noise", "copy"])
        if kind == "flip":
            image[offset + choose.randrange(LAYOUT.header_bytes + 8)] ^= 1 << choose.randrange(8)
        elif kind == "truncate":
            del image[choose.randrange(slots.REGION_HEADER_BYTES, len(image)) :]
        elif kind == "noise":
            image[offset : offset + 64] = choose.randbytes(64)
        elif kind == "copy":
            other = LAYOUT.offset(choose.randrange(LAYOUT.num_slots))
            image[other : other + LAYOUT.slot_bytes] = image[offset : offset + LAYOUT.slot_bytes]
        else:
            header = LAYOUT.unpack(bytes(image[offset : offset + LAYOUT.header_bytes]))
            assert header is not None
            lying = lie(header, choose)
            image[offset : offset + LAYOUT.header_bytes] = LAYOUT.pack(lying)
        os.ftruncate(region, 0)
        os.pwrite(region, bytes(image), 0)
        found = make_store(region)
        pool = BlockPool(16, BLOCK, 4, fingerprint="f", host_blocks=LAYOUT.num_slots)
        found.reject(pool.cache.recover(found.recovered))
        pool.check_integrity()
        discarded += sum(found.recovery.discarded.values())
        for copy_id, label in found.recovered:
            if copy_id in found._copies and kind != "lie":
                assert bytes(found.read(copy_id)) == right[label]
        # A sequence with the same prefix takes what is left, and every byte of it is right.
        allocation = pool.allocate(Domain("acme"))
        pool.cache.host.set_limits(offloads=9, onloads=9)
        allocation.reuse_prefix(array("I", map(ord, "aaaabbbbccccddd")), 0)
        for op in pool.cache.ops.take():
            start = op.start  # type: ignore[union-attr]
            block = path[start // BLOCK]
            expected = data_of(block)[: (op.end - start) * TOKEN_BYTES]  # type: ignore[union-attr]
            assert bytes(found.read(op.copy_id))[: len(expected)] == expected  # type: ignore[union-attr]
        found.close()
    assert discarded > MUTATIONS // 2


def test_a_header_is_never_larger_than_its_place() -> None:
    for block_size in (1, 5, 16, 512):
        layout = SlotLayout(block_size, 100, 1)
        assert layout.header_bytes >= struct.calcsize("<QQQIIIIQ16s16s") + 4 * block_size
        assert layout.slot_bytes % 64 == 0
