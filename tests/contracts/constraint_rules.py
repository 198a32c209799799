"""Rules of the contract about requests whose output is constrained."""

import asyncio
import json
import re

import msgspec

from tests.contracts.driving import new_key, prompt, request, run, settled, start
from tests.support.engines import Recorder
from tests.support.tiny_vocabulary import preamble_until
from tokenbus.protocol.wire import errors, messages
from tokenbus.worker.contract import contract, engine_request

KINDS = engine_request.ConstraintKind
_LIVELY = {"temperature": 1.3, "top_k": 0, "top_p": 1.0, "seed": 5, "ignore_eos": False}
_SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 6},
        "kind": {"enum": ["first", "second"]},
        "sizes": {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 99}, "maxItems": 3},
    },
    "required": ["name", "kind", "sizes"],
    "additionalProperties": False,
}


def json_schema(schema: object) -> engine_request.Constraint:
    return engine_request.Constraint(kind=KINDS.JSON_SCHEMA, source=json.dumps(schema), param="response_format")


def regex(source: str, after: int | str | None = None) -> engine_request.Constraint:
    preamble = "" if after is None else preamble_until(after)
    return engine_request.Constraint(kind=KINDS.REGEX, source=source, param="regex", preamble=preamble)


def constrained(
    token_ids: list[int], constraint: engine_request.Constraint, **sampling: object
) -> engine_request.EngineRequest:
    asked = request(token_ids, **({"max_tokens": 100} | _LIVELY | sampling))  # type: ignore[arg-type]
    return msgspec.structs.replace(asked, constraint=constraint)


def keeps_constraints(config: contract.EngineConfig) -> bool:
    return "structured_output" in config.features


def check_json(text: str) -> None:
    value = json.loads(text)
    assert list(value) == ["name", "kind", "sizes"]
    assert len(value["name"]) <= 6
    assert value["kind"] in ("first", "second")
    assert len(value["sizes"]) <= 3
    assert all(0 <= size <= 99 for size in value["sizes"])
    # in the form that the engine writes: no other white space
    assert text.startswith('{"name": "')


CONSTRAINTS: list[tuple[engine_request.Constraint, str]] = [
    (regex("[ab]{3,9}(cd)?"), "[ab]{3,9}(cd)?"),
    (regex("the first of [0-9]{1,3}"), "the first of [0-9]{1,3}"),
    (
        engine_request.Constraint(kind=KINDS.CHOICE, source='["yes", "no\\"\\\\", "perhaps"]', param="choice"),
        r'yes|no"\\|perhaps',
    ),
    (
        engine_request.Constraint(kind=KINDS.GBNF, source='root ::= item+ "."\nitem ::= [x-z] " "? ', param="grammar"),
        r"([x-z] ?)+\.",
    ),
    (
        engine_request.Constraint(kind=KINDS.LARK, source='start: "<" /[a-c]{2}/ ">" start?', param="grammar"),
        "(<[a-c]{2}>)+",
    ),
]
"""And a regular expression for what each accepts."""


async def keeps_to_a_constraint_of_each_kind(engine: contract.Engine, config: contract.EngineConfig) -> None:
    if not keeps_constraints(config):
        return
    for number in range(3):
        for constraint, accepted in CONSTRAINTS:
            whole = await run(engine, constrained(prompt(config, number), constraint, seed=number))
            reason = whole.outputs[-1].finish_reason
            assert reason is messages.FinishReason.STOP or len(whole.token_ids) == 100
            if reason is messages.FinishReason.STOP:
                assert re.fullmatch(accepted, whole.text), whole.text
                assert whole.outputs[-1].stop_match in config.end_token_ids
    await settled(engine)


async def writes_json_of_a_schema(engine: contract.Engine, config: contract.EngineConfig) -> None:
    if not keeps_constraints(config):
        return
    asked = [constrained(prompt(config, n), json_schema(_SCHEMA), seed=n, temperature=n / 2) for n in range(4)]
    recorders = [start(engine, one) for one in asked]
    for recorder in recorders:
        assert (await recorder.terminal()).finish_reason is messages.FinishReason.STOP
        check_json(recorder.text)
    # alone, each says the same
    for one, recorder in zip(asked, recorders, strict=True):
        again = await run(engine, msgspec.structs.replace(one, key=new_key()))
        assert (again.token_ids, again.text) == (recorder.token_ids, recorder.text)
    await settled(engine)


async def continues_constrained_answers_after_any_token(engine: contract.Engine, config: contract.EngineConfig) -> None:
    if not keeps_constraints(config):
        return
    asked = constrained(prompt(config), json_schema(_SCHEMA))
    whole = await run(engine, asked)
    for count in range(1, len(whole.token_ids) + 1):
        given = engine_request.ResumedCompletion(token_ids=whole.token_ids[:count])
        again = await run(engine, msgspec.structs.replace(asked, key=new_key(), resumed=given))
        assert (again.token_ids, again.text) == (whole.token_ids, whole.text)
        assert again.outputs[-1].finish_reason is messages.FinishReason.STOP
    await settled(engine)


async def samples_the_same_with_log_probabilities(engine: contract.Engine, config: contract.EngineConfig) -> None:
    """And gives one for each token, although some could be known without a row."""
    if not keeps_constraints(config) or "logprobs" not in config.features:
        return
    asked = constrained(prompt(config), json_schema(_SCHEMA))
    whole = await run(engine, asked)
    sampling = msgspec.structs.replace(asked.sampling, logprobs=2)
    seen = await run(engine, msgspec.structs.replace(asked, key=new_key(), sampling=sampling))
    assert seen.token_ids == whole.token_ids
    assert [one.token_id for output in seen.outputs for one in output.logprobs] == whole.token_ids
    await settled(engine)


