"""Another worker computes a prompt where that brings the first token earlier or spares streams, and only there."""

import dataclasses
import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.router.builders import card, events, fleet_of, known, stored
from tokenbus.protocol.wire import block_hash, codec, internal, limits, messages
from tokenbus.router.fleet.fleet import Fleet
from tokenbus.router.placement import remote_prefills
from tokenbus.router.placement.placement import Capacity, NoWorker, Placement, PlacementOptions, PlacementRequest
from tokenbus.router.placement.policies import make_policies
from tokenbus.router.placement.remote_prefills import Prefill, PrefillState

BLOCK = 16
ROLES = st.sampled_from(list(messages.WorkerRole))
BOTH, PREFILL, DECODE = messages.WorkerRole.BOTH, messages.WorkerRole.PREFILL, messages.WorkerRole.DECODE
TOKENS = st.floats(0, 1e6)
TOKEN_S = st.floats(1e-6, 1.0)
PREFILLS = st.builds(Prefill, st.floats(1, 1e6), TOKENS, TOKEN_S)
SECONDS = st.floats(0, 1e6)
STREAMS = st.integers(0, 100)


# The decision


@given(PREFILLS, STREAMS, ROLES, SECONDS, st.floats(0, 1e6), st.integers(0, 50))
def test_what_pays_still_pays_when_it_is_quicker_or_more_streams_are_spared(
    own: Prefill, streams: int, role: messages.WorkerRole, remote_prefill_s: float, more_s: float, more_streams: int
) -> None:
    if remote_prefills.pays(own, streams, role, remote_prefill_s + more_s):
        assert remote_prefills.pays(own, streams + more_streams, role, remote_prefill_s)
        assert remote_prefills.pays(
            own._replace(queued_tokens=own.queued_tokens + more_s), streams, role, remote_prefill_s
        )


@given(PREFILLS, SECONDS)
def test_without_streams_only_an_earlier_first_token_pays_and_a_decode_worker_is_patient(
    own: Prefill, remote_prefill_s: float
) -> None:
    assert remote_prefills.pays(own, 0, BOTH, remote_prefill_s) == (remote_prefill_s < own.first_token_s)
    assert remote_prefills.pays(own, 0, DECODE, remote_prefill_s) == (remote_prefill_s < 2 * own.first_token_s)


@given(PREFILLS, st.integers(1, 100), st.floats(0, 10))
def test_a_first_token_may_be_later_by_a_quarter_of_the_time_that_it_spares_each_stream(
    own: Prefill, streams: int, share: float
) -> None:
    spared_s = streams * own.compute_s / 4
    assert remote_prefills.pays(own, streams, BOTH, own.first_token_s + share * spared_s) == (
        own.first_token_s + share * spared_s < own.first_token_s + spared_s
    )


@given(st.floats(0, 1e6), st.floats(0, 1e6), st.integers(0, 10_000))
def test_a_prompt_is_long_by_what_is_missing_and_if_most_of_it_is(prompt: float, missing: float, least: int) -> None:
    assert remote_prefills.is_long(prompt, missing, least) == (least > 0 and missing >= least and 2 * missing >= prompt)


@st.composite
def states(draw: st.DrawFn) -> tuple[PrefillState, list[int]]:
    count = draw(st.integers(1, 8))
    columns = [st.lists(values, min_size=count, max_size=count) for values in (TOKENS, TOKENS, st.just(0.0) | TOKEN_S)]
    state = PrefillState(*(np.array(draw(column)) for column in columns))
    return state, draw(st.lists(st.integers(0, count - 1), min_size=1, unique=True))


