"""A run becomes the engine's request. Its sampling is its own where it says so, else the model's, else the wire's."""

from array import array

import pytest

from tests.support.arithmetic import make_config
from tests.worker.engine_client.test_parsed_generation import FORMAT, RULES
from tokenbus.protocol.wire import block_hash, codec, errors, internal
from tokenbus.protocol.wire.params import (
    GenerationParams,
    JsonSchema,
    ReasoningOptions,
    ResponseFormat,
    SamplingParams,
)
from tokenbus.worker.contract import engine_output, engine_request
from tokenbus.worker.settings.settings import FrontendSettings
from tokenbus.worker.streams import replay_buffer
from tokenbus.worker.streams.run_request import (
    resolve_sampling,
    sampling_report,
    to_constraint,
    to_engine_request,
)

OWN = SamplingParams(temperature=0.3, top_p=0.8, top_k=20, min_p=0.1, max_tokens=50)


def resolved(
    prompt_tokens: int = 10,
    *,
    context_length: int = 100,
    defaults: SamplingParams = SamplingParams(),  # noqa: B008
    max_new_tokens: int = 40,
    **params: object,
) -> engine_request.Sampling:
    config = make_config(context_length=context_length, defaults=defaults)
    return resolve_sampling(GenerationParams(**params), prompt_tokens, config, max_new_tokens)  # type: ignore[arg-type]


def test_a_request_without_settings_gets_the_wires_defaults() -> None:
    sampling = resolved()
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p) == (0.7, 0.9, 40, 0.0)
    assert (sampling.min_tokens, sampling.stop_token_ids, sampling.ignore_eos) == (0, (), False)
    assert (sampling.repetition_penalty, sampling.repetition_last_n, sampling.has_penalties) == (1.0, 64, False)
    assert (sampling.presence_penalty, sampling.frequency_penalty) == (0.0, 0.0)
    assert (sampling.logit_bias, sampling.logprobs) == ((), None)


def test_a_client_may_learn_of_all_that_was_filled_in() -> None:
    report = sampling_report(resolved(defaults=OWN, top_p=0.5))
    assert (report.top_p, report.temperature, report.max_tokens) == (0.5, OWN.temperature, OWN.max_tokens)


def test_the_models_defaults_come_before_the_wires() -> None:
    sampling = resolved(defaults=OWN)
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p) == (0.3, 0.8, 20, 0.1)
    assert sampling.max_tokens == 50


def test_the_requests_own_settings_come_first_even_if_they_are_zero() -> None:
    asked = resolved(defaults=OWN, temperature=0.0, top_p=0.5, top_k=0, min_p=0.0, seed=0, max_tokens=3)
    assert asked == engine_request.Sampling(max_tokens=3, temperature=0.0, top_p=0.5, top_k=0, min_p=0.0, seed=0)


def test_the_rest_of_a_request_is_passed_on() -> None:
    sampling = resolved(min_tokens=4, stop_token_ids=[7, 8], ignore_eos=True)
    assert (sampling.min_tokens, sampling.stop_token_ids, sampling.ignore_eos) == (4, (7, 8), True)


def test_penalties_and_logit_biases_are_passed_on() -> None:
    sampling = resolved(
        repetition_penalty=1.5,
        repetition_last_n=0,
        presence_penalty=-1.0,
        frequency_penalty=0.5,
        logit_bias={7: 1.5, 3: -100.0},
        logprobs=0,
    )
    assert (sampling.repetition_penalty, sampling.repetition_last_n) == (1.5, 0)
    assert (sampling.presence_penalty, sampling.frequency_penalty) == (-1.0, 0.5)
    assert (sampling.logit_bias, sampling.logprobs) == (((3, -100.0), (7, 1.5)), 0)


def test_a_models_repetition_penalty_applies_unless_the_request_turns_it_off() -> None:
    own = SamplingParams(repetition_penalty=1.1)
    assert resolved(defaults=own).repetition_penalty == 1.1
    assert not resolved(defaults=own, repetition_penalty=1.0).has_penalties


