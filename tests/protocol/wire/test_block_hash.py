"""Block hashes follow the contract's formula, which is written down here a second time and fixed by vectors."""

import json
import re
import struct
from pathlib import Path
from typing import TypedDict

import pytest
import xxhash
from hypothesis import assume, given
from hypothesis import strategies as st

from tests.support.block_hashes import block_hashes
from tokenbus.protocol.wire import limits
from tokenbus.protocol.wire.block_hash import (
    Adapter,
    PrefixDomain,
    pack_token_ids,
    root_hash,
    unpack_token_ids,
)


class AdapterVector(TypedDict):
    name: str
    scale: float


class Vector(TypedDict):
    what: str
    fingerprint: str
    adapters: list[AdapterVector]
    tenant: str
    cache_salt: str
    block_size: int
    token_ids: list[int]
    root: str
    blocks: list[str]


VECTORS: list[Vector] = json.loads((Path(__file__).parent / "block_vectors.json").read_text(encoding="utf-8"))
TOKEN_IDS = st.integers(0, limits.MAX_TOKEN_ID)
NAMES = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=16)
DOMAINS = st.builds(
    PrefixDomain,
    fingerprint=st.text("0123456789abcdef", max_size=16),
    adapters=st.lists(
        st.builds(Adapter, NAMES, st.floats(0, 4, allow_subnormal=False)),
        max_size=3,
        unique_by=lambda adapter: adapter.digest,
    ).map(tuple),
    tenant=st.one_of(st.just(""), NAMES),
    cache_salt=st.one_of(st.just(""), NAMES),
)
ROOT = root_hash(PrefixDomain("model"))


def domain_of(vector: Vector) -> PrefixDomain:
    return PrefixDomain(
        fingerprint=vector["fingerprint"],
        adapters=tuple(Adapter(adapter["name"], adapter["scale"]) for adapter in vector["adapters"]),
        tenant=vector["tenant"],
        cache_salt=vector["cache_salt"],
    )


def token_form(name: str) -> str:
    return "".join(
        chr(byte) if re.match(rb"[A-Za-z0-9_-]", bytes([byte])) else f"={byte:02X}" for byte in name.encode()
    )


def root_by_the_contract(domain: PrefixDomain) -> int:
    scales = {adapter.digest: json.dumps(float(adapter.scale)).removesuffix(".0") for adapter in domain.adapters}
    adapters = ",".join(f"{token_form(name)}={scales[name]}" for name in sorted(scales))
    text = (
        domain.fingerprint + "\0" + adapters + "\0" + token_form(domain.tenant) + "\0" + token_form(domain.cache_salt)
    )
    return xxhash.xxh3_64_intdigest(text.encode("utf-8"), seed=0)