@given(states(), PREFILLS, STREAMS, ROLES, SECONDS)
def test_whoever_would_be_first_is_chosen_if_that_pays(
    given_state: tuple[PrefillState, list[int]], own: Prefill, streams: int, role: messages.WorkerRole, move_s: float
) -> None:
    state, rows = given_state
    seconds = {}
    for row in rows:
        token_s = state.token_s[row] or 0.01
        seconds[row] = (state.queued_tokens[row] + state.missing_tokens[row]) * token_s + move_s
    found = remote_prefills.choose(state, np.array(rows), own, streams, role, move_s)
    assert (found is not None) == remote_prefills.pays(own, streams, role, min(seconds.values()))
    if found is not None:
        assert found.row in rows
        assert found.seconds == seconds[found.row] == min(seconds.values())


# In a fleet


@dataclasses.dataclass
class Kind:
    role: messages.WorkerRole
    held: int = 0
    load: messages.Load = dataclasses.field(default_factory=messages.Load)
    prefill_s: float = 0.01


IDLE = Kind(PREFILL)
BUSY = messages.Load(running=4)
PROMPT = range(1, 76)
"""The hashes of 75 blocks, of a prompt of 1,201 tokens."""


def fleet(**kinds: Kind) -> Fleet:
    found = Fleet(0.0)
    for name, kind in kinds.items():
        fields = {"kv_identity": "k", "kv_token_bytes": 12_300, "context_length": 8_192}
        one = card(name, kv_block_size=BLOCK, total_kv_blocks=500, role=kind.role, **fields)
        found.apply_card(one, 0.0)
        found.apply_events("demo", events(name, stored=stored(PROMPT[: kind.held]), load=kind.load), 0.0)
        before, after = (
            messages.Load(queued_prefill_tokens=1_000),
            messages.Load(computed_tokens=round(0.2 / kind.prefill_s)),
        )
        for _ in range(10):
            known(found, name).speed.observe_loads(before, after, 0.2)
    found.sweep(0.0)
    return found


def place(
    found: Fleet,
    *,
    blocks: int = len(PROMPT),
    only: str | None = None,
    hashes: bool = True,
    key: str = "default:r-1",
    **options: object,
) -> Placement:
    request = PlacementRequest(key, BLOCK * blocks + 1, PROMPT[:blocks] if hashes else ())
    wanted = PlacementOptions(only=only, **options)  # type: ignore[arg-type]
    placement = found.place("demo", request, make_policies()["kv"], random.Random(1), 0.0, wanted)
    assert isinstance(placement, Placement)
    found.check_integrity()
    return placement


def remote_prefill_of(placement: Placement) -> str | None:
    return placement.fetch_from.card.worker_id if placement.fetch_from and placement.remote_prefill_s else None


def test_a_prefill_worker_computes_prompts_and_gets_no_requests() -> None:
    found = fleet(p=IDLE, d=Kind(DECODE, load=BUSY))
    placement = place(found)
    assert (placement.worker.card.worker_id, remote_prefill_of(placement), placement.fetch_blocks) == ("d", "p", 75)
    # 1,201 tokens in 10 ms each, and 12,300 bytes of each at 60 MB/s
    assert placement.remote_prefill_s == pytest.approx(1_201 * 0.01 + 1_201 * 12_300 / 60e6)


def test_both_workers_are_booked_with_their_part_until_events_count_it() -> None:
    found = fleet(p=IDLE, d=Kind(DECODE))
    place(found)
    assert [one.prefill_tokens for one in known(found, "p").bookings.values()] == [1_201]
    assert [one.prefill_tokens for one in known(found, "d").bookings.values()] == [1]
    found.apply_events("demo", codec.replace(events("p", 1), legs=["default:r-1"]), 0.0)
    assert (len(known(found, "p").bookings), len(known(found, "d").bookings)) == (0, 1)


def test_what_is_taken_back_is_taken_back_at_both() -> None:
    found = fleet(p=IDLE, d=Kind(DECODE))
    placement = place(found)
    found.unbook(placement.worker.card.address, "default:r-1")
    assert not known(found, "p").bookings
    assert not known(found, "d").bookings
    found.check_integrity()


