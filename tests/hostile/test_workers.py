"""Dead, forged and broken workers do little harm to requests while others are healthy."""

from array import array

import pytest
from nats.aio.msg import Msg

from tests.hostile.forged_worker import GARBAGE, NAMES, Answer, ForgedWorker, Stage, refuses, says
from tests.hostile.scale import times
from tests.sim.system import MODEL, FrontendProcess, kill
from tokenbus.protocol.prompt import tokenizer_bundle
from tokenbus.protocol.wire import codec, errors, internal, messages
from tokenbus.worker.tokenizers import gguf_bundle

RESTARTING = messages.WorkerState.RESTARTING
READY = messages.WorkerState.READY
DROPPED = says(internal.ControlReply(ok=True))
EMBEDDED = internal.EmbedResult(vectors=array("f", [1.0, 2.0]).tobytes(), prompt_tokens=1)


def ask(stage: Stage, count: int, *, prompt: str | None = None, worker_id: str = "") -> None:
    for _ in range(count):
        stage.client.ask(3, prompt=prompt, worker_id=worker_id)


def dead_replicas(stage: Stage, count: int) -> None:
    """Starts workers and kills them, which the router does not know yet."""
    frontends = [FrontendProcess(stage.world, stage.broker, f"dead{number}") for number in range(count)]
    stage.world.run(1.0)
    for frontend in frontends:
        kill(frontend.process, frontend.bus, frontend.incoming)
    stage.world.run(0.1)  # until the broker has noticed


# nobody listens


@pytest.mark.parametrize("prompt", [None, "a text"])
def test_one_healthy_worker_serves_everybody_beside_replicas_that_are_all_dead(
    stage: Stage, prompt: str | None
) -> None:
    FrontendProcess(stage.world, stage.broker, "healthy", max_num_seqs=64)
    dead_replicas(stage, times(30, 50))
    ask(stage, 4, prompt=prompt)
    assert stage.until_ended(2.0) == ["length"] * 4


@pytest.mark.parametrize("prompt", [None, "a text"])
def test_forged_cards_that_never_beat_keep_nobody_from_the_healthy_worker(stage: Stage, prompt: str | None) -> None:
    FrontendProcess(stage.world, stage.broker, "healthy", max_num_seqs=64)
    for number in range(times(29, 50)):
        ForgedWorker(stage.world, stage.broker, f"forged{number}", beats=False)
    stage.world.run(0.3)
    for _ in range(times(8, 50)):
        ask(stage, 3, prompt=prompt)
        stage.world.run(0.3)
    assert set(stage.until_ended(3.0)) == {"length"}


def test_a_worker_that_beats_and_does_not_listen_costs_a_request_little(stage: Stage) -> None:
    FrontendProcess(stage.world, stage.broker, "healthy", max_num_seqs=64)
    for number in range(times(20, 50)):
        ForgedWorker(stage.world, stage.broker, f"forged{number}")
    stage.world.run(0.5)
    ask(stage, 4)
    assert stage.until_ended(2.0) == ["length"] * 4


@pytest.mark.parametrize("worker_id", ["", "forged"])
def test_a_worker_that_beats_and_does_not_listen_does_not_hold_a_request(stage: Stage, worker_id: str) -> None:
    ForgedWorker(stage.world, stage.broker, "forged")
    stage.world.run(0.5)
    ask(stage, 1, worker_id=worker_id)
    assert stage.until_ended(15.0) == ["no_worker"]


def test_an_embedding_goes_past_workers_that_are_not_there(stage: Stage) -> None:
    for number in range(times(12, 50)):
        ForgedWorker(stage.world, stage.broker, f"forged{number}", beats=False, features=("embed",))
    stage.world.run(0.1)
    ForgedWorker(stage.world, stage.broker, "healthy", features=("embed",), embed=says(EMBEDDED))
    stage.world.run(0.3)
    asked = stage.client.embed()
    stage.world.run_until(asked.done, 1.0)
    assert asked.result().embeddings == [[1.0, 2.0]]


# answers that can't be read


