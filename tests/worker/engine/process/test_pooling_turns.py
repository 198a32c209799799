"""Prompts and inputs to embed take turns beside streams, whose every step computes their tokens."""

import time

from tests.support.arithmetic import ArithmeticRunner, make_config
from tests.support.pieces import Pieces
from tokenbus.protocol.wire import block_hash, internal
from tokenbus.worker.contract import engine_request
from tokenbus.worker.engine.device import pooling
from tokenbus.worker.engine.device.runner import BatchLimits
from tokenbus.worker.engine.process import ipc
from tokenbus.worker.engine.process.loop import Inbox, StepLoop
from tokenbus.worker.engine.scheduling.plan import Outcome, StepPlan


class Turns(ArithmeticRunner):
    """Notes what each iteration of the loop computes: `d` for streams, `p` for prompts, `e` for inputs to embed."""

    def __init__(self, embedder: Pieces) -> None:
        super().__init__(make_config(context_length=1_024, total_kv_blocks=128))
        self.noted = ""
        self.embedder = embedder
        embedder.max_input_tokens = 1_024
        embedder.noted = self.note

    def note(self, what: str) -> None:
        self.noted += what

    def step(self, plan: StepPlan) -> list[Outcome]:
        self.note("".join(sorted({"d" if part.sequence.is_decoding else "p" for part in plan.scheduled})))
        return super().step(plan)


def add(seq_no: int, num_prompt: int, max_tokens: int) -> ipc.Add:
    token_ids = [1 + (7 * seq_no + 3 * place) % 90 for place in range(num_prompt)]
    sampling = engine_request.Sampling(max_tokens=max_tokens, ignore_eos=True)
    return ipc.Add(seq_no, block_hash.pack_token_ids(token_ids), sampling)


def turns(*commands: ipc.Add, num_embedded: int) -> str:
    """Runs a loop until it has computed everything; returns what was computed, in order."""
    embedder = Pieces(BatchLimits(1_024, 8, is_padded=False))
    runner, inbox = Turns(embedder), Inbox()
    left = {command.seq_no for command in commands}

    def report(said: ipc.Report) -> None:
        if isinstance(said, ipc.StepReport):
            left.difference_update(one.seq_no for one in said.outputs if one.finish_reason is not None)
        if isinstance(said, ipc.PoolResult):
            left.discard(0)
        if not left:
            inbox.put(None)

    for command in commands:
        inbox.put(command)
    if num_embedded:
        left.add(0)
        request = internal.Embed(inputs=[[1] * num_embedded], remaining_ms=60_000)
        inbox.put(pooling.embed_job(1, request, embedder, time.monotonic()))
    StepLoop(runner, inbox, report, 0.05).run()
    return runner.noted


def test_streams_have_a_token_between_any_two_pieces() -> None:
    noted = turns(add(1, 3, 20), num_embedded=300)
    assert "ee" not in noted
    assert noted.count("e") > 2
    assert noted.startswith("pded")


def test_a_prompt_and_inputs_to_embed_take_turns_while_there_are_both() -> None:
    noted = turns(add(1, 3, 30), add(2, 300, 1), num_embedded=300)
    assert "dpedpe" not in noted
    assert noted.startswith("pdedpdedpded")
    assert set(noted) == {"d", "p", "e"}


def test_without_streams_they_take_turns_as_well() -> None:
    assert turns(add(1, 300, 1), num_embedded=300).startswith("pepepe")


def test_an_engine_that_only_embeds_computes_one_piece_after_another() -> None:
    assert set(turns(num_embedded=300)) == {"e"}
