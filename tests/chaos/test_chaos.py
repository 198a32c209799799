"""The short form of `make chaos`: a few faults of each kind, one after the other, on small systems."""

from itertools import chain
from pathlib import Path

import msgspec
import pytest

from tests.chaos.plans import Fault, faults
from tests.chaos.results import Record
from tests.chaos.round import Setup, broken_promises, play

SEED = 7


def few(kind: str, count: int, away_s: float = 2.5) -> list[Fault]:
    """Returns faults that come soon and are soon over, but last long enough for a frontend to fence itself."""
    soon = {"after_s": 0.1, "pause_s": 1.8, "away_s": away_s, "between_s": 1.3}
    return [msgspec.structs.replace(fault, **soon) for fault in faults(kind, SEED, count)]


async def played(folder: Path, *kinds: list[Fault], num_tokens: int = 100, num_http: int = 0) -> Record:
    """Plays faults under the rules of the first one's kind, and checks that every client had streams that ended
    well."""
    chosen, num_gateways = list(chain(*kinds)), 2 if num_http else 0
    setup = Setup(
        engine="sim", num_workers=2, num_tokens=num_tokens, step_ms=15.0, num_gateways=num_gateways, num_http=num_http
    )
    record = await play(chosen[0].kind, SEED, setup, chosen, folder)
    assert broken_promises(record) == [], record.notes
    assert record.faults == len(chosen)
    assert all(ends.well for ends in record.ends.values()), record.ends
    return record


async def test_no_byte_is_lost_or_repeated_when_processes_die_and_stand_still(tmp_path: Path) -> None:
    record = await played(tmp_path, few("kill_worker", 1), few("pause_worker", 1), few("pause_router", 1))
    assert record.gaps_ms


@pytest.mark.long
async def test_a_broker_that_dies_and_returns_costs_the_library_no_byte_and_hangs_nobody(tmp_path: Path) -> None:
    await played(tmp_path, few("restart_broker", 1, away_s=0.0), few("restart_broker", 1))


@pytest.mark.long
async def test_drains_and_a_roll_of_everything_cut_nothing(tmp_path: Path) -> None:
    assert (await played(tmp_path, few("drain_worker", 5), few("roll", 1), num_http=4)).gaps_ms


@pytest.mark.long
async def test_a_router_that_has_died_before_a_worker_costs_its_streams_nothing(tmp_path: Path) -> None:
    assert (await played(tmp_path, few("kill_router_then_worker", 1), num_tokens=200)).gaps_ms
