"""Rules of the contract about completions that another worker has begun."""

import asyncio

import msgspec
import pytest

from tests.contracts.driving import new_key, prompt, request, run, settled, start
from tests.support.engines import Recorder
from tokenbus.protocol.wire import errors, messages
from tokenbus.worker.contract import contract, engine_request

_LIVELY = {"temperature": 1.2, "top_k": 0, "top_p": 1.0, "seed": 7}
_PENALIZED = _LIVELY | {"presence_penalty": 0.5, "frequency_penalty": 0.5, "repetition_penalty": 1.2}


def resumed(
    asked: engine_request.EngineRequest, whole: Recorder, count: int, *, with_logprobs: bool = False
) -> engine_request.EngineRequest:
    """Returns the request that continues an answer after its first `count` tokens."""
    logprobs = [one for output in whole.outputs[:count] for one in output.logprobs] if with_logprobs else []
    usage = whole.outputs[-1].usage
    assert usage is not None
    given = engine_request.ResumedCompletion(
        token_ids=whole.token_ids[:count], logprobs=logprobs, cached_tokens=usage.cached_tokens, elapsed_ms=60_000.0
    )
    return msgspec.structs.replace(asked, key=new_key(), resumed=given)


def check_continued(again: Recorder, whole: Recorder, count: int) -> None:
    """Checks that an answer continued after `count` tokens is what the undisturbed one was."""
    resumed_ids = [output.token_ids for output in again.outputs if output.is_resumed]
    assert resumed_ids == [whole.token_ids[:count]]
    assert again.token_ids == whole.token_ids
    terminal, calm = again.outputs[-1], whole.outputs[-1]
    assert (terminal.finish_reason, terminal.stop_match) == (calm.finish_reason, calm.stop_match)
    assert terminal.usage == calm.usage
    assert terminal.timings is not None
    assert terminal.timings.total_ms >= 60_000
    assert all(output.first_token is None for output in again.outputs)
    # the text of each token too, but for that of the last, whose held back text may come with the terminal
    assert again.texts[: len(whole.outputs) - 1] == whole.texts[:-1]
    assert again.text == whole.text


async def check_every_prefix(engine: contract.Engine, asked: engine_request.EngineRequest) -> Recorder:
    """Continues an answer after each of its tokens, the last included; returns the undisturbed one."""
    whole = await run(engine, asked)
    for count in range(1, len(whole.token_ids) + 1):
        check_continued(await run(engine, resumed(asked, whole, count)), whole, count)
    await settled(engine)
    return whole


async def continues_a_seeded_answer_after_any_token(engine: contract.Engine, config: contract.EngineConfig) -> None:
    await check_every_prefix(engine, request(prompt(config), **_LIVELY))


async def continues_with_the_penalties_of_all_tokens(engine: contract.Engine, config: contract.EngineConfig) -> None:
    await check_every_prefix(engine, request(prompt(config), **_PENALIZED))


async def continues_across_stop_strings(engine: contract.Engine, config: contract.EngineConfig) -> None:
    free = await run(engine, request(prompt(config), **_LIVELY))
    middle = len(free.text) // 2
    stop = free.text[middle : middle + 5]
    # one that never comes is held back now and then as well
    never = free.text[middle - 4 : middle - 1] + "\x00"
    stopped = await check_every_prefix(engine, request(prompt(config), stop=(never, stop), **_LIVELY))
    assert stopped.outputs[-1].stop_match == stop


async def continues_across_min_tokens(engine: contract.Engine, config: contract.EngineConfig) -> None:
    free = await run(engine, request(prompt(config), **_LIVELY))
    early = tuple(free.token_ids[:12])
    stopped = await check_every_prefix(engine, request(prompt(config), stop_token_ids=early, min_tokens=5, **_LIVELY))
    assert len(stopped.token_ids) > 5
    stop = free.text[:2]
    await check_every_prefix(engine, request(prompt(config), stop=(stop,), min_tokens=3, **_LIVELY))


