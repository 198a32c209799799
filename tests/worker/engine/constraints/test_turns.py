"""Tenants take turns, whatever each has waiting."""

from hypothesis import given
from hypothesis import strategies as st

from tokenbus.worker.engine.constraints.compilation import TenantTurns


def test_each_tenant_has_a_turn_before_the_first_has_its_next() -> None:
    turns: TenantTurns[int] = TenantTurns()
    for number, tenant in enumerate("aaabbc"):
        turns.add(tenant, number)
    assert [turns.take() for _ in range(7)] == [
        ("a", 0), ("b", 3), ("c", 5), ("a", 1), ("b", 4), ("a", 2), None
    ]  # fmt: skip


def test_a_tenant_that_has_enough_is_passed_over() -> None:
    turns: TenantTurns[int] = TenantTurns()
    turns.add("a", 1)
    assert turns.take(without={"a"}) is None
    turns.add("b", 2)
    assert turns.take(without={"a"}) == ("b", 2)
    assert turns.take() == ("a", 1)


@given(st.lists(st.sampled_from("abc")), st.sets(st.integers(0, 9)))
def test_what_is_taken_is_what_was_added_and_not_removed(tenants: list[str], unwanted: set[int]) -> None:
    turns: TenantTurns[int] = TenantTurns()
    for number, tenant in enumerate(tenants):
        turns.add(tenant, number)
    turns.remove(lambda number: number in unwanted)
    taken = []
    while (found := turns.take()) is not None:
        assert tenants[found[1]] == found[0]
        taken.append(found[1])
    assert sorted(taken) == [number for number in range(len(tenants)) if number not in unwanted]
    assert len(turns) == 0
