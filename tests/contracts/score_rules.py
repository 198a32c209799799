"""Rules of the contract about the log probabilities of prompts."""

import pytest

from tests.contracts.driving import prompt, request, run, settled, start
from tests.contracts.resume_rules import resumed
from tests.support.engines import Recorder
from tokenbus.worker.contract import contract, prompt_logprobs
from tokenbus.worker.contract.prompt_logprobs import ScoredToken

_TOLERANCE = 0.02
"""Flash attention rounds to 16 bits, by where in a batch a token stands."""


def scores_of(recorder: Recorder, num_alternatives: int) -> list[ScoredToken]:
    return [
        one for output in recorder.outputs for one in prompt_logprobs.unpack(output.prompt_logprobs, num_alternatives)
    ]


async def fed(
    engine: contract.Engine, config: contract.EngineConfig, token_ids: list[int], count: int
) -> list[tuple[float, list[tuple[int, float]]]]:
    """The log probability of each token after the first, and the likeliest ones, as those of a token that was sampled:
    one request for each position, whose logits are biased to give that very token."""
    found = []
    for place in range(1, len(token_ids)):
        biased = request(
            token_ids[:place], max_tokens=1, logprobs=count, logit_bias=((token_ids[place], 1e5),), cache=False
        )
        (one,) = (one for output in (await run(engine, biased)).outputs for one in output.logprobs)
        assert one.token_id == token_ids[place] or "logit_bias" not in config.features
        found.append((one.logprob, list(one.top)))
    return found


def check(
    scores: list[ScoredToken], token_ids: list[int], truth: list[tuple[float, list[tuple[int, float]]]], first: int
) -> None:
    """Checks the log probabilities of a prompt from position `first` on."""
    assert [one.token_id for one in scores] == token_ids[first:]
    if not first:
        assert (scores[0].logprob, scores[0].rank, scores[0].top) == (None, None, [])
        scores, first = scores[1:], 1
    for one, (logprob, top) in zip(scores, truth[first - 1 :], strict=True):
        assert one.logprob == pytest.approx(logprob, abs=_TOLERANCE)
        assert [value for _, value in one.top] == pytest.approx([value for _, value in top], abs=_TOLERANCE)
        assert one.rank is not None
        within = [token_id for token_id, _ in one.top[: one.rank]]
        near = [value for _, value in one.top if abs(value - logprob) < 2 * _TOLERANCE]
        assert len(near) > 1 or one.rank > len(one.top) or within[-1] == one.token_id


async def scores_a_prompt_as_if_it_had_sampled_it(engine: contract.Engine, config: contract.EngineConfig) -> None:
    if not {"prompt_logprobs", "logit_bias"} <= set(config.features):
        return
    token_ids = prompt(config, 3, 24)
    truth = await fed(engine, config, token_ids, 3)
    beside = start(engine, request(prompt(config, 4), max_tokens=100))
    asked = {"prompt_logprobs": 3, "max_tokens": 2}
    uncached = await run(engine, request(token_ids, **asked))
    check(scores_of(uncached, 3), token_ids, truth, 0)
    cached = await run(engine, request(token_ids, **asked))
    check(scores_of(cached, 3), token_ids, truth, 0)
    usage = cached.outputs[-1].usage
    assert usage is not None
    assert usage.cached_tokens == 0
    late = await run(engine, request(token_ids, prompt_logprobs_from=20, **asked))
    check(scores_of(late, 3), token_ids, truth, 20)
    assert uncached.token_ids == cached.token_ids == late.token_ids
    await beside.terminal()
    await settled(engine)


async def scores_as_much_as_is_asked_for(engine: contract.Engine, config: contract.EngineConfig) -> None:
    if "prompt_logprobs" not in config.features:
        return
    long = prompt(config, 5, min(200, config.context_length - 8))
    for token_ids, count, first in (([9], 2, 0), (long, 0, 0), (long, 20, 150), (long, 1, 1), (long, 2, len(long))):
        asked = request(token_ids, prompt_logprobs=count, prompt_logprobs_from=first, max_tokens=1)
        scores = scores_of(await run(engine, asked), count)
        assert [one.token_id for one in scores] == token_ids[first:]
        assert all(len(one.top) == (0 if one.logprob is None else count) for one in scores)
        assert all(one.logprob is None or one.logprob <= 0 for one in scores)
    await settled(engine)


async def scores_prompts_beside_each_other(engine: contract.Engine, config: contract.EngineConfig) -> None:
    if "prompt_logprobs" not in config.features:
        return
    prompts = [prompt(config, 6, 60), prompt(config, 7, 90), prompt(config, 6, 60)]
    alone = [scores_of(await run(engine, request(one, prompt_logprobs=1, max_tokens=1)), 1) for one in prompts]
    recorders = [start(engine, request(one, prompt_logprobs=1, max_tokens=4)) for one in prompts]
    plain = start(engine, request(prompts[0], max_tokens=4))
    for recorder, expected in zip(recorders, alone, strict=True):
        await recorder.terminal()
        seen = scores_of(recorder, 1)
        assert [one.token_id for one in seen] == [one.token_id for one in expected]
        assert [one.logprob for one in seen[1:]] == pytest.approx([one.logprob for one in expected[1:]], abs=0.05)
    await plain.terminal()
    assert not scores_of(plain, 1)
    await settled(engine)


async def scores_the_prompt_of_a_continued_answer(engine: contract.Engine, config: contract.EngineConfig) -> None:
    if "prompt_logprobs" not in config.features:
        return
    token_ids = prompt(config, 8, 20)
    asked = request(token_ids, max_tokens=8, prompt_logprobs=1)
    whole = await run(engine, asked)
    plain = [output for output in whole.outputs if not output.prompt_logprobs]
    assert len(plain) == len(whole.outputs) - 1
    given = Recorder()
    given.outputs = plain
    again = await run(engine, resumed(asked, given, 3))
    assert again.token_ids == whole.token_ids
    assert [one.token_id for one in scores_of(again, 1)] == token_ids
    await settled(engine)


RULES = (
    scores_a_prompt_as_if_it_had_sampled_it,
    scores_as_much_as_is_asked_for,
    scores_prompts_beside_each_other,
    scores_the_prompt_of_a_continued_answer,
)
