"""The sampler takes what a constraint allows and what it forces, and changes nothing else."""

from array import array

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.sampling import asked, some_logits
from tests.support.tiny_vocabulary import END, OTHER_END, TOKENS, compiler, constraint, decode, encode
from tokenbus.worker.contract import engine_request
from tokenbus.worker.engine.constraints.grammar import ConstraintError
from tokenbus.worker.engine.constraints.matcher import Matcher
from tokenbus.worker.engine.device import draws
from tokenbus.worker.engine.device.draws import Matrix
from tokenbus.worker.engine.device.sampler import Sampler
from tokenbus.worker.engine.scheduling.plan import SampledToken
from tokenbus.worker.engine.scheduling.sequence import EngineFinishReason, Sequence

COMPILER = compiler()
ENDS = frozenset({END, OTHER_END})
VOCAB = len(TOKENS)


def sequence(source: str | None, sampling: engine_request.Sampling, seq_no: int = 1) -> Sequence:
    matcher = None if source is None else COMPILER.compile(constraint("regex", source))
    return Sequence(seq_no, array("I", [7]), sampling, ENDS, matcher=matcher)


def sample(logits: Matrix, *sequences: Sequence) -> list[SampledToken | EngineFinishReason]:
    sampler = Sampler(ENDS, VOCAB)
    for one in sequences:
        sampler.add_sequence(one.seq_no, one.sampling)
    return sampler.sample(logits.copy(), sequences)


def run(one: Sequence, num_steps: int = 200) -> list[int]:
    """Samples from logits that depend on the place only, until the sequence ends; returns all of its tokens."""
    sampler = Sampler(ENDS, VOCAB)
    sampler.add_sequence(one.seq_no, one.sampling)
    for _ in range(num_steps):
        (result,) = sampler.sample(some_logits(one.num_sampled, 1, VOCAB), [one])
        assert isinstance(result, SampledToken), result
        one.num_computed = one.num_tokens
        if one.append(result.token_ids) is not None:
            break
    return list(one.token_ids[1:])


@settings(max_examples=200, deadline=None)
@given(
    st.one_of(st.just(0.0), st.floats(0.01, 3)),
    st.sampled_from([0, 1, 2, 40, 300, 10_000]),
    st.floats(0.01, 1),
    st.floats(0, 1),
    st.integers(0, 2**32 - 1),
)
def test_whatever_the_parameters_only_allowed_tokens_are_taken(
    temperature: float, top_k: int, top_p: float, min_p: float, seed: int
) -> None:
    sampling = asked(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, seed=seed, max_tokens=100)
    tokens = run(sequence("[xyz]{1,4}=[0-9]{2}", sampling))
    assert tokens[-1] in ENDS
    text = decode(tokens)
    assert set(text[:-3]) <= set("xyz")
    assert text[-3] == "="


@pytest.mark.parametrize("top_k", [0, 3, 40, 300])
@pytest.mark.parametrize("u", [1.0, 1 - 2**-53])
def test_a_uniform_number_that_rounds_to_one_draws_no_token_that_is_ruled_out(
    u: float, top_k: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(draws, "uniform", lambda seed, position: u)
    for number in range(20):
        one = sequence("[a-e]", asked(temperature=1.5, top_k=top_k))
        (result,) = sample(some_logits(number, 1, VOCAB), one)
        assert isinstance(result, SampledToken)
        assert TOKENS[result.token_id] in (b"a", b"b", b"c", b"d", b"e")


def test_forced_tokens_follow_the_one_before_them() -> None:
    logits = some_logits(1, 1, VOCAB)
    (result,) = sample(logits, sequence("[xy]z{5}", asked(max_tokens=50)))
    assert isinstance(result, SampledToken)
    assert decode([result.token_id]) in ("x", "y")
    assert decode(result.followers) == "zzzzz"
    assert result.followers[-1] == END


def test_what_is_forced_is_taken_whatever_the_model_says() -> None:
    logits = np.full((1, VOCAB), -np.inf, np.float32)
    logits[0, 9] = 5.0
    never = ((encode("x")[0], -100.0),)
    (result,) = sample(logits, sequence("xyz", asked(max_tokens=50, logit_bias=never)))
    assert isinstance(result, SampledToken)
    assert decode(result.token_ids) == "xyz"


def test_with_log_probabilities_each_token_has_a_row_and_they_are_the_models() -> None:
    logits = some_logits(1, 1, VOCAB)
    plain, constrained = sequence(None, asked(logprobs=2)), sequence("xyz", asked(logprobs=2, max_tokens=50))
    (free,) = sample(logits, plain)
    (result,) = sample(logits, constrained)
    assert isinstance(free, SampledToken)
    assert isinstance(result, SampledToken)
    assert (decode(result.token_ids), result.followers) == ("x", ())
    assert free.logprob is not None
    assert result.logprob is not None
    assert result.logprob.top == free.logprob.top
    row = logits[0].astype(np.float64)
    expected = row[result.token_id] - np.log(np.exp(row).sum())
    assert result.logprob.logprob == pytest.approx(expected, abs=1e-5)


def test_an_end_comes_before_min_tokens_only_where_nothing_else_may() -> None:
    sampling = asked(max_tokens=50, min_tokens=20)
    tokens = run(sequence("x+", sampling))
    assert len(tokens) > 20
    assert tokens[-1] in ENDS
    short = run(sequence("x{3}", sampling))
    assert short == [*encode("xxx"), END]


def test_a_neighbour_is_not_disturbed() -> None:
    logits = some_logits(3, 3, VOCAB)
    plain = [sequence(None, asked(temperature=1.0, seed=n), n) for n in (1, 3)]
    alone = sample(logits[[0, 2]], *plain)
    together = sample(logits, plain[0], sequence("[xy]+", asked(max_tokens=50), 2), plain[1])
    assert [together[0], together[2]] == alone


class Failing(Matcher):
    """Fails when it is asked what may come next, or when it is told what has come."""

    def __init__(self, *, late: bool) -> None:
        self._late = late

    def forced(self) -> int | None:
        if not self._late:
            raise ConstraintError("too complex")
        return 9

    def accept(self, token_id: int) -> None:
        raise ConstraintError("too complex")


@pytest.mark.parametrize("late", [False, True])
def test_a_constraint_that_cannot_be_followed_ends_its_own_sequence(late: bool) -> None:
    logits = some_logits(3, 2, VOCAB)
    one, neighbour = sequence(None, asked(), 1), sequence(None, asked(), 2)
    (alone,) = sample(logits[1:], neighbour)
    one.matcher = Failing(late=late)
    assert sample(logits, one, neighbour) == [EngineFinishReason.CONSTRAINT_FAILED, alone]


def test_numbers_that_are_none_are_bad_logits_also_under_a_constraint() -> None:
    logits = np.full((1, VOCAB), np.nan, np.float32)
    assert sample(logits, sequence("[xy]", asked())) == [EngineFinishReason.BAD_LOGITS]


def test_a_resumed_output_goes_on_as_it_would_have() -> None:
    source = "([a-f]{2}name: ){3,9}"
    sampling = asked(temperature=1.0, seed=4, max_tokens=100)
    whole = run(sequence(source, sampling))
    assert whole[-1] in ENDS
    for count in range(1, len(whole)):
        matcher = COMPILER.compile(constraint("regex", source))
        for token_id in whole[:count]:
            matcher.accept(token_id)
        token_ids = array("I", [7, *whole[:count]])
        one = Sequence(1, token_ids, sampling, ENDS, num_resumed=count, matcher=matcher)
        assert run(one) == whole