def test_a_second_request_with_the_same_prompt_finds_it_where_it_will_be() -> None:
    found = fleet(p=IDLE, d=Kind(DECODE))
    place(found)
    second = place(found, key="default:r-2")
    assert (second.overlap_blocks, remote_prefill_of(second)) == (75, None)


@pytest.mark.parametrize(
    ("kinds", "expected"),
    [
        ({"p": IDLE, "b": Kind(BOTH)}, None),  # it would only be later
        ({"p": IDLE, "b": Kind(BOTH, load=messages.Load(running=1))}, "p"),  # it spares a stream
        ({"p": IDLE, "b": Kind(BOTH, load=messages.Load(queued_prefill_tokens=500))}, "p"),
        ({"p": Kind(PREFILL, prefill_s=0.005), "b": Kind(BOTH)}, "p"),
        ({"p": IDLE, "d": Kind(DECODE)}, "p"),
        ({"p": Kind(PREFILL, load=messages.Load(queued_prefill_tokens=1_400)), "d": Kind(DECODE)}, None),
        ({"p": Kind(PREFILL, load=messages.Load(queued_prefill_tokens=900)), "d": Kind(DECODE)}, "p"),
        ({"p": Kind(PREFILL, load=messages.Load(running=8)), "d": Kind(DECODE)}, None),
        ({"p": Kind(PREFILL, load=messages.Load(queued_prefill_tokens=900)), "q": IDLE, "d": Kind(DECODE)}, "q"),
        ({"p": Kind(PREFILL, held=30), "q": IDLE, "d": Kind(DECODE)}, "p"),
    ],
)
def test_the_choice_is_made_anew_for_each_request(kinds: dict[str, Kind], expected: str | None) -> None:
    assert remote_prefill_of(place(fleet(**kinds))) == expected


@pytest.mark.parametrize(("blocks", "expected"), [(31, None), (32, "p")])
def test_a_short_prompt_is_computed_where_it_is_answered(blocks: int, expected: str | None) -> None:
    assert remote_prefill_of(place(fleet(p=IDLE, d=Kind(DECODE, load=BUSY)), blocks=blocks)) == expected


@pytest.mark.parametrize(("held", "expected"), [(37, "p"), (38, None)])
def test_where_most_of_a_prompt_is_cached_the_rest_is_computed_there(held: int, expected: str | None) -> None:
    placement = place(fleet(p=IDLE, d=Kind(DECODE, held=held, load=BUSY)), min_remote_prefill_tokens=64)
    assert remote_prefill_of(placement) == expected


def test_what_others_hold_is_fetched_and_not_computed_again() -> None:
    placement = place(fleet(p=IDLE, d=Kind(DECODE, load=BUSY), e=Kind(DECODE, held=70)), only="d")
    assert placement.fetch_from is not None
    assert (placement.fetch_from.card.worker_id, placement.remote_prefill_s) == ("e", 0.0)


@pytest.mark.parametrize("min_remote_prefill_tokens", [0, 1_300])
def test_a_router_may_be_told_to_ask_for_none(min_remote_prefill_tokens: int) -> None:
    assert (
        remote_prefill_of(place(fleet(p=IDLE, d=Kind(DECODE)), min_remote_prefill_tokens=min_remote_prefill_tokens))
        is None
    )


def test_a_prompt_that_must_not_be_cached_is_computed_where_it_is_answered() -> None:
    placement = place(fleet(p=IDLE, d=Kind(DECODE, load=BUSY)), hashes=False)
    assert (placement.worker.card.worker_id, placement.fetch_from) == ("d", None)


@pytest.mark.parametrize(
    ("changed", "identity", "expected"), [("p", "", None), ("p", "other", None), ("pd", "", None), ("pd", "other", "p")]
)
def test_only_workers_that_can_read_each_others_blocks_have_remote_prefills(
    changed: str, identity: str, expected: str | None
) -> None:
    found = fleet(p=IDLE, d=Kind(DECODE, load=BUSY))
    for name in changed:
        found.apply_card(codec.replace(known(found, name).card, kv_identity=identity), 0.0)
    assert remote_prefill_of(place(found)) == expected