@pytest.mark.parametrize("answer", [says(GARBAGE), says(b""), says(b"\x91\x01"), says(b"\x81\xa8accepted\xa5maybe")])
def test_a_run_that_is_answered_with_nonsense_is_taken_back_and_placed_elsewhere(stage: Stage, answer: Answer) -> None:
    forged = ForgedWorker(stage.world, stage.broker, "forged", run=answer, control=DROPPED)
    stage.world.run(0.5)
    ask(stage, 1)
    stage.world.run_until(lambda: "run" in forged.heard)
    assert stage.until_ended() == ["internal"]
    assert forged.heard == ["run", "control"]
    terminal = stage.client.asked[0].terminal
    assert terminal is not None
    assert terminal.error
    assert terminal.error.retryable
    FrontendProcess(stage.world, stage.broker, "healthy", max_num_seqs=64)
    stage.world.run(0.5)
    ask(stage, 6)
    assert stage.until_ended()[1:] == ["length"] * 6


def test_a_worker_that_accepts_in_words_that_nobody_knows_and_speaks_keeps_the_request(stage: Stage) -> None:
    forged = ForgedWorker(
        stage.world, stage.broker, "forged", run=speaks(stage), control=says(internal.ControlReply(ok=False))
    )
    stage.world.run(0.5)
    ask(stage, 1)
    assert stage.until_ended() == ["stop"]
    stage.world.run_until(lambda: forged.heard == ["run", "control"], 1.0)


def speaks(stage: Stage) -> Answer:
    """Returns an answer that sends the client a whole stream and the router nonsense."""

    def answer(message: Msg) -> bytes:
        run = codec.Decoder(internal.Run).decode(message.data)
        _, _, request_id = run.request_id.partition(":")
        chunk = messages.Chunk(
            id=request_id,
            attempt=run.attempt,
            text="",
            finish_reason=messages.FinishReason.STOP,
            worker_id="forged",
            model=MODEL,
            created=0,
        )
        stage.client.bus.publish(run.reply, codec.encode(chunk, run.encoding))
        return GARBAGE

    return answer


@pytest.mark.parametrize(
    "answer", [says(GARBAGE), says(internal.EmbedResult()), says(internal.EmbedResult(vectors=b"123", prompt_tokens=1))]
)
def test_an_embedding_that_can_not_be_read_is_asked_of_another_worker(stage: Stage, answer: Answer) -> None:
    ForgedWorker(stage.world, stage.broker, "forged", features=("embed",), embed=answer)
    stage.world.run(0.5)
    refused = stage.client.embed()
    stage.world.run_until(refused.done)
    error = refused.exception()
    assert isinstance(error, errors.RequestError)
    assert (error.error.code, error.error.retryable) == (errors.Code.INTERNAL, True)
    ForgedWorker(stage.world, stage.broker, "healthy", features=("embed",), embed=says(EMBEDDED))
    stage.world.run(0.5)
    for _ in range(4):
        asked = stage.client.embed()
        stage.world.run_until(asked.done)
        assert asked.result().embeddings == [[1.0, 2.0]]
    stage.check()


@pytest.mark.parametrize(
    "answer", [says(GARBAGE), says(internal.RerankResult()), says(internal.RerankResult(scores=b"1234"))]
)
def test_scores_that_can_not_be_read_are_asked_of_another_worker(stage: Stage, answer: Answer) -> None:
    ForgedWorker(stage.world, stage.broker, "forged", features=("rerank",), rerank=answer)
    stage.world.run(0.5)
    refused = stage.client.rerank()
    stage.world.run_until(refused.done)
    error = refused.exception()
    assert isinstance(error, errors.RequestError)
    assert (error.error.code, error.error.retryable) == (errors.Code.INTERNAL, True)
    scored = internal.RerankResult(scores=array("f", [1.0, 2.0]).tobytes(), prompt_tokens=3)
    ForgedWorker(stage.world, stage.broker, "healthy", features=("rerank",), rerank=says(scored))
    stage.world.run(0.5)
    for _ in range(4):
        asked = stage.client.rerank()
        stage.world.run_until(asked.done)
        results = asked.result().results
        assert results
        assert [(one.index, one.relevance_score) for one in results] == [(1, 2.0), (0, 1.0)]
    stage.check()


