"""The sampler takes the tokens that close reasoning, as far as a constraint lets it, and no other marker then."""

from array import array

import numpy as np

from tests.support.reasoning_vocabulary import KNOWN, ReasoningVocabulary
from tests.support.sampling import asked, some_logits
from tokenbus.worker.contract import engine_request
from tokenbus.worker.engine.constraints.compiler import ConstraintCompiler, ModelTokens
from tokenbus.worker.engine.constraints.matcher import SequenceMatcher
from tokenbus.worker.engine.device.sampler import Sampler
from tokenbus.worker.engine.scheduling.plan import SampledToken
from tokenbus.worker.engine.scheduling.sequence import Sequence

HERMES = ReasoningVocabulary(KNOWN["hermes"])
THINK, CLOSE = HERMES.form.tokens["<think>"], HERMES.form.tokens["</think>"]
END = HERMES.token(b"")
VOCAB = len(HERMES.token_bytes)
COMPILER = ConstraintCompiler(ModelTokens(HERMES.token_bytes, frozenset({END}), HERMES.encode))
MARKER = HERMES.closer.tokens()


def sequence(budget: int, matcher: SequenceMatcher | None = None, *, seq_no: int = 1, **sampling: object) -> Sequence:
    return Sequence(
        seq_no,
        array("I", [7]),
        asked(max_tokens=60, logit_bias=((CLOSE, -1e6),), **sampling),
        [END],
        matcher=matcher,
        reasoning_budget=HERMES.budget(budget, prompt="<think>\n"),
    )


def run(one: Sequence, num_steps: int = 60) -> list[int]:
    """Samples from logits that depend on the place only; returns all tokens."""
    sampler = Sampler(frozenset({END}), VOCAB)
    sampler.add_sequence(one.seq_no, one.sampling)
    for _ in range(num_steps):
        (result,) = sampler.sample(some_logits(one.num_sampled, 1, VOCAB), [one])
        assert isinstance(result, SampledToken), result
        one.num_computed = one.num_tokens
        if one.append(result.token_ids) is not None:
            break
    return list(one.token_ids[1:])


def compiled(source: str, preamble: str = "") -> SequenceMatcher:
    kind = engine_request.ConstraintKind.REGEX
    return COMPILER.compile(engine_request.Constraint(kind=kind, source=source, param="regex", preamble=preamble))


def test_the_marker_follows_the_last_token_of_reasoning_in_one_step() -> None:
    one = sequence(1)
    sampler = Sampler(frozenset({END}), VOCAB)
    sampler.add_sequence(1, one.sampling)
    logits = np.zeros((1, VOCAB), np.float32)
    logits[0, ord("a")] = 9.0
    (result,) = sampler.sample(logits, [one])
    assert isinstance(result, SampledToken)
    assert result.token_ids == [ord("a"), *MARKER]


def test_with_log_probabilities_the_same_tokens_have_a_row_each() -> None:
    plain, seen = run(sequence(3, temperature=1.0)), run(sequence(3, temperature=1.0, logprobs=0))
    assert plain == seen
    assert CLOSE in plain


def test_once_reasoning_was_closed_its_markers_are_impossible() -> None:
    logits = np.zeros((1, VOCAB), np.float32)
    logits[0, THINK] = logits[0, CLOSE] = 50.0
    one = sequence(0)
    assert one.reasoning_budget is not None
    one.reasoning_budget.accept_forced(9)
    sampler = Sampler(frozenset({END}), VOCAB)
    sampler.add_sequence(1, one.sampling)
    (result,) = sampler.sample(logits, [one])
    assert isinstance(result, SampledToken)
    assert result.token_id not in (THINK, CLOSE)


def test_a_constraint_that_forces_another_token_comes_first() -> None:
    tokens = run(sequence(0, compiled("abc")))
    assert tokens == [*HERMES.encode("abc"), END]


def test_a_constraint_behind_the_reasoning_lets_the_marker_pass() -> None:
    preamble = f'%llguidance {{}}\nstart: TEXT <[{CLOSE}]> "\\n\\n" @body\nTEXT: /(.|\\n)*/'
    tokens = run(sequence(4, compiled("[xy]{5}", preamble), temperature=1.0))
    at = tokens.index(CLOSE)
    assert 4 < at <= 4 + 16
    assert tokens[at + 1 : at + 3] == HERMES.encode("\n\n")
    assert set(HERMES.text(tokens[at + 3 :])) == {"x", "y"}
    assert tokens[-1] == END


def test_a_neighbour_is_not_disturbed() -> None:
    logits = some_logits(3, 2, VOCAB)
    plain = Sequence(2, array("I", [7]), asked(temperature=1.0, seed=3), [END])
    sampler = Sampler(frozenset({END}), VOCAB)
    sampler.add_sequence(2, plain.sampling)
    (alone,) = sampler.sample(logits[1:].copy(), [plain])
    one = sequence(0)
    sampler.add_sequence(1, one.sampling)
    assert sampler.sample(logits.copy(), [one, plain])[1] == alone