@pytest.mark.parametrize(
    ("sampling", "has_penalties"),
    [
        (engine_request.Sampling(max_tokens=1), False),
        (engine_request.Sampling(max_tokens=1, repetition_penalty=1.1), True),
        (engine_request.Sampling(max_tokens=1, presence_penalty=-0.5), True),
        (engine_request.Sampling(max_tokens=1, frequency_penalty=0.5), True),
        (
            engine_request.Sampling(max_tokens=1, repetition_penalty=1.1, presence_penalty=1.0, repetition_last_n=0),
            False,
        ),
    ],
)
def test_penalties_count_where_they_look_at_a_token_and_change_something(
    sampling: engine_request.Sampling, has_penalties: bool
) -> None:
    assert sampling.has_penalties is has_penalties


def test_a_seed_that_nobody_chose_is_random() -> None:
    seeds = {resolved().seed for _ in range(8)}
    assert len(seeds) > 1
    assert all(0 <= seed < 2**32 for seed in seeds)


@pytest.mark.parametrize(
    ("prompt_tokens", "max_tokens", "most"),
    [(10, None, 40), (60, None, 40), (61, None, 39), (10, 90, 90), (10, 91, 90), (99, 5, 1), (10, 1, 1)],
)
def test_a_completion_ends_at_the_setting_or_at_the_context(
    prompt_tokens: int, max_tokens: int | None, most: int
) -> None:
    assert resolved(prompt_tokens, max_tokens=max_tokens).max_tokens == most


def test_the_last_prompt_that_fits_leaves_one_token_and_a_longer_one_is_refused() -> None:
    assert resolved(99).max_tokens == 1
    for prompt_tokens in (100, 101):
        with pytest.raises(errors.RequestError, match=f"{prompt_tokens} tokens.*fit 100") as caught:
            resolved(prompt_tokens)
        assert caught.value.error.code is errors.Code.PROMPT_TOO_LONG


def run(prompt: bytes = b"\1\0\0\0", resume_from: internal.RunResume | None = None, **params: object) -> internal.Run:
    return internal.Run(
        request_id="default:r",
        attempt=1,
        epoch="1-a",
        router_id="router",
        reply="_INBOX.a",
        encoding=codec.Encoding.JSON,
        token_ids=prompt,
        params=GenerationParams(**params),  # type: ignore[arg-type]
        resume_from=resume_from,
    )


def given(*token_ids: int, logprobs: list[engine_output.Logprob] | None = None, **fields: float) -> internal.RunResume:
    packed = replay_buffer.pack_logprobs(logprobs, len(logprobs[0].top)) if logprobs else b""
    return internal.RunResume(token_ids=block_hash.pack_token_ids(token_ids), logprobs=packed, **fields)  # type: ignore[arg-type]


def to_request(asked: internal.Run) -> engine_request.EngineRequest:
    config = make_config(vocab_size=50, features=("generate", "logprobs", "progress"))
    return to_engine_request(asked, config, FrontendSettings(max_new_tokens=40))


def test_a_run_that_continues_a_completion_says_how_it_began() -> None:
    resume = given(7, 8, cached_tokens=16, queue_ms=1.5, prefill_ms=2.5, elapsed_ms=60.0)
    assert to_request(run(resume_from=resume)).resumed == engine_request.ResumedCompletion(
        token_ids=array("I", [7, 8]), cached_tokens=16, queue_ms=1.5, prefill_ms=2.5, elapsed_ms=60.0
    )
    assert to_request(run()).resumed is None


def test_max_tokens_counts_from_the_first_token_of_the_completion() -> None:
    assert to_request(run(resume_from=given(7, 8), max_tokens=9)).sampling.max_tokens == 9
    assert to_request(run(resume_from=given(7, 8))).sampling.max_tokens == 40
    assert to_request(run(resume_from=given(*[7] * 60))).sampling.max_tokens == 60


