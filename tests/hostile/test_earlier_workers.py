"""A message is continued by those of a model's workers that can do so, and refused by name where there are none."""

from tests.hostile.forged_worker import ForgedWorker, Stage, refuses, says
from tokenbus.protocol.wire import block_hash, errors, internal, messages
from tokenbus.protocol.wire.checks.validation import CONTINUE

TOKENS = says(internal.TokenizeResult(token_ids=block_hash.pack_token_ids([1, 2, 3])))
REFUSAL = refuses(errors.Code.UNSUPPORTED)
NUM_REQUESTS = 6


def worker(stage: Stage, name: str, *features: str) -> ForgedWorker:
    """Adds a worker that tokenizes and refuses runs."""
    served = ("generate", "prompt", "chat", *features)
    return ForgedWorker(stage.world, stage.broker, name, features=served, tokenize=TOKENS, run=REFUSAL)


def terminal_of(stage: Stage) -> messages.Chunk:
    stage.client.ask(5, begun="The capital is")
    stage.until_ended()
    terminal = stage.client.asked[-1].terminal
    assert terminal is not None
    return terminal


def test_only_workers_that_can_continue_a_message_are_asked_to(stage: Stage) -> None:
    earlier = [worker(stage, f"earlier{number}") for number in range(3)]
    able = worker(stage, "able", CONTINUE)
    stage.world.run(0.5)
    for _ in range(NUM_REQUESTS):
        terminal_of(stage)
    assert able.heard == ["tokenize", "run"] * NUM_REQUESTS
    assert [one.heard for one in earlier] == [[]] * 3


def test_where_no_worker_can_continue_a_message_it_is_refused_by_name(stage: Stage) -> None:
    earlier = worker(stage, "earlier")
    stage.world.run(0.5)
    refused = terminal_of(stage).error
    assert refused
    assert (refused.code, refused.param) == (errors.Code.UNSUPPORTED, CONTINUE)
    assert earlier.heard == []


def test_while_those_that_can_continue_a_message_take_nothing_it_may_be_tried_again(stage: Stage) -> None:
    worker(stage, "earlier")
    able = worker(stage, "able", CONTINUE)
    stage.world.run(0.5)
    able.show(messages.WorkerState.DRAINING)
    stage.world.run(0.5)
    refused = terminal_of(stage).error
    assert refused
    assert (refused.code, refused.retryable) == (errors.Code.NO_WORKER, True)
    assert CONTINUE in refused.message
