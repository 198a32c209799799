"""Recorded outputs of nine families of models are read right, and every miss has its reason."""

from __future__ import annotations

import functools

import pytest
from canitoolcall.results import Status

from tests.worker.chat_format.recorded.score import MODES, RECORDED, cases, check


@functools.cache
def missed(mode: str) -> frozenset[str]:
    """Returns the outputs that are not read as the suite expects, by its own checks and in all its ways to cut."""
    return frozenset(
        fixture.id
        for fixture, family in cases()
        if check(fixture, family, hold_calls=MODES[mode])[0] is not Status.PASS
    )


@pytest.mark.parametrize("mode", MODES)
def test_every_output_that_is_not_read_right_has_a_reason(mode: str) -> None:
    assert missed(mode) == set(RECORDED[mode].misses)
    assert all(RECORDED[mode].misses.values())


@pytest.mark.parametrize("mode", MODES)
def test_as_many_outputs_are_read_right_as_recorded(mode: str) -> None:
    assert len(cases()) - len(missed(mode)) == RECORDED[mode].right


def test_calls_that_go_out_as_they_come_are_only_missed_where_they_do_not_become_complete() -> None:
    families = {fixture.id: fixture for fixture, _ in cases()}
    more = missed("streamed") - missed("held")
    assert all({"truncated", "malformed"} & set(families[one].tags) for one in more)