@pytest.mark.parametrize(
    ("num_resumed", "max_tokens", "most"),
    [(39, None, 40), (40, None, 40), (41, None, 41), (41, 45, 45), (41, 30, 30), (89, 95, 90)],
)
def test_a_completion_that_has_outgrown_this_workers_limits_ends_behind_the_given_tokens(
    num_resumed: int, max_tokens: int | None, most: int
) -> None:
    """At a worker that allows 40 tokens, in a context that has room for 90."""
    asked = GenerationParams(max_tokens=max_tokens)
    config = make_config(context_length=100)
    assert resolve_sampling(asked, 10, config, max_new_tokens=40, num_resumed=num_resumed).max_tokens == most


def test_a_completion_that_continues_reports_no_progress_of_its_prompt() -> None:
    assert to_request(run(return_progress=True)).return_progress
    assert not to_request(run(return_progress=True, resume_from=given(7))).return_progress


def test_log_probabilities_of_the_last_tokens_are_taken() -> None:
    logprobs = [engine_output.Logprob(7, -0.5, [(7, -0.5)]), engine_output.Logprob(8, -2.0, [(49, -0.25)])]
    for known in (logprobs, logprobs[1:], []):
        resumed = to_request(run(resume_from=given(7, 8, logprobs=known), logprobs=1)).resumed
        assert resumed is not None
        assert resumed.logprobs == known


def test_log_probabilities_that_nobody_asked_for_are_left_out() -> None:
    resumed = to_request(run(resume_from=given(7, logprobs=[engine_output.Logprob(7, -0.5)]))).resumed
    assert resumed is not None
    assert resumed.logprobs == []


BAD_LOGPROBS = {
    "of another token": given(7, 8, logprobs=[engine_output.Logprob(7, -0.5, [(7, -0.5)])]),
    "of more tokens": given(8, logprobs=[engine_output.Logprob(one, -0.5, [(7, -0.5)]) for one in (7, 8)]),
    "without alternatives": given(7, logprobs=[engine_output.Logprob(7, -0.5)]),
    "of tokens that do not exist": given(7, logprobs=[engine_output.Logprob(7, -0.5, [(50, -0.5)])]),
    "above 0": given(7, logprobs=[engine_output.Logprob(7, 0.5, [(7, -0.5)])]),
}


@pytest.mark.parametrize("what", BAD_LOGPROBS)
def test_log_probabilities_that_do_not_belong_to_the_tokens_are_refused(what: str) -> None:
    with pytest.raises(errors.RequestError) as caught:
        to_request(run(resume_from=BAD_LOGPROBS[what], logprobs=1))
    assert (caught.value.error.code, caught.value.error.param) == (
        errors.Code.INVALID_REQUEST,
        "resume_from.logprobs",
    )


def test_a_whole_answer_with_log_probabilities_needs_those_of_all_tokens() -> None:
    known = [engine_output.Logprob(one, -0.5) for one in (7, 8)]
    assert to_request(run(resume_from=given(7, 8, logprobs=known), logprobs=0, stream=False)).resumed is not None
    with pytest.raises(errors.RequestError, match="all tokens"):
        to_request(run(resume_from=given(7, 8, logprobs=known[1:]), logprobs=0, stream=False))


@pytest.mark.parametrize(
    ("asked", "param"),
    [
        (run(prompt=b"\1\0"), "token_ids"),
        (run(prompt=b""), "token_ids"),
        (run(resume_from=internal.RunResume(token_ids=b"\1\0\0")), "resume_from.token_ids"),
    ],
)
def test_tokens_that_are_no_whole_numbers_are_refused(asked: internal.Run, param: str) -> None:
    with pytest.raises(errors.RequestError) as caught:
        to_request(asked)
    assert (caught.value.error.code, caught.value.error.param) == (errors.Code.INVALID_REQUEST, param)