def test_documents_go_to_no_worker_that_only_embeds(stage: Stage) -> None:
    forged = ForgedWorker(stage.world, stage.broker, "w1", features=("embed",), embed=says(EMBEDDED))
    stage.world.run(0.5)
    asked = stage.client.rerank()
    stage.world.run_until(asked.done, 1.0)
    error = asked.exception()
    assert isinstance(error, errors.RequestError)
    assert error.error.code is errors.Code.UNSUPPORTED
    assert "rerank" not in forged.heard
    stage.check()


async def _answer_with_garbage(stage: Stage, subject: str) -> None:
    bus = stage.router.bus
    await bus.subscribe(subject, lambda message: bus.publish(message.reply, GARBAGE), queue="router")


def test_a_routers_answer_that_can_not_be_read_is_no_fault_of_the_client(stage: Stage) -> None:
    stage.broker.pick = lambda members: members[-1]  # the one that subscribed last
    for subject in (NAMES.models[1], *(NAMES.all_of(one)[1] for one in ("embed", "tokenize", "detokenize"))):
        stage.router.process.do(_answer_with_garbage(stage, subject))
    stage.world.run(0.1)  # until the broker knows
    client = stage.client.process.do(stage.client.client.for_tenant("other"))
    for asked in (
        client.models(),
        client.embed(MODEL, messages.EmbedRequest(input="x")),
        client.tokenize(MODEL, messages.TokenizeRequest(prompt="x")),
        client.detokenize(MODEL, messages.DetokenizeRequest(token_ids=[1])),
    ):
        task = stage.client.process.spawn(asked)
        stage.world.run_until(task.done)
        error = task.exception()
        assert isinstance(error, errors.RequestError)
        assert error.error.code is errors.Code.INTERNAL


@pytest.mark.parametrize(
    "answer", [says(GARBAGE), says(internal.TokenizeResult()), says(internal.TokenizeResult(token_ids=b"123"))]
)
def test_token_ids_that_can_not_be_read_are_asked_of_another_worker(stage: Stage, answer: Answer) -> None:
    ForgedWorker(stage.world, stage.broker, "forged", tokenize=answer, run=refuses(errors.Code.OVERLOADED))
    stage.world.run(0.5)
    ask(stage, 1, prompt="a text")
    assert stage.until_ended() == ["internal"]
    FrontendProcess(stage.world, stage.broker, "healthy", max_num_seqs=64)
    stage.world.run(0.5)
    ask(stage, 4, prompt="a text")
    assert stage.until_ended()[1:] == ["length"] * 4


@pytest.mark.parametrize("num_dead", [0, times(4, 30)])
def test_tokens_and_their_text_go_past_workers_that_answer_nonsense_or_nothing(stage: Stage, num_dead: int) -> None:
    for number in range(times(9, 30)):
        ForgedWorker(stage.world, stage.broker, f"forged{number}", tokenize=says(GARBAGE), detokenize=says(GARBAGE))
    for number in range(num_dead):
        ForgedWorker(stage.world, stage.broker, f"dead{number}", beats=False)
    two = internal.TokenizeResult(token_ids=array("I", [5, 6]).tobytes())
    text = internal.DetokenizeResult(text="ab")
    ForgedWorker(stage.world, stage.broker, "healthy", tokenize=says(two), detokenize=says(text))
    stage.world.run(0.3)
    counted, read = stage.client.tokenize("ab"), stage.client.detokenize(5, 6)
    stage.world.run_until(lambda: counted.done() and read.done(), 5.0)
    assert (counted.result().token_ids, counted.result().count, read.result().text) == ([5, 6], 2, "ab")


BUNDLE = tokenizer_bundle.pack(
    tokenizer_bundle.TokenizerBundle(
        tokenizer_json=gguf_bundle.write(
            gguf_bundle.TokenizerSpec(gguf_bundle.bpe_model({"a": 0, "b": 1}, [], byte_fallback=True)), {}
        ),
        rules=tokenizer_bundle.PromptRules(special_tokens={}, vocab_size=2),
    )
)
DIGEST = tokenizer_bundle.bundle_digest(BUNDLE)


def bundle(data: bytes) -> Answer:
    return says(internal.TokenizerPart(digest=DIGEST, part=0, parts=1, data=data))


