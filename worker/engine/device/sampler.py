"""The sampler chooses the next tokens of a step from the model's logits, all rows together where possible.

The order is the one that users of llama.cpp know: biases and penalties, then top_k, top_p, min_p, temperature, and a
draw. A draw is a hash of the request's seed and the token's position, so there is no state to keep, or to hand over
when another engine continues a sequence. If a constraint allows only one token, that one is taken, together with all
that must follow it. So are the tokens that close reasoning whose budget is spent, as far as the constraint allows them.

Decision 0022 says why there is one sampler for all engines.
"""

from collections.abc import Iterable
from collections.abc import Sequence as Listing

import numpy as np
import structlog

from tokenbus.worker.contract import engine_output, engine_request
from tokenbus.worker.engine.constraints.grammar import ConstraintError
from tokenbus.worker.engine.constraints.matcher import SequenceMatcher
from tokenbus.worker.engine.device import draws
from tokenbus.worker.engine.device.draws import Indices, Matrix, Row
from tokenbus.worker.engine.scheduling.plan import LogitsSummary, SampledToken
from tokenbus.worker.engine.scheduling.sequence import EngineFinishReason, Sequence

_MAX_FOLLOWERS = 32
"""The most tokens computed together with a sampled one, so that no step gets long."""


class _Rules:
    """The rules that hold for one sequence throughout."""

    __slots__ = ("bias_ids", "biases", "never", "not_yet", "sampling")

    def __init__(self, sampling: engine_request.Sampling, end_token_ids: frozenset[int], vocab_size: int) -> None:
        assert sampling.logprobs is None or sampling.logprobs >= 0, sampling.logprobs
        self.sampling = sampling
        self.never = _known_ids(end_token_ids if sampling.ignore_eos else (), vocab_size)
        """Tokens that are never sampled."""
        self.not_yet = _known_ids({*sampling.stop_token_ids, *end_token_ids}, vocab_size)
        """Tokens that are not sampled before `min_tokens` are reached."""
        biases = [(token_id, bias) for token_id, bias in sampling.logit_bias if 0 <= token_id < vocab_size]
        self.bias_ids = np.array([token_id for token_id, _ in biases], np.int64)
        self.biases = np.array([bias for _, bias in biases], np.float32)

    def apply(self, row: Row, sequence: Sequence) -> None:
        """Changes a row's logits: biases, penalties, forbidden tokens. Raises ConstraintError."""
        sampling = self.sampling
        if len(self.bias_ids):
            row[self.bias_ids] += self.biases
        if sampling.has_penalties:
            recent = np.array(sequence.token_ids[-sampling.repetition_last_n :], np.int64)
            ids, counts = np.unique(recent[recent < len(row)], return_counts=True)
            rate = np.float32(sampling.repetition_penalty)
            known = np.where(row[ids] > 0, row[ids] / rate, row[ids] * rate)
            row[ids] = known - counts * np.float32(sampling.frequency_penalty) - np.float32(sampling.presence_penalty)
        forbidden, wanted = self.never if sequence.may_stop else self.not_yet, None
        if (budget := sequence.reasoning_budget) is not None:
            wanted = budget.forced
            if budget.forbidden:
                forbidden = np.append(forbidden, budget.forbidden)
        if sequence.matcher is not None:
            _constrain(row, sequence.matcher, forbidden, wanted)
        elif wanted is not None:
            _leave_only(row, wanted)
        elif len(forbidden):
            row[forbidden] = -np.inf


class _RowLogprobs:
    """The log probabilities of a row as the model computed it, taken before anything changes it."""

    __slots__ = ("_log_sum", "_logits", "_top")

    def __init__(self, row: Row, count: int) -> None:
        self._logits = row.copy()
        most = float(row.max())
        self._log_sum = most + float(np.log(np.exp(row.astype(np.float64) - most).sum()))
        ids = draws.top_k_ids(row[None], min(count, len(row)))[0].tolist() if count else []
        self._top = [(token_id, float(row[token_id]) - self._log_sum) for token_id in ids]

    def of_token(self, token_id: int) -> engine_output.Logprob:
        return engine_output.Logprob(token_id, float(self._logits[token_id]) - self._log_sum, self._top)


