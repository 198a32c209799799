"""Rules of the contract about requests whose reasoning has a limit."""

import msgspec

from tests.contracts.driving import new_key, prompt, request, run, settled, start
from tests.support.engines import Recorder
from tokenbus.protocol.wire import messages
from tokenbus.worker.chat_format.answer_grammar import reasoning_grammar
from tokenbus.worker.chat_format.reasoning_budget import MAX_WAIT
from tokenbus.worker.contract import contract, engine_request

_MARKER = 8
"""More tokens than any marker has."""


def closes_reasoning(config: contract.EngineConfig) -> bool:
    return "reasoning_budget" in config.features


def reasoning(
    config: contract.EngineConfig, budget: int, number: int = 0, message: str = "", **sampling: object
) -> engine_request.EngineRequest:
    """A request whose answer begins inside the reasoning, which it does not end by itself."""
    assert config.chat_format is not None
    assert config.chat_format.reasoning is not None
    form = config.chat_format
    parsing = engine_request.OutputParsing(generation_prompt=form.reasoning.open if form.reasoning else None)
    limit = engine_request.ReasoningLimit(max_tokens=budget, parsing=parsing, message=message)
    never = tuple((token_id, -1e6) for token_id in sorted(form.tokens.values()))
    lively = {"max_tokens": 60, "temperature": 1.0, "seed": number, "logit_bias": never}
    asked = request(prompt(config, number), **(lively | sampling))  # type: ignore[arg-type]
    return msgspec.structs.replace(asked, parsing=parsing, reasoning_limit=limit)


async def check_every_prefix(engine: contract.Engine, asked: engine_request.EngineRequest) -> Recorder:
    """Continues an answer after each of its tokens but the last; returns the undisturbed one."""
    whole = await run(engine, asked)
    for count in range(1, len(whole.token_ids)):
        given = engine_request.ResumedCompletion(token_ids=whole.token_ids[:count])
        again = await run(engine, msgspec.structs.replace(asked, key=new_key(), resumed=given))
        assert (again.token_ids, again.text) == (whole.token_ids, whole.text), count
    return whole


async def closes_reasoning_after_its_tokens(engine: contract.Engine, config: contract.EngineConfig) -> None:
    if not closes_reasoning(config):
        return
    asked = [reasoning(config, most, number) for number, most in enumerate((0, 1, 5, 20, 40))]
    recorders = [start(engine, one) for one in asked]
    for one, recorder in zip(asked, recorders, strict=True):
        usage = (await recorder.terminal()).usage
        assert usage
        assert one.reasoning_limit is not None
        most = one.reasoning_limit.max_tokens
        assert isinstance(usage.reasoning_tokens, int)
        assert most < usage.reasoning_tokens <= most + MAX_WAIT + _MARKER
        assert recorder.text, "the answer continues"
    free = reasoning(config, 1_000)
    usage = (await run(engine, free)).outputs[-1].usage
    assert usage is not None
    assert usage.reasoning_tokens == 60
    await settled(engine)


async def ends_reasoning_with_a_message(engine: contract.Engine, config: contract.EngineConfig) -> None:
    if not closes_reasoning(config):
        return
    whole = await run(engine, reasoning(config, 5, message="That is enough."))
    assert "".join(output.reasoning for output in whole.outputs).endswith("\n\nThat is enough.")
    assert whole.text
    await settled(engine)


async def continues_after_any_token_of_closed_reasoning(engine: contract.Engine, config: contract.EngineConfig) -> None:
    if not closes_reasoning(config):
        return
    asked = reasoning(config, 5, message="Enough.", max_tokens=24)
    await check_every_prefix(engine, asked)
    await settled(engine)


async def closes_reasoning_the_same_with_log_probabilities(
    engine: contract.Engine, config: contract.EngineConfig
) -> None:
    """And gives one for each token, although some are known without a row."""
    if not closes_reasoning(config):
        return
    asked = reasoning(config, 7, max_tokens=24)
    whole = await run(engine, asked)
    sampling = msgspec.structs.replace(asked.sampling, logprobs=1)
    seen = await run(engine, msgspec.structs.replace(asked, key=new_key(), sampling=sampling))
    assert seen.token_ids == whole.token_ids
    assert [one.token_id for output in seen.outputs for one in output.logprobs] == whole.token_ids
    await settled(engine)


async def closes_reasoning_in_front_of_a_constraint(engine: contract.Engine, config: contract.EngineConfig) -> None:
    if not closes_reasoning(config) or "structured_output" not in config.features:
        return
    assert config.chat_format is not None
    constraint = engine_request.Constraint(
        kind=engine_request.ConstraintKind.REGEX,
        source="[0-9]{3}#",
        param="regex",
        preamble=reasoning_grammar(config.chat_format, in_reasoning=True),
    )
    asked = reasoning(config, 6, ignore_eos=False, max_tokens=24)
    asked = msgspec.structs.replace(asked, constraint=constraint)
    whole = await check_every_prefix(engine, asked)
    assert whole.outputs[-1].finish_reason is messages.FinishReason.STOP
    assert len(whole.text) == 4
    assert whole.text[:3].isdigit()
    await settled(engine)


async def ends_at_limits_and_stops_within_what_closes_reasoning(
    engine: contract.Engine, config: contract.EngineConfig
) -> None:
    if not closes_reasoning(config):
        return
    asked = reasoning(config, 3, message="That is enough.", max_tokens=24)
    whole = await run(engine, asked)
    for most in range(1, len(whole.token_ids)):
        sampling = msgspec.structs.replace(asked.sampling, max_tokens=most)
        cut = await run(engine, msgspec.structs.replace(asked, key=new_key(), sampling=sampling))
        assert (cut.token_ids, cut.outputs[-1].finish_reason) == (whole.token_ids[:most], "length")
    stopped = await run(engine, msgspec.structs.replace(asked, key=new_key(), stop=("is en",)))
    assert stopped.outputs[-1].stop_match == "is en"
    assert "".join(output.reasoning for output in stopped.outputs).endswith("That ")
    assert stopped.text == ""
    assert stopped.outputs[-1].usage is not None
    assert stopped.outputs[-1].usage.completion_tokens == len(stopped.token_ids) < len(whole.token_ids)
    await settled(engine)


RULES = (
    closes_reasoning_after_its_tokens,
    ends_reasoning_with_a_message,
    continues_after_any_token_of_closed_reasoning,
    closes_reasoning_the_same_with_log_probabilities,
    closes_reasoning_in_front_of_a_constraint,
    ends_at_limits_and_stops_within_what_closes_reasoning,
)