@pytest.mark.parametrize(
    ("asked", "kind", "source", "param"),
    [
        (
            {"response_format": ResponseFormat(type="json_object")},
            "json_schema",
            '{"type":"object"}',
            "response_format",
        ),
        (
            {"response_format": ResponseFormat(type="json_schema", json_schema=JsonSchema(schema={"b": 1, "a": 2}))},
            "json_schema",
            '{"b":1,"a":2}',
            "response_format.json_schema.schema",
        ),
        ({"regex": "a+"}, "regex", "a+", "regex"),
        ({"choice": ["b", "a"]}, "choice", '["b","a"]', "choice"),
        ({"grammar": 'root ::= "a"'}, "gbnf", 'root ::= "a"', "grammar"),
        ({"grammar": '# x\n\n some-rule  ::= "a"'}, "gbnf", '# x\n\n some-rule  ::= "a"', "grammar"),
        ({"grammar": 'start: "::="'}, "lark", 'start: "::="', "grammar"),
    ],
)
def test_a_constraint_names_the_field_that_it_comes_from(
    asked: dict[str, object], kind: str, source: str, param: str
) -> None:
    constraint = to_constraint(GenerationParams(**asked))  # type: ignore[arg-type]
    assert constraint == engine_request.Constraint(kind=engine_request.ConstraintKind(kind), source=source, param=param)


def test_a_text_of_any_kind_is_no_constraint() -> None:
    empty: list[dict[str, object]] = [{}, {"response_format": ResponseFormat(type="text")}, {"regex": "", "choice": []}]
    for asked in empty:
        assert to_constraint(GenerationParams(**asked)) is None  # type: ignore[arg-type]


def limited(max_prompt_tokens: int) -> FrontendSettings:
    return FrontendSettings(max_new_tokens=40, max_prompt_tokens=max_prompt_tokens)


def test_a_prompt_that_is_longer_than_its_worker_allows_is_refused_unless_another_one_has_begun_it() -> None:
    config = make_config(context_length=100)
    asked = run(block_hash.pack_token_ids(range(1, 31)))
    assert len(to_engine_request(asked, config, limited(30)).token_ids) == 30
    with pytest.raises(errors.RequestError) as refused:
        to_engine_request(asked, config, limited(29))
    error = refused.value.error
    assert (error.code, error.prompt_tokens, error.context_length) == (errors.Code.PROMPT_TOO_LONG, 30, 30)
    begun = codec.replace(asked, resume_from=internal.RunResume(token_ids=block_hash.pack_token_ids([4])))
    assert len(to_engine_request(begun, config, limited(29)).token_ids) == 30


def limit_of(
    features: tuple[str, ...] = ("generate", "reasoning_budget"), *, takes_effort: bool = False, **params: object
) -> engine_request.ReasoningLimit | None:
    asked = codec.replace(run(**params), is_chat=True)
    config = make_config(features=features, chat_format=codec.replace(FORMAT, takes_effort=takes_effort))
    return to_engine_request(
        asked, config, FrontendSettings(max_new_tokens=40, reasoning_budget_message="Enough."), RULES
    ).reasoning_limit


def test_a_budget_for_reasoning_is_passed_on_with_how_reasoning_is_told_apart() -> None:
    for parse_output in (None, False):
        limit = limit_of(reasoning=ReasoningOptions(max_tokens=7), parse_output=parse_output)
        parsing = engine_request.OutputParsing(generation_prompt="")
        assert limit == engine_request.ReasoningLimit(max_tokens=7, parsing=parsing, message="Enough.")
    assert limit_of() is None


@pytest.mark.parametrize(("max_tokens", "most"), [(50, 10), (None, 8)])
def test_an_effort_is_a_share_of_the_answers_tokens_unless_the_template_reads_it(
    max_tokens: int | None, most: int
) -> None:
    low = ReasoningOptions(effort="low")
    limit = limit_of(reasoning=low, max_tokens=max_tokens)
    assert limit is not None
    assert limit.max_tokens == most
    assert limit_of(reasoning=low, max_tokens=max_tokens, takes_effort=True) is None


def test_an_engine_that_cannot_close_reasoning_refuses_a_budget_unless_it_is_optional() -> None:
    bare = ("generate",)
    with pytest.raises(errors.RequestError) as refusal:
        limit_of(bare, reasoning=ReasoningOptions(max_tokens=7))
    assert (refusal.value.error.code, refusal.value.error.param) == (errors.Code.UNSUPPORTED, "reasoning.max_tokens")
    assert limit_of(bare, reasoning=ReasoningOptions(max_tokens=7, optional=True)) is None
    assert limit_of(bare, reasoning=ReasoningOptions(effort="low")) is None