def test_a_worker_that_beats_and_does_not_tokenize_does_not_hold_a_request(stage: Stage) -> None:
    ForgedWorker(stage.world, stage.broker, "mute")
    stage.world.run(0.5)
    ask(stage, 1, prompt="a text")
    assert stage.until_ended(3.0) == ["no_worker"]


@pytest.mark.parametrize("model", [MODEL, "another"])
def test_a_forged_tokenizer_under_anothers_digest_keeps_nobody_from_the_true_one(stage: Stage, model: str) -> None:
    ForgedWorker(stage.world, stage.broker, "forged", model=model, digest=DIGEST, tokenizer=bundle(b"forged"))
    stage.world.run(0.5)
    stage.client.ask(3, prompt="ab", model=model)
    stage.until_ended()
    run = refuses(errors.Code.UNSUPPORTED)
    true = ForgedWorker(stage.world, stage.broker, "true", digest=DIGEST, tokenizer=bundle(BUNDLE), run=run)
    stage.world.run(0.5)
    ask(stage, 1, prompt="ab")
    assert stage.until_ended()[1:] == ["unsupported"]
    assert true.heard == ["tokenizer", "run"]


def test_a_tokenizer_that_another_models_worker_sends_for_ever_is_not_waited_for(stage: Stage) -> None:
    slow = ForgedWorker(
        stage.world, stage.broker, "slow", model="another", digest=DIGEST, tokenizer=lambda message: None
    )
    run = refuses(errors.Code.UNSUPPORTED)
    true = ForgedWorker(stage.world, stage.broker, "true", digest=DIGEST, tokenizer=bundle(BUNDLE), run=run)
    stage.world.run(0.5)
    stage.client.ask(3, prompt="ab", model="another")
    stage.world.run_until(lambda: "tokenizer" in slow.heard)
    ask(stage, 1, prompt="ab")
    stage.world.run(0.5)
    assert true.heard == ["tokenizer", "run"]


# workers that hold a request and do not say so


@pytest.mark.parametrize("control", [None, says(GARBAGE)])
def test_a_worker_that_beats_and_answers_nothing_holds_a_request_for_some_seconds_only(
    stage: Stage, control: Answer | None
) -> None:
    services: dict[str, Answer] = {"run": lambda message: None, "control": control or (lambda message: None)}
    ForgedWorker(stage.world, stage.broker, "mute", **services)
    stage.world.run(0.5)
    ask(stage, 1)
    assert stage.until_ended(80.0) == ["worker_lost"]  # its client asks four times


def test_a_worker_that_beats_and_answers_no_drop_is_not_given_up_while_the_broker_stands_still(stage: Stage) -> None:
    mute = ForgedWorker(stage.world, stage.broker, "mute", run=lambda message: None, control=lambda message: None)
    stage.world.run(0.5)
    ask(stage, 1)
    stage.world.run_until(lambda: "control" in mute.heard)
    stage.broker.pause()
    mute.answer(control=DROPPED)
    stage.world.run(9.0)
    assert stage.client.open()
    FrontendProcess(stage.world, stage.broker, "healthy", max_num_seqs=64)
    stage.broker.resume()
    assert stage.until_ended() == ["length"]


def test_a_worker_that_accepts_and_says_nothing_costs_a_request_some_seconds(stage: Stage) -> None:
    mute = ForgedWorker(stage.world, stage.broker, "mute", run=says(internal.RunReply(accepted=True)))
    stage.world.run(0.5)
    ask(stage, 1)
    stage.world.run_until(lambda: "run" in mute.heard)
    FrontendProcess(stage.world, stage.broker, "healthy", max_num_seqs=64)
    mute.show(messages.WorkerState.DRAINING)
    assert stage.until_ended(8.0) == ["length"]


