"""The tree finds a prefix by its tokens alone, and hashes it as the wire does."""

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.block_hashes import block_hashes
from tokenbus.protocol.wire import block_hash
from tokenbus.worker.engine.kv.prefix_tree import Block, Domain, PrefixTree

SIZE = 4
TOKENS = st.lists(st.sampled_from([0, 1, 255, 256, 65_536, 2**32 - 1]), max_size=6)


def tree() -> PrefixTree:
    return PrefixTree(SIZE, "f")


def tokens(text: str | Sequence[int]) -> bytes:
    """The token ids of a text as bytes, one for each character."""
    return block_hash.pack_token_ids([ord(one) for one in text] if isinstance(text, str) else text)


def chain(tree: PrefixTree, *texts: str, domain: Domain = Domain()) -> list[Block]:  # noqa: B008
    """Inserts blocks one behind the other."""
    made: list[Block] = []
    for text in texts:
        made.append(tree.insert(made[-1] if made else tree.make_root(domain), tokens(text)))
    return made


def naive_common(one: Sequence[int], other: Sequence[int]) -> int:
    count = 0
    while count < min(len(one), len(other)) and one[count] == other[count]:
        count += 1
    return count


@given(one=TOKENS, other=TOKENS, both=TOKENS)
def test_the_number_of_common_tokens_is_that_of_a_count_one_by_one(
    one: list[int], other: list[int], both: list[int]
) -> None:
    assert block_hash.num_common_tokens(tokens(both + one), tokens(both + other)) == naive_common(
        both + one, both + other
    )


@given(
    known=st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=SIZE), max_size=12, unique_by=tuple),
    wanted=st.lists(st.integers(0, 3), max_size=SIZE),
)
def test_the_longest_match_has_the_most_leading_tokens_in_common(known: list[list[int]], wanted: list[int]) -> None:
    one = tree()
    root = one.make_root(Domain())
    for ids in known:
        one.insert(root, tokens(ids))
    found = root.longest_match(tokens(wanted))
    most = max((naive_common(ids, wanted) for ids in known), default=0)
    if not most:
        assert found is None
    else:
        assert found is not None
        child, count = found
        assert count == most == block_hash.num_common_tokens(child.tokens, tokens(wanted))


def test_a_removed_child_is_not_found() -> None:
    one = tree()
    (child,) = chain(one, "abcd")
    root = one.make_root(Domain())
    assert root.longest_match(tokens("abxx")) == (child, 2)
    one.remove(child)
    assert root.longest_match(tokens("abxx")) is None


def test_children_that_are_proper_prefixes_are_found_shortest_first() -> None:
    one = tree()
    root = one.make_root(Domain())
    a, abc, _, _ = (one.insert(root, tokens(text)) for text in ("a", "abc", "abcd", "b"))
    assert root.proper_prefixes(tokens("abcd")) == [a, abc]
    assert root.proper_prefixes(tokens("a")) == []


def test_a_block_has_the_chained_hash_and_a_partial_block_has_none() -> None:
    domain = Domain("acme", "salt", (block_hash.Adapter("lora", 0.5),))
    one, two, tail = chain(tree(), "abcd", "efgh", "ij", domain=domain)
    root = block_hash.root_hash(block_hash.PrefixDomain("f", domain.adapters, "acme", "salt"))
    assert [one.hash, two.hash] == block_hashes([ord(letter) for letter in "abcdefgh"], SIZE, root)
    assert tail.hash == 0


def test_a_block_knows_its_position() -> None:
    made = chain(tree(), "abcd", "efgh", "ij")
    assert [(block.start, block.end) for block in made] == [(0, 4), (4, 8), (8, 10)]
    assert list(made[2].path()) == made[::-1]


def test_only_a_block_is_full() -> None:
    one = tree()
    assert [one.is_full(block) for block in chain(one, "abcd", "efg")] == [True, False]


def test_descendants_come_deepest_first() -> None:
    one = tree()
    first, second = chain(one, "abcd", "efgh")
    third, other = one.insert(second, tokens("ij")), one.insert(first, tokens("kl"))
    assert list(first.descendants()) == [third, other, second]
    assert list(one.all_blocks()) == [third, other, second, first]


def test_equal_tokens_of_other_domains_are_other_blocks() -> None:
    one = tree()
    domains = [Domain("a"), Domain("b"), Domain("a", "s"), Domain("a", "", (block_hash.Adapter("x", 1.0),))]
    made = [chain(one, "abcd", domain=domain)[0] for domain in domains]
    assert len({block.hash for block in made}) == len({one.make_root(domain).hash for domain in domains}) == 4
    assert set(one.all_blocks()) == set(made)


def test_a_root_is_removed_with_its_last_block_and_its_last_user() -> None:
    one = tree()
    (child,) = chain(one, "abcd")
    root = one.make_root(Domain())
    root.ref_count = 1
    one.prune(root)
    one.remove(child)
    one.prune(root)
    assert one.make_root(Domain()) is root
    root.ref_count = 0
    one.prune(root)
    assert one.make_root(Domain()) is not root


def test_equal_tokens_cannot_follow_a_block_twice() -> None:
    one = tree()
    chain(one, "abcd")
    with pytest.raises(AssertionError):
        chain(one, "abcd")


@pytest.mark.parametrize(("lanes", "lane"), [(0b1, 0), (0b100, 2), (0b1100, 2)])
def test_a_block_names_one_of_the_lanes_that_carry_it(lanes: int, lane: int) -> None:
    (block,) = chain(tree(), "abcd")
    assert not block.lanes
    block.lanes = lanes
    assert block.any_lane == lane


def test_a_block_that_no_lane_carries_has_none_to_name() -> None:
    (block,) = chain(tree(), "abcd")
    with pytest.raises(AssertionError):
        block.any_lane  # noqa: B018