class Sampler:
    """Keeps the rules of all sequences. Token ids beyond the vocabulary are ignored."""

    def __init__(self, end_token_ids: frozenset[int], vocab_size: int) -> None:
        self._end_token_ids = end_token_ids
        self._vocab_size = vocab_size
        self._rules: dict[int, _Rules] = {}
        self._log = structlog.get_logger()

    def __repr__(self) -> str:
        return f"<Sampler of {len(self._rules)} sequences>"

    def add_sequence(self, seq_no: int, sampling: engine_request.Sampling) -> None:
        assert seq_no not in self._rules, seq_no
        self._rules[seq_no] = _Rules(sampling, self._end_token_ids, self._vocab_size)

    def remove_sequence(self, seq_no: int) -> None:
        """Drops a sequence's rules; does nothing for one that was never added."""
        self._rules.pop(seq_no, None)

    def sample(self, logits: Matrix, sequences: Listing[Sequence]) -> list[SampledToken | EngineFinishReason]:
        """Returns a token for each row, or the reason why there is none: BAD_LOGITS if the logits are not finite, or
        CONSTRAINT_FAILED. Writes into `logits`."""
        rules = [self._rules[sequence.seq_no] for sequence in sequences]
        logprobs: list[_RowLogprobs | None] = []
        failed: set[int] = set()
        for n, (row, rule, sequence) in enumerate(zip(logits, rules, sequences, strict=True)):
            count = rule.sampling.logprobs
            logprobs.append(_RowLogprobs(row, count) if count is not None and np.isfinite(row.max()) else None)
            try:
                rule.apply(row, sequence)
            except ConstraintError as error:
                self._log.warning("constraint_not_followed", seq_no=sequence.seq_no, error=str(error))
                failed.add(n)
        tokens = logits.argmax(axis=1)
        finite = np.isfinite(logits[np.arange(len(logits)), tokens]).tolist()
        self._draw(logits, rules, sequences, finite, tokens)
        sampled: list[SampledToken | EngineFinishReason] = []
        for n, token_id in enumerate(tokens.tolist()):
            row_logprobs = logprobs[n]
            if n in failed:
                sampled.append(EngineFinishReason.CONSTRAINT_FAILED)
            elif finite[n]:
                one = SampledToken(token_id, row_logprobs.of_token(token_id) if row_logprobs else None)
                sampled.append(self._accept(sequences[n], one))
            else:
                self._log.error("bad_logits", seq_no=sequences[n].seq_no, logits=summarize(logits[n]).to_log())
                sampled.append(EngineFinishReason.BAD_LOGITS)
        # after the loop: some matchers are in their own processes, which meanwhile compute in parallel
        return [self._follow(*pair) for pair in zip(sequences, sampled, strict=True)]

    def _accept(self, sequence: Sequence, sampled: SampledToken) -> SampledToken | EngineFinishReason:
        """Tells a constraint and a budget what was sampled."""
        matcher = sequence.matcher
        if sampled.token_id in self._end_token_ids:
            return sampled
        if sequence.reasoning_budget is not None:
            sequence.reasoning_budget.accept(sampled.token_id)
        if matcher is None:
            return sampled
        try:
            matcher.accept(sampled.token_id)
        except ConstraintError as error:
            return self._constraint_failed(sequence, error)
        return sampled

    def _follow(
        self, sequence: Sequence, sampled: SampledToken | EngineFinishReason
    ) -> SampledToken | EngineFinishReason:
        """Adds the tokens that must follow a sampled one. If log probabilities are requested, each needs a row."""
        matcher, budget = sequence.matcher, sequence.reasoning_budget
        if isinstance(sampled, EngineFinishReason) or sampled.token_id in self._end_token_ids:
            return sampled
        limit = _MAX_FOLLOWERS if sequence.sampling.logprobs is None else 0
        followers: list[int] = []
        try:
            if matcher is not None:
                followers = matcher.accept_forced(limit)
                if budget is not None:  # what it forces comes step by step, since the matcher may not be ready for it
                    for token_id in followers:
                        budget.accept(token_id)
            elif budget is not None:
                followers = budget.accept_forced(limit)
        except ConstraintError as error:
            return self._constraint_failed(sequence, error)
        return sampled._replace(followers=tuple(followers)) if followers else sampled

    def _constraint_failed(self, sequence: Sequence, error: ConstraintError) -> EngineFinishReason:
        self._log.warning("constraint_not_followed", seq_no=sequence.seq_no, error=str(error))
        return EngineFinishReason.CONSTRAINT_FAILED

    def _draw(
        self,
        logits: Matrix,
        rules: Listing[_Rules],
        sequences: Listing[Sequence],
        finite: Listing[bool],
        tokens: Indices,
    ) -> None:
        """Replaces the likeliest token with a drawn one, for every row with a temperature."""
        rows_by_top_k: dict[int, list[int]] = {}
        us: dict[int, float] = {}
        for n, rule in enumerate(rules):
            sampling = rule.sampling
            if sampling.temperature <= 0 or not finite[n]:
                continue
            us[n] = draws.uniform(sampling.seed, sequences[n].num_sampled)
            if 0 < sampling.top_k <= min(draws.MAX_BATCHED_TOP_K, self._vocab_size):
                rows_by_top_k.setdefault(sampling.top_k, []).append(n)
            else:
                tokens[n] = draws.draw_from_all(logits[n], sampling, us[n])
        for rows in rows_by_top_k.values():
            samplings = [rules[n].sampling for n in rows]
            tokens[rows] = draws.draw_from_top_k(logits[rows], samplings, [us[n] for n in rows])


def _leave_only(row: Row, token_id: int) -> None:
    row.fill(-np.inf)
    row[token_id] = 0.0


def _constrain(row: Row, matcher: SequenceMatcher, forbidden: Indices, wanted: int | None = None) -> None:
    """Keeps the tokens that a constraint allows: only `wanted` if it is among them, and forbidden ones only if there
    are no others."""
    forced = matcher.forced()
    if forced is not None:
        _leave_only(row, forced)
        return
    allowed = matcher.allowed()
    if wanted is not None and allowed[wanted]:
        _leave_only(row, wanted)
        return
    if len(forbidden):
        rest = allowed.copy()
        rest[forbidden] = False
        allowed = rest if rest.any() else allowed
    np.copyto(row, -np.inf, where=~allowed)


def _known_ids(token_ids: Iterable[int], vocab_size: int) -> Indices:
    return np.array(sorted(token_id for token_id in token_ids if 0 <= token_id < vocab_size), np.int64)


def summarize(row: Row) -> LogitsSummary:
    """Summarizes a row."""
    numbers = row[np.isfinite(row)]
    nan, pos_inf = int(np.isnan(row).sum()), int(np.isposinf(row).sum())
    neg_inf = len(row) - len(numbers) - nan - pos_inf
    if not len(numbers):
        return LogitsSummary(nan, pos_inf, neg_inf, 0, 0.0, 0.0, 0.0)
    mean = float(numbers.mean(dtype=np.float64))
    return LogitsSummary(nan, pos_inf, neg_inf, len(numbers), mean, float(numbers.min()), float(numbers.max()))