def test_a_worker_with_other_blocks_shuts_others_of_its_model_out_while_it_is_there(stage: Stage) -> None:
    run = refuses(errors.Code.UNSUPPORTED)
    first = ForgedWorker(stage.world, stage.broker, "first", block_size=7, run=run)
    stage.world.run(0.5)
    ForgedWorker(stage.world, stage.broker, "second", block_size=16, run=refuses(errors.Code.PROMPT_TOO_LONG))
    stage.world.run(0.5)
    ask(stage, 1)
    assert stage.until_ended() == ["unsupported"]
    first.process.kill()
    stage.world.run(35.0)
    ask(stage, 1)
    assert stage.until_ended()[1:] == ["prompt_too_long"]


# workers that come back


@pytest.mark.parametrize("prompt", [None, "a text"])
@pytest.mark.parametrize("worker_id", ["", "w1"])
def test_a_request_waits_while_the_only_worker_restarts_its_engine(
    stage: Stage, prompt: str | None, worker_id: str
) -> None:
    frontend = FrontendProcess(stage.world, stage.broker, "w1", restart_s=3.0)
    stage.world.run(0.5)
    frontend.engine_dies()
    ask(stage, 2, prompt=prompt, worker_id=worker_id)
    stage.world.run(0.1)
    ask(stage, 2, prompt=prompt, worker_id=worker_id)
    stage.world.run(2.0)
    assert len(stage.client.open()) == 4
    assert stage.until_ended() == ["length"] * 4


def test_an_embedding_waits_while_the_only_worker_restarts_its_engine(stage: Stage) -> None:
    frontend = FrontendProcess(stage.world, stage.broker, "w1", restart_s=3.0)
    stage.world.run(0.5)
    frontend.engine_dies()
    at_once = stage.client.embed()
    stage.world.run(0.1)
    later = stage.client.embed()
    stage.world.run(2.0)
    assert not at_once.done()
    assert not later.done()
    stage.world.run_until(lambda: at_once.done() and later.done(), 2.0)
    assert at_once.result().embeddings == later.result().embeddings == [[0.0, 0.0]]


def test_a_request_that_waits_for_a_restart_ends_by_its_own_time_or_with_its_worker(stage: Stage) -> None:
    restarting = ForgedWorker(stage.world, stage.broker, "w1", state=RESTARTING)
    stage.world.run(0.5)
    stage.client.ask(3, timeout_ms=700.0)
    stage.client.ask(3)
    stage.world.run(5.0)
    assert len(stage.client.open()) == 1
    restarting.process.kill()
    assert stage.until_ended(5.0) == ["deadline_exceeded", "no_worker"]


def test_a_request_that_waits_for_a_restart_can_be_cancelled(stage: Stage) -> None:
    ForgedWorker(stage.world, stage.broker, "w1", state=RESTARTING)
    stage.world.run(0.5)
    for text in (None, "a text"):
        stage.client.ask(3, prompt=text)
    stage.world.run(1.0)
    stage.client.cancel(0)
    stage.client.cancel(1)
    assert stage.until_ended(1.0) == ["cancelled", "cancelled"]


def test_a_worker_that_drains_is_not_waited_for(stage: Stage) -> None:
    ForgedWorker(stage.world, stage.broker, "w1", state=messages.WorkerState.DRAINING)
    stage.world.run(0.5)
    ask(stage, 1)
    assert stage.until_ended(0.5) == ["no_worker"]


def test_what_nobody_serves_is_told_in_the_same_words_at_every_entrance(stage: Stage) -> None:
    served_once = ForgedWorker(stage.world, stage.broker, "w1", model="once")
    stage.world.run(0.5)
    served_once.process.kill()
    stage.world.run(5.0)
    assert _at_every_entrance(stage, "never") == {errors.Code.NO_WORKER}, "the router is young"
    stage.world.run(60.0)
    assert _at_every_entrance(stage, "once") == {errors.Code.NO_WORKER}
    assert _at_every_entrance(stage, "never") == {errors.Code.MODEL_NOT_FOUND}


def _at_every_entrance(stage: Stage, model: str) -> set[errors.Code]:
    stage.client.ask(3, model=model)
    stage.client.ask(3, model=model, prompt="a text")
    embedding = stage.client.embed(model)
    codes = {errors.Code(end) for end in stage.until_ended(1.0)[-2:]}
    stage.world.run_until(embedding.done, 1.0)
    refused = embedding.exception()
    assert isinstance(refused, errors.RequestError)
    return codes | {refused.error.code}