def blocks_by_the_contract(token_ids: list[int], block_size: int, parent: int) -> list[int]:
    hashes = [parent]
    for number in range(len(token_ids) // block_size):
        block = token_ids[number * block_size : (number + 1) * block_size]
        hashes.append(xxhash.xxh3_64_intdigest(struct.pack(f"<Q{block_size}I", hashes[-1], *block), seed=0))
    return hashes[1:]


@pytest.mark.parametrize("vector", VECTORS, ids=lambda vector: vector["what"])
def test_the_published_vectors_hold(vector: Vector) -> None:
    root = root_hash(domain_of(vector))
    hashes = block_hashes(vector["token_ids"], vector["block_size"], root)
    assert f"{root:016x}" == vector["root"]
    assert [f"{value:016x}" for value in hashes] == vector["blocks"]


@pytest.mark.parametrize("vector", VECTORS, ids=lambda vector: vector["what"])
def test_the_published_vectors_are_the_contract_s_formula(vector: Vector) -> None:
    root = root_by_the_contract(domain_of(vector))
    assert f"{root:016x}" == vector["root"]
    hashes = blocks_by_the_contract(vector["token_ids"], vector["block_size"], root)
    assert [f"{value:016x}" for value in hashes] == vector["blocks"]


def test_the_vectors_have_different_roots_wherever_their_domains_differ() -> None:
    domains = {(v["fingerprint"], str(v["adapters"]), v["tenant"], v["cache_salt"]): v["root"] for v in VECTORS}
    assert len(domains) > 10
    assert len(set(domains.values())) == len(domains)


@given(DOMAINS)
def test_every_root_is_the_contract_s_formula(domain: PrefixDomain) -> None:
    assert root_hash(domain) == root_by_the_contract(domain)


@given(st.lists(TOKEN_IDS, max_size=40), st.integers(1, 8), st.integers(0, 2**64 - 1))
def test_every_block_is_the_contract_s_formula(token_ids: list[int], block_size: int, parent: int) -> None:
    assert block_hashes(token_ids, block_size, parent) == blocks_by_the_contract(token_ids, block_size, parent)


@given(st.lists(TOKEN_IDS, max_size=20), st.lists(TOKEN_IDS, max_size=20), st.lists(TOKEN_IDS, max_size=20))
def test_prompts_share_exactly_the_blocks_of_their_common_prefix(
    common: list[int], one: list[int], other: list[int]
) -> None:
    first, second = common + one, common + other
    shared = 0
    while shared < min(len(first), len(second)) and first[shared] == second[shared]:
        shared += 1
    pairs = zip(block_hashes(first, 4, ROOT), block_hashes(second, 4, ROOT), strict=False)
    assert sum(left == right for left, right in pairs) == shared // 4


@given(st.integers(0, 40), st.integers(1, 8))
def test_only_full_blocks_have_a_hash(length: int, block_size: int) -> None:
    assert len(block_hashes(list(range(length)), block_size, ROOT)) == length // block_size


@given(DOMAINS, DOMAINS)
def test_different_domains_have_different_roots(one: PrefixDomain, other: PrefixDomain) -> None:
    assume(set(one.adapters) != set(other.adapters) or one._replace(adapters=()) != other._replace(adapters=()))
    assert root_hash(one) != root_hash(other)


@given(DOMAINS)
def test_each_part_of_a_domain_counts(domain: PrefixDomain) -> None:
    extra = Adapter("one more than the names above may have", 1.0)
    changed = [
        domain._replace(fingerprint=domain.fingerprint + "0"),
        domain._replace(adapters=(*domain.adapters, extra)),
        domain._replace(tenant=domain.tenant + "0"),
        domain._replace(cache_salt=domain.cache_salt + "0"),
    ]
    assert len({root_hash(domain), *map(root_hash, changed)}) == 5


@given(DOMAINS)
def test_the_order_in_which_adapters_are_named_does_not_count(domain: PrefixDomain) -> None:
    assert root_hash(domain._replace(adapters=domain.adapters[::-1])) == root_hash(domain)


def test_what_stands_in_one_part_is_not_the_same_in_another() -> None:
    assert root_hash(PrefixDomain("f", tenant="a")) != root_hash(PrefixDomain("f", cache_salt="a"))
    assert root_hash(PrefixDomain("f", tenant="a\0b")) != root_hash(PrefixDomain("f", tenant="a", cache_salt="b"))
    one = PrefixDomain("f", (Adapter("a=1,b", 1.0),))
    two = PrefixDomain("f", (Adapter("a", 1.0), Adapter("b", 1.0)))
    assert root_hash(one) != root_hash(two)


def test_the_longest_salt_that_a_request_may_have_has_a_root() -> None:
    domain = PrefixDomain("f", cache_salt="s" * limits.MAX_SALT_BYTES)
    assert root_hash(domain) == root_by_the_contract(domain)


@given(st.lists(TOKEN_IDS, max_size=40))
def test_token_ids_are_sent_as_32_bit_little_endian_integers_and_come_back(token_ids: list[int]) -> None:
    assert pack_token_ids(token_ids) == struct.pack(f"<{len(token_ids)}I", *token_ids)
    assert unpack_token_ids(pack_token_ids(token_ids)).tolist() == token_ids


@pytest.mark.parametrize("length", [1, 2, 3, 5])
def test_bytes_that_are_no_whole_ids_are_refused(length: int) -> None:
    with pytest.raises(ValueError):
        unpack_token_ids(b"\0" * length)


@pytest.mark.parametrize("token_id", [-1, limits.MAX_TOKEN_ID + 1])
def test_an_id_that_does_not_fit_is_refused(token_id: int) -> None:
    with pytest.raises(OverflowError):
        pack_token_ids([token_id])
