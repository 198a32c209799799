"""A simulated step takes as long as its timing model says, and a simulator says that it is one."""

from array import array
from typing import Any

import pytest

from tests.support.recording_bus import RecordingBus
from tokenbus.protocol.bus.bus import Outgoing
from tokenbus.protocol.wire import internal
from tokenbus.worker.contract import engine_request
from tokenbus.worker.contract.engine_errors import ModelError
from tokenbus.worker.contract.engine_settings import EngineSettings
from tokenbus.worker.engine.scheduling.plan import ScheduledTokens, StepPlan
from tokenbus.worker.engine.scheduling.sequence import Sequence
from tokenbus.worker.engine.sim.runner import PRESETS, Faults, SimRunner, lose_events, parse_faults, plan_ms

DYNAMO = PRESETS["dynamo"]


def part(num_prompt: int, computed: int, count: int, sampled: int = 0) -> ScheduledTokens:
    sampling = engine_request.Sampling(max_tokens=100)
    sequence = Sequence(1, array("I", [1] * num_prompt), sampling, frozenset())
    for _ in range(sampled):
        sequence.num_computed = sequence.num_tokens
        sequence.append([5])
    return ScheduledTokens(sequence, computed, count)


def of(*parts: ScheduledTokens, capacity: int = 1_000) -> float:
    return plan_ms(StepPlan(parts), DYNAMO, capacity)


def test_a_step_of_prompt_tokens_takes_their_polynomial() -> None:
    assert of(part(600, 0, 512)) == pytest.approx(4.209989e-07 * 512**2 + 1.518344e-02 * 512 + 16.50142)


def test_a_step_of_decodes_takes_what_the_kv_usage_says() -> None:
    assert of(part(499, 499, 1, sampled=1)) == pytest.approx(-25.74 * 0.25 + 54.01 * 0.5 + 5.74)


def test_both_add_up() -> None:
    both = of(part(99, 99, 1, sampled=1), part(300, 0, 150))
    assert both == pytest.approx(DYNAMO.prefill(150) + DYNAMO.decode(0.25))


def test_the_last_token_of_a_prompt_is_a_prompts() -> None:
    assert of(part(100, 90, 10)) == pytest.approx(DYNAMO.prefill(10))


def test_a_simulator_says_so_in_its_card_and_with_every_token() -> None:
    runner = SimRunner(EngineSettings(model="dynamo", engine="sim"))
    assert (runner.config.engine, runner.config.source) == ("sim", "sim:dynamo")
    assert all(piece.startswith(b" simulated-") for piece in runner.token_bytes[257:])
    assert runner.tokenize(internal.Tokenize(text="é")) == [1 + 0xC3, 1 + 0xA9]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"model": "nobody"}, "the simulator has the timings dynamo"),
        ({"sim_speedup": 0.0}, "--sim-speedup must be above 0"),
        ({"kv_tokens": 8}, "--kv-tokens must be at least"),
        ({"max_num_batched_tokens": 8}, "--max-num-batched-tokens must be above"),
    ],
)
def test_settings_that_it_can_not_meet_are_refused(changes: dict[str, object], said: str) -> None:
    fields = {"model": "dynamo", "engine": "sim", "max_num_seqs": 8} | changes
    with pytest.raises(ModelError, match=said):
        SimRunner(EngineSettings(**fields))  # type: ignore[arg-type]


def test_a_script_of_faults_is_read_as_it_is_written() -> None:
    assert parse_faults("") == Faults()
    assert parse_faults("crash@200,slow@50=3000,hang@9,lose@20,load@900") == Faults(200, 9, 50, 3000.0, 20, load=900)


@pytest.mark.parametrize(
    "text", ["crash", "crash@0", "crash@x", "crash@5=1", "slow@5", "slow@5=0", "slow@5=x", "burn@5", "load@3600001"]
)
def test_a_fault_that_there_is_not_is_refused_with_those_that_there_are(text: str) -> None:
    with pytest.raises(ModelError, match="--sim-faults: "):
        SimRunner(EngineSettings(model="dynamo", engine="sim", sim_faults=text))


@pytest.mark.parametrize(
    ("engine", "script", "lost"),
    [("sim", "crash@9,lose@3", {3, 6}), ("sim", "", set()), ("sim", "lose@x", set()), ("gguf", "lose@3", set())],
)
def test_every_nth_event_of_a_simulator_is_lost_and_no_other_message(engine: str, script: str, lost: set[int]) -> None:
    bus: Any = RecordingBus()
    lose_events(bus, "events", EngineSettings(model="dynamo", engine=engine, sim_faults=script))
    for number in range(1, 8):
        bus.publish_all([Outgoing("events", b"%d" % number), Outgoing("chunks", b"%d" % number)])
    published = bus.take()
    assert {int(one.payload) for one in published if one.subject == "events"} == set(range(1, 8)) - lost
    assert sum(one.subject == "chunks" for one in published) == 7


def test_a_step_is_never_shorter_than_its_least() -> None:
    steady = PRESETS["steps-of-50ms"]
    assert steady.step_ms(512, 0, 0.0) == steady.step_ms(0, 3, 0.9) == 50.0