async def holds_to_lengths_and_stops(engine: contract.Engine, config: contract.EngineConfig) -> None:
    if not keeps_constraints(config):
        return
    asked = constrained(prompt(config), json_schema(_SCHEMA))
    whole = await run(engine, asked)
    for most in range(1, len(whole.token_ids)):
        sampling = msgspec.structs.replace(asked.sampling, max_tokens=most)
        cut = await run(engine, msgspec.structs.replace(asked, key=new_key(), sampling=sampling))
        assert (cut.token_ids, cut.outputs[-1].finish_reason) == (whole.token_ids[:most], "length")
    stopped = await run(engine, msgspec.structs.replace(asked, key=new_key(), stop=('", "kind',)))
    assert stopped.outputs[-1].stop_match == '", "kind'
    assert stopped.text == whole.text[: whole.text.index('", "kind')]
    assert stopped.outputs[-1].usage is not None
    assert stopped.outputs[-1].usage.completion_tokens == len(stopped.token_ids)
    await settled(engine)


async def gives_min_tokens_up_where_only_the_end_may_follow(
    engine: contract.Engine, config: contract.EngineConfig
) -> None:
    if not keeps_constraints(config):
        return
    short = await run(engine, constrained(prompt(config), regex("abc"), min_tokens=50))
    assert (short.text, short.outputs[-1].finish_reason) == ("abc", messages.FinishReason.STOP)
    # where more may follow, it must
    long = await run(engine, constrained(prompt(config), regex("a+"), min_tokens=50))
    assert len(long.token_ids) > 50
    assert set(long.text) == {"a"}
    await settled(engine)


async def leaves_the_output_free_up_to_a_marker(engine: contract.Engine, config: contract.EngineConfig) -> None:
    if not keeps_constraints(config):
        return
    marker = next(n for n, token in enumerate(engine.token_bytes) if token == b"e" and n not in config.end_token_ids)
    for after in (marker, "e"):
        # greedy models may never say it
        bias = ((marker, 8.0),)
        asked = constrained(prompt(config), regex("[0-9]{2}#", after), logit_bias=bias, max_tokens=200)
        whole = await run(engine, asked)
        assert whole.outputs[-1].finish_reason is messages.FinishReason.STOP
        free = "[^e]*e" if after == "e" else "(?s:.*)e"  # other tokens may have the letter too
        assert re.fullmatch(free + r"\s{0,4}[0-9]{2}#", whole.text), whole.text
    await settled(engine)


async def says_when_a_constraint_is_compiled(engine: contract.Engine, config: contract.EngineConfig) -> None:
    if not keeps_constraints(config):
        return
    whole = await run(engine, constrained(prompt(config), regex("ab?")))
    first, *others = whole.outputs
    assert (first.is_constraint_ready, first.token_ids, first.text) == (True, [], "")
    assert not any(output.is_constraint_ready for output in others)
    await settled(engine)


async def refuses_a_wrong_constraint_in_a_terminal_alone(
    engine: contract.Engine, config: contract.EngineConfig
) -> None:
    if not keeps_constraints(config):
        return
    neighbour = start(engine, request(prompt(config, 1), max_tokens=60))
    wrong = [
        regex("(a"),
        json_schema({"type": "poem"}),
        engine_request.Constraint(kind=KINDS.GBNF, source="root ::= none", param="grammar"),
        engine_request.Constraint(kind=KINDS.LARK, source="start: none", param="grammar"),
    ]
    for constraint in wrong:
        recorder = await run(engine, constrained(prompt(config), constraint))
        assert len(recorder.outputs) == 1
        terminal = recorder.outputs[0]
        assert terminal.error is not None
        assert (terminal.error.code, terminal.error.param) == (errors.Code.INVALID_REQUEST, constraint.param)
        assert "\n" not in terminal.error.message
    given = engine_request.ResumedCompletion(token_ids=prompt(config, 3))
    asked = msgspec.structs.replace(constrained(prompt(config), regex("\x00\x00")), resumed=given)
    recorder = await run(engine, asked)
    assert recorder.outputs[-1].error is not None
    assert recorder.outputs[-1].error.param == "resume_from.token_ids"
    assert (await neighbour.terminal()).finish_reason is messages.FinishReason.LENGTH
    await settled(engine)


async def cancels_while_a_constraint_is_compiled(engine: contract.Engine, config: contract.EngineConfig) -> None:
    if not keeps_constraints(config):
        return
    slow = {"type": "object", "properties": {f"p{n}": {"type": "string"} for n in range(400)}}
    asked = [constrained(prompt(config), json_schema(slow | {"title": new_key()})) for _ in range(3)]
    recorders: list[Recorder] = [start(engine, one) for one in asked]
    await asyncio.sleep(0)
    for one in asked:
        engine.abort(one.key)
    for recorder in recorders:
        assert [output.finish_reason for output in recorder.outputs] == [messages.FinishReason.CANCELLED]
    await settled(engine)


RULES = (
    keeps_to_a_constraint_of_each_kind,
    writes_json_of_a_schema,
    continues_constrained_answers_after_any_token,
    samples_the_same_with_log_probabilities,
    holds_to_lengths_and_stops,
    gives_min_tokens_up_where_only_the_end_may_follow,
    leaves_the_output_free_up_to_a_marker,
    says_when_a_constraint_is_compiled,
    refuses_a_wrong_constraint_in_a_terminal_alone,
    cancels_while_a_constraint_is_compiled,
)
