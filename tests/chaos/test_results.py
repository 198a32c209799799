"""Results add up over rounds and runs, and a run continues where the last one stopped."""

from pathlib import Path

import msgspec
import pytest

from tests.chaos import results
from tests.chaos.plans import KINDS
from tests.chaos.reading import UNSEALED, Expected, Failure, Piece, Reading, Usage
from tests.chaos.results import Ends, Record, next_round, percentile, sum_up, violations

KIND = "kill_worker"


def record(kind: str = KIND, seed: int = 0, faults: int = 20, **ends: Ends) -> Record:
    where = {"machine": "m", "commit": "c", "date": "2024-05-01"}
    return Record(kind=kind, seed=seed, engine="sim", faults=faults, ends=ends, **where)


def reading(*pieces: Piece) -> Reading:
    found = Reading(Expected(b"ab", (1, 2)), 0.0)
    for piece in pieces:
        found.add(piece, 1.0)
    return found


def lost() -> Reading:
    return reading(Piece(text="a", tokens=1))


def terminal(reason: str, code: str = "") -> Reading:
    return reading(Piece(finish_reason=reason, error=Failure(code) if code else None))


def test_each_stream_counts_under_the_way_it_ended() -> None:
    ends = Ends()
    well = Piece(text="ab", tokens=2, finish_reason="length", usage=Usage(2))
    ends.add(reading(well), was_accepted=True)
    ends.add(reading(Piece(text="x")), was_accepted=True)
    ends.add(lost(), was_accepted=True)
    ends.add(reading(), was_accepted=False)
    ends.add(reading(Piece(text="b", text_offset=1)), was_accepted=True)
    ends.add(terminal("error", "overloaded"), was_accepted=True)
    ends.add(terminal("error", "overloaded"), was_accepted=True)
    ends.add(terminal("cancelled"), was_accepted=True)
    ends.add(terminal("cancelled"), was_accepted=True, was_cancelled=True)
    assert ends == Ends(
        streams=9, well=2, wrong=1, holes=1, lost=3, unanswered=1, errors={"overloaded": 2, "cancelled": 1}
    )


def test_rounds_add_up_by_client() -> None:
    one = record(plain=Ends(streams=3, well=2, errors={"a": 1}), whole=Ends(streams=1, well=1))
    other = record(seed=1, plain=Ends(streams=4, well=1, errors={"a": 1, "b": 2}), library=Ends(streams=1, lost=1))
    assert sum_up([one, other]) == {
        "library": Ends(streams=1, lost=1),
        "plain": Ends(streams=7, well=3, errors={"a": 2, "b": 2}),
        "whole": Ends(streams=1, well=1),
    }
    assert sum_up([record(http=Ends(streams=2, well=2))])["http"] == Ends(streams=2, well=2)


def test_what_was_written_is_read_again_and_a_line_that_was_cut_off_is_not(tmp_path: Path) -> None:
    path = tmp_path / "build/results.jsonl"
    assert results.read(path) == []
    one, other = record(seed=0, plain=Ends(streams=1, errors={"a": 1})), record(seed=1)
    results.append(path, one)
    whole = path.read_bytes()
    results.append(path, other)
    path.write_bytes(path.read_bytes()[:-5])
    assert results.read(path) == [one]
    results.append(path, other)
    assert results.read(path) == [one, other]
    assert path.read_bytes().startswith(whole)


def test_a_run_goes_on_with_the_kind_of_which_least_was_tried_and_with_a_seed_that_has_no_result() -> None:
    kinds = [KIND, "roll"]
    assert next_round([], kinds) == (KIND, 0)
    assert next_round([record()], kinds) == ("roll", 0)
    tried = [record(seed=0), record("roll", 0, faults=5), record("roll", 2, faults=1), record("drain_worker", 1)]
    assert next_round(tried, kinds) == (KIND, 1)
    assert next_round([*tried, *(record(seed=seed, faults=20) for seed in range(1, 7))], kinds) == ("roll", 1)
    assert next_round([record(faults=5_000)], [KIND]) == (KIND, 1)


def test_rounds_of_another_size_count_for_themselves() -> None:
    small = msgspec.structs.replace(record(), sizes="--workers 2")
    assert next_round([record()], [KIND], small.sizes) == (KIND, 0)
    assert next_round([record(), small], [KIND], small.sizes) == (KIND, 1)
    assert [record().title, small.title] == [KIND, f"{KIND} --workers 2"]


def test_a_round_that_could_not_be_played_counts_as_tried_no_more_than_its_faults() -> None:
    assert next_round([record(faults=0), record("roll", faults=5)], [KIND, "roll"]) == (KIND, 1)


@pytest.mark.parametrize("client", ["library", "plain", "whole"])
@pytest.mark.parametrize(
    "ends", [Ends(wrong=1), Ends(lost=1), Ends(errors={"internal": 1}), Ends(errors={"worker_lost": 1})]
)
def test_no_client_may_get_this_when_a_worker_dies(client: str, ends: Ends) -> None:
    (found,) = violations(KIND, {client: ends})
    assert found.startswith(f"{client}: 1 ")


def test_a_missing_seal_excuses_clients_that_are_not_the_library() -> None:
    unsealed = Ends(errors={UNSEALED: 3})
    assert violations(KIND, {"plain": unsealed, "whole": unsealed}) == []
    assert violations(KIND, {"library": unsealed}) == [f"library: 3 {UNSEALED}"]
    for kind in ("pause_router", "drain_worker", "roll"):
        assert violations(kind, {"plain": unsealed}) == [f"plain: 3 {UNSEALED}"]


def test_only_a_lost_broker_or_router_excuses_a_lost_message_or_a_request_without_an_answer() -> None:
    ends = Ends(holes=1, lost=1, unanswered=1)
    assert violations("restart_broker", {"plain": ends}) == []
    assert len(violations("restart_broker", {"library": ends})) == 3
    assert violations("kill_router_then_worker", {"plain": ends}) == ["plain: 1 holes", "plain: 1 lost terminals"]
    for kind in KINDS.keys() - {"restart_broker", "kill_router_then_worker", "mixed"}:
        assert len(violations(kind, {"plain": ends})) == 3, kind


def test_percentiles_are_values_that_were_seen() -> None:
    assert percentile([], 0.5) is None
    assert [percentile([7], share) for share in (0.5, 0.99)] == [7, 7]
    values = list(range(100, 0, -1))
    assert [percentile(values, share) for share in (0.5, 0.99, 1.0)] == [50, 99, 100]
