"""Any numbers in cards and events leave the router and other workers running."""

import random

import msgspec
import pytest

from tests.hostile.forged_worker import NAMES, Stage
from tests.hostile.scale import times
from tests.router.builders import card, events, stored
from tests.sim.sim_bus import SimBus
from tests.sim.system import MODEL, FrontendProcess
from tokenbus.protocol.wire import codec, messages

NUMBERS = (-(2**63), -1, 0, 1, 3, 2**31, 2**53 + 1, 2**63 - 1, 2**64 - 1)


def any_load(rng: random.Random) -> messages.Load:
    fields = {field.name: rng.choice(NUMBERS) for field in msgspec.structs.fields(messages.Load)}
    return messages.Load(**fields)  # type: ignore[arg-type]


def any_card(rng: random.Random, worker_id: str, model: str) -> messages.Card:
    numbers = ("context_length", "max_num_seqs", "max_num_batched_tokens", "kv_token_bytes")
    perhaps = ("kv_block_size", "total_kv_blocks", "host_kv_blocks")
    changes = {name: rng.choice(NUMBERS) for name in numbers} | {name: rng.choice((None, *NUMBERS)) for name in perhaps}
    epoch = f"{rng.choice(NUMBERS)}-x"
    features = ["generate", "prompt", "token_ids", "embed"]
    return card(worker_id, epoch=epoch, model=model, features=features, **changes)


@pytest.mark.parametrize("seed", range(times(6, 100)))
def test_no_number_that_a_worker_says_ends_a_router_or_keeps_others_from_serving(stage: Stage, seed: int) -> None:
    rng = random.Random(seed)
    FrontendProcess(stage.world, stage.broker, "healthy", max_num_seqs=64)
    forger = stage.world.process("forger")
    bus = SimBus(forger, stage.broker)
    for number in range(times(30, 200)):
        worker_id, model = f"forged{number % 5}", rng.choice((MODEL, "other"))
        said = any_card(rng, worker_id, model)
        forger.call(bus.publish, NAMES.card(model, worker_id), codec.encode(said))
        for _ in range(2):
            event = events(worker_id, rng.choice((0, 1, 2**63)), epoch=said.epoch, stored=stored([rng.getrandbits(64)]))
            event = codec.replace(event, load=any_load(rng))
            forger.call(bus.publish, NAMES.events(model, worker_id), codec.encode(event))
        stage.client.ask(3, model=model)
        stage.client.ask(3, worker_id="healthy")
        stage.world.run(0.1)
    healthy_ones = [end for end in stage.until_ended() if end == "length"]
    assert len(healthy_ones) >= times(30, 200)
