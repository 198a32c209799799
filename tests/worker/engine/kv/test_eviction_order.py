"""Blocks that nobody came back for go first, and of those that were continued no more than a fifth is kept longer."""

from collections.abc import Iterable

from hypothesis import given
from hypothesis import strategies as st

from tokenbus.worker.engine.kv.eviction_order import EvictionOrder
from tokenbus.worker.engine.kv.prefix_tree import Block


def blocks(continued: Iterable[bool]) -> list[Block]:
    made = [Block(None, bytes([number] * 4), 0, number) for number, _ in enumerate(continued)]
    for block, is_continued in zip(made, continued, strict=True):
        block.is_continued = is_continued
    return made


def test_those_that_were_continued_go_last() -> None:
    order = EvictionOrder(10)
    first, kept, second = made = blocks([False, True, False])
    for block in made:
        order.add(block)
    assert list(order) == [first, second, kept]
    assert order.first is first
    order.put_first(kept)
    assert list(order) == [kept, first, second]


def test_the_oldest_of_too_many_comes_behind_those_that_were_seen_once() -> None:
    order = EvictionOrder(10)
    made = blocks([True, True, False, True])
    for block in made:
        order.add(block)
    assert list(order) == [made[2], made[0], made[1], made[3]]
    order.add(made[0])
    assert list(order) == [made[2], made[1], made[3], made[0]]


@given(st.integers(0, 12), st.lists(st.booleans(), min_size=1, max_size=12), st.data())
def test_it_holds_what_was_added_and_not_removed_in_an_order_without_surprises(
    capacity: int, continued: list[bool], data: st.DataObject
) -> None:
    order, made, expected = EvictionOrder(capacity), blocks(continued), set[Block]()
    for _ in range(30):
        block = data.draw(st.sampled_from(made))
        match data.draw(st.sampled_from(["add", "remove", "first"])):
            case "add":
                order.add(block)
                expected.add(block)
                later = list(order)[list(order).index(block) + 1 :]
                assert all(one.is_continued and not block.is_continued for one in later)
            case "remove":
                assert order.remove(block) == (block in expected)
                expected.discard(block)
            case "first":
                order.put_first(block)
                expected.add(block)
                assert order.first is block
        assert len(order) == len(expected) == len(list(order))
        assert set(order) == expected == {one for one in made if one in order}