@pytest.mark.parametrize(("having", "expected"), [("d", None), ("pd", "p")])
def test_a_worker_without_the_adapters_computes_no_prompt_with_them(having: str, expected: str | None) -> None:
    found = fleet(p=IDLE, d=Kind(DECODE, load=BUSY))
    style = [messages.CardAdapter(name="style", digest="d1")]
    for name in having:
        found.apply_card(codec.replace(known(found, name).card, adapters=style), 0.0)
    assert remote_prefill_of(place(found, adapters=(block_hash.Adapter("d1", 1.0),), tenant="default")) == expected


@pytest.mark.parametrize("state", [messages.WorkerState.DRAINING, messages.WorkerState.RESTARTING])
def test_a_prefill_worker_that_takes_nothing_gets_no_remote_prefill(state: messages.WorkerState) -> None:
    found = fleet(p=IDLE, d=Kind(DECODE, load=BUSY))
    found.apply_events("demo", events("p", 1, state=state), 0.0)
    assert remote_prefill_of(place(found)) is None


def test_a_worker_computes_for_so_many_others_and_no_more() -> None:
    found = fleet(p=Kind(PREFILL, prefill_s=1e-6), **{f"d{number}": Kind(DECODE) for number in range(9)})
    chosen = [remote_prefill_of(place(found, only=f"d{number}", key=f"default:r-{number}")) for number in range(9)]
    assert chosen.count("p") == limits.MAX_REMOTE_PREFILLS
    assert chosen[-1] is None


def test_where_there_are_only_prefill_workers_they_serve() -> None:
    found = fleet(p=IDLE, q=Kind(PREFILL))
    placement = place(found)
    assert (placement.worker.card.role, placement.fetch_from) == ("prefill", None)
    assert found.model("demo").capacity(0.0) is Capacity.AVAILABLE


def test_a_prefill_worker_serves_when_no_other_can_be_reached_or_it_is_asked_for() -> None:
    found = fleet(p=IDLE, d=Kind(DECODE))
    assert place(found, only="p").worker.card.worker_id == "p"
    assert place(found, exclude=("d",), key="default:r-2").worker.card.worker_id == "p"
    found.apply_events("demo", events("d", 1, state=messages.WorkerState.RESTARTING), 0.0)
    assert place(found, key="default:r-3").worker.card.worker_id == "p"


def test_requests_wait_for_a_decode_worker_and_not_for_one_that_only_computes_prompts() -> None:
    found = fleet(p=IDLE, d=Kind(DECODE, load=messages.Load(running=9)))
    assert found.model("demo").capacity(0.0) is Capacity.BUSY


def test_a_report_says_who_computes_the_prompt() -> None:
    report = place(fleet(p=IDLE, d=Kind(DECODE)), explain=True).report
    assert report is not None
    assert (report.chosen, report.fetch_from, report.has_leg) == ("d", "p", True)
    assert [one.worker_id for one in report.candidates] == ["d"]


def test_the_time_of_a_remote_prefill_says_nothing_about_how_fast_blocks_move() -> None:
    found = fleet(p=IDLE, d=Kind(DECODE))
    told = internal.Fetched(
        stream_no=1, worker_id="p", fetched_tokens=1_200, fetched_bytes=10**7, fetch_ms=9_000.0, was_leg=True
    )
    found.apply_events("demo", codec.replace(events("d", 1), fetches=[told]), 0.0)
    assert found.model("demo").transfer_mb_per_s == 60.0


def test_without_any_worker_there_is_none() -> None:
    found = fleet_of()
    request = PlacementRequest("default:r-1", 10)
    placed = found.place("demo", request, make_policies()["kv"], random.Random(1), 0.0, PlacementOptions())
    assert isinstance(placed, NoWorker)