async def continues_in_the_middle_of_a_character(engine: contract.Engine, config: contract.EngineConfig) -> None:
    def is_half(token: bytes) -> bool:
        return token in (b"\xc3", b"\xe2\x82", b"\xe2")

    half = next((token_id for token_id, token in enumerate(engine.token_bytes) if is_half(token)), None)
    if half is None:  # a vocabulary of whole characters
        return
    given = engine_request.ResumedCompletion(token_ids=[half])
    asked = msgspec.structs.replace(request(prompt(config), max_tokens=6, **_LIVELY), resumed=given)
    recorder = await run(engine, asked)
    assert recorder.outputs[0].text == ""
    whole = b"".join(engine.token_bytes[token_id] for token_id in recorder.token_ids)
    assert recorder.text == whole.decode(errors="replace")


async def keeps_the_log_probabilities_it_is_given(engine: contract.Engine, config: contract.EngineConfig) -> None:
    if "logprobs" not in config.features:
        return
    asked = request(prompt(config), max_tokens=6, logprobs=2, **_LIVELY)
    whole = await run(engine, asked)
    calm = [one for output in whole.outputs for one in output.logprobs]
    for count in range(1, 6):
        again = await run(engine, resumed(asked, whole, count, with_logprobs=True))
        seen = [one for output in again.outputs for one in output.logprobs]
        assert seen[:count] == calm[:count]
        assert [one.token_id for one in seen] == [one.token_id for one in calm]
        assert [one.logprob for one in seen] == pytest.approx([one.logprob for one in calm], abs=1e-3)
        unknown = await run(engine, resumed(asked, whole, count))
        assert [len(output.logprobs) for output in unknown.outputs] == [0] + [1] * (6 - count)


async def ends_what_is_complete_after_it_was_accepted(engine: contract.Engine, config: contract.EngineConfig) -> None:
    asked = request(prompt(config), max_tokens=5)
    whole = await run(engine, asked)
    before = engine.load().generated_tokens
    recorder = start(engine, resumed(asked, whole, 5))
    assert not recorder.terminals
    assert recorder.token_ids == whole.token_ids
    await settled(engine)
    assert (recorder.outputs[-1].token_ids, recorder.outputs[-1].finish_reason) == ([], messages.FinishReason.LENGTH)
    assert engine.load().generated_tokens == before


async def counts_the_given_tokens_of_what_is_cancelled(engine: contract.Engine, config: contract.EngineConfig) -> None:
    asked = request(prompt(config), max_tokens=100)
    whole = await run(engine, asked)
    again = resumed(asked, whole, 40)
    recorder = start(engine, again)
    engine.abort(again.key)
    assert recorder.token_ids == whole.token_ids[:40]
    assert recorder.outputs[-1].finish_reason is messages.FinishReason.CANCELLED
    assert recorder.outputs[-1].usage is not None
    assert recorder.outputs[-1].usage.completion_tokens == 40
    await settled(engine)


async def refuses_what_ends_too_early(engine: contract.Engine, config: contract.EngineConfig) -> None:
    """And what names no tokens of the model, without a word to the sink."""
    whole = await run(engine, request(prompt(config), max_tokens=12, **_LIVELY))
    last, text = whole.token_ids[5], whole.text[:2]
    given = engine_request.ResumedCompletion(token_ids=whole.token_ids)
    unknown = engine_request.ResumedCompletion(token_ids=[config.vocab_size])
    wrong = [
        (request(prompt(config), max_tokens=11), given),
        (request(prompt(config), max_tokens=20, stop_token_ids=(last,)), given),
        (request(prompt(config), max_tokens=20, stop=(text,)), given),
        (request(prompt(config), max_tokens=20), unknown),
    ]
    for asked, beginning in wrong:
        recorder = Recorder()
        with pytest.raises(errors.RequestError) as refusal:
            engine.generate(msgspec.structs.replace(asked, resumed=beginning), recorder)
        assert refusal.value.error.code is errors.Code.INVALID_REQUEST
        assert str(refusal.value.error.param).startswith("resume_from")
        await asyncio.sleep(0)
        assert not recorder.outputs
    await settled(engine)


RULES = (
    continues_a_seeded_answer_after_any_token,
    continues_with_the_penalties_of_all_tokens,
    continues_across_stop_strings,
    continues_across_min_tokens,
    continues_in_the_middle_of_a_character,
    keeps_the_log_probabilities_it_is_given,
    ends_what_is_complete_after_it_was_accepted,
    counts_the_given_tokens_of_what_is_cancelled,
    refuses_what_ends_too_early,
)
