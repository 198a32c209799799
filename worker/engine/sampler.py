"""Chooses the next tokens of a step from the model's logits, for all its rows together where they allow it.

The order is the one that users of llama.cpp know: penalties, then top_k, top_p, min_p, temperature, and a draw. A draw
is a hash of the request's seed and the token's place, so that there is no state to keep, to lose or to carry elsewhere.
"""

from collections.abc import Sequence as Listing
from typing import Any

import msgspec
import numpy as np
import structlog
import xxhash

from tokenbus.worker import contract
from tokenbus.worker.engine.scheduling.plan import SampledToken
from tokenbus.worker.engine.scheduling.sequence import EngineFinishReason, Sequence

Matrix = np.ndarray[tuple[int, int], np.dtype[np.float32]]
Row = np.ndarray[tuple[int], np.dtype[np.float32]]
Masses = np.ndarray[tuple[int], np.dtype[np.float64]]

_GROUP = 64
"""Logits that are looked at as one while the likeliest are sought."""
_NARROW = 256
"""Rows with at most this many candidates are drawn together."""
_BINS = 1_024
"""Into which a row's logits are cast where its tokens are not sorted."""
_FEW = 2_048
"""So many tokens are sorted rather than cast into bins."""
_FAR = 1e30
"""Logits so much smaller than the largest are as good as ruled out, and share a bin."""
_DOUBT = 1e-9
"""Of a sum of a million numbers, which differs by less when they are added in another order."""


class _Rules:
    """What holds for one sequence from its first token to its last."""

    __slots__ = ("bias_ids", "biases", "never", "not_yet", "sampling")

    def __init__(self, sampling: contract.Sampling, end_token_ids: frozenset[int], vocab_size: int) -> None:
        assert sampling.logprobs is None or sampling.logprobs >= 0, sampling.logprobs
        self.sampling = sampling
        self.never = _known(end_token_ids if sampling.ignore_eos else (), vocab_size)
        self.not_yet = _known({*sampling.stop_token_ids, *end_token_ids}, vocab_size)
        biases = [(token_id, bias) for token_id, bias in sampling.logit_bias if 0 <= token_id < vocab_size]
        self.bias_ids = np.array([token_id for token_id, _ in biases], np.int64)
        self.biases = np.array([bias for _, bias in biases], np.float32)


class Sampler:
    """The rules of all sequences. Ids beyond the vocabulary are nobody's."""

    def __init__(self, end_token_ids: frozenset[int], vocab_size: int) -> None:
        self._end_token_ids = end_token_ids
        self._vocab_size = vocab_size
        self._rules: dict[int, _Rules] = {}
        self._log = structlog.get_logger()

    def __repr__(self) -> str:
        return f"<Sampler of {len(self._rules)} sequences>"

    def add_sequence(self, seq_no: int, sampling: contract.Sampling) -> None:
        assert seq_no not in self._rules, seq_no
        self._rules[seq_no] = _Rules(sampling, self._end_token_ids, self._vocab_size)

    def remove_sequence(self, seq_no: int) -> None:
        """Does nothing for a sequence that never began."""
        self._rules.pop(seq_no, None)

    def sample(self, logits: Matrix, sequences: Listing[Sequence]) -> list[SampledToken | EngineFinishReason]:
        """A token for each row, or `EngineFinishReason.BAD_LOGITS` where the model computed no numbers. Writes into
        `logits`."""
        rules = [self._rules[sequence.seq_no] for sequence in sequences]
        reports = [_Report.of(row, rule.sampling.logprobs) for row, rule in zip(logits, rules, strict=True)]
        for row, rule, sequence in zip(logits, rules, sequences, strict=True):
            _adjust(row, rule, sequence)
        tokens = logits.argmax(axis=1)
        finite = np.isfinite(logits[np.arange(len(logits)), tokens]).tolist()
        self._draw(logits, rules, sequences, finite, tokens)
        chosen: list[SampledToken | EngineFinishReason] = []
        for row, sequence, token, is_finite, report in zip(
            logits, sequences, tokens.tolist(), finite, reports, strict=True
        ):
            if is_finite:
                chosen.append(SampledToken(token, report.of_token(token) if report is not None else None))
            else:
                self._log.error("bad_logits", seq_no=sequence.seq_no, row=_summary(row))
                chosen.append(EngineFinishReason.BAD_LOGITS)
        return chosen

    def _draw(
        self,
        logits: Matrix,
        rules: Listing[_Rules],
        sequences: Listing[Sequence],
        finite: Listing[bool],
        tokens: "np.ndarray[tuple[int], np.dtype[np.int64]]",
    ) -> None:
        """Puts a drawn token in the place of the likeliest, for every row that wants one."""
        drawn = [n for n, rule in enumerate(rules) if rule.sampling.temperature > 0 and finite[n]]
        most = min(_NARROW, self._vocab_size)
        places = {n: uniform(rules[n].sampling.seed, sequences[n].num_sampled) for n in drawn}
        by_top_k: dict[int, list[int]] = {}
        for n in drawn:
            top_k = rules[n].sampling.top_k
            if 0 < top_k <= most:
                by_top_k.setdefault(top_k, []).append(n)
            else:
                tokens[n] = draw_from_all(logits[n], rules[n].sampling, places[n])
        for alike in by_top_k.values():
            samplings = [rules[n].sampling for n in alike]
            tokens[alike] = draw_from_top_k(logits[alike], samplings, [places[n] for n in alike])


def uniform(seed: int, place: int) -> float:
    """A number from 0 up to 1 for one token of a request: always the same for the same seed and place."""
    return xxhash.xxh3_64_intdigest(place.to_bytes(8, "little"), seed) / 2.0**64


def draw_from_top_k(
    logits: Matrix, samplings: Listing[contract.Sampling], places: Listing[float]
) -> "np.ndarray[tuple[int], np.dtype[np.int64]]":
    """A token for each row. All have the same `top_k`, from 1 to the width of a row: which of several equally likely
    tokens stay depends on it, and must not depend on the neighbours."""
    ids = likeliest(logits, samplings[0].top_k)
    found = np.take_along_axis(logits, ids, axis=1).astype(np.float64)
    chosen = _place(found, samplings, np.array(places)[:, None])
    return np.take_along_axis(ids, chosen[:, None], axis=1)[:, 0]


def draw_from_all(row: Row, sampling: contract.Sampling, place: float) -> int:
    """A token of a row in which many may come next: the one that `draw_sorted` finds, mostly without sorting."""
    found = _draw_unsorted(row, sampling, place)
    return draw_sorted(row, sampling, place) if found is None else found


def draw_sorted(row: Row, sampling: contract.Sampling, place: float) -> int:
    """What a draw is. Of equally likely tokens the one with the larger id comes first."""
    order = np.argsort(row, kind="stable")[::-1]
    if sampling.top_k:
        order = order[: sampling.top_k]
    return int(order[_place(row[order].astype(np.float64)[None], [sampling], np.array([[place]]))[0]])


def _draw_unsorted(row: Row, sampling: contract.Sampling, place: float) -> int | None:
    """The drawn token; None where the last bits of a sum or equally likely tokens at the edge of top_k decide."""
    if 0 < sampling.top_k < len(row):
        ids = np.flatnonzero(row >= np.partition(row, -sampling.top_k)[-sampling.top_k])
        if len(ids) > sampling.top_k:
            return None
        found = _draw_unsorted(row[ids], msgspec.structs.replace(sampling, top_k=0), place)
        return None if found is None else int(ids[found])
    if sampling.top_p < 1 or sampling.min_p > 0:
        return _draw_cut(row, sampling, place)
    return _reach(row, _masses(row, sampling.temperature), place)


def _draw_cut(row: Row, sampling: contract.Sampling, place: float) -> int | None:
    """As `_draw_unsorted`, of a row of which top_p or min_p leave only the beginning."""
    weights = _masses(row, 1.0)
    kept = weights >= sampling.min_p
    if sampling.top_p < 1:
        last = _reach(row, weights, sampling.top_p)
        if last is None:
            return None
        kept &= row >= row[last]
        kept[:last] &= row[:last] != row[last]
    ids = np.flatnonzero(kept)
    found = _reach(row[ids], _masses(row[ids], sampling.temperature), place)
    return None if found is None else int(ids[found])


def _masses(row: Row, temperature: float) -> Masses:
    """How likely each token is, beside the likeliest."""
    masses: Masses = np.subtract(row, row.max(), dtype=np.float64)
    masses /= temperature
    return np.exp(masses, out=masses)


def _reach(logits: Row, masses: Masses, share: float) -> int | None:
    """The place of the token with which the sum of masses, by falling logits, passes a share of the whole; None where
    the last bits decide.

    Masses are added up in bins of similar logits, and only the bin where the sum passes is looked into."""
    whole = masses.sum()
    target, before = share * whole, 0.0
    places: Any = None
    while len(logits) > _FEW and (bins := _bins(logits)) is not None:
        sums = before + np.bincount(bins, masses).cumsum()
        at = min(int(np.searchsorted(sums, target, side="right")), len(sums) - 1)
        before = sums[at - 1] if at else before
        inside = np.flatnonzero(bins == at)
        places = inside if places is None else places[inside]
        logits, masses = logits[inside], masses[inside]
    order = np.argsort(logits, kind="stable")[::-1]
    sums = np.concatenate([[before], before + masses[order].cumsum()])
    at = int(np.searchsorted(sums, target, side="right"))
    doubt = _DOUBT * whole
    if at == len(sums) or sums[at] - target < doubt or 0 < sums[at - 1] > target - doubt:
        return None
    return int(order[at - 1] if places is None else places[order[at - 1]])


def _bins(logits: Row) -> Any:
    """A number for each logit, never smaller for a smaller logit; None where all are as good as equal."""
    most = logits.max()
    least = logits.min(where=logits > most - _FAR, initial=most)
    if least == most:
        return None
    with np.errstate(over="ignore"):
        scaled = most - logits
        scaled *= (_BINS - 1) / (most - least)
    return np.minimum(scaled, _BINS - 1, out=scaled).astype(np.intp)


def likeliest(logits: Matrix, count: int) -> "np.ndarray[tuple[int, int], np.dtype[np.int64]]":
    """The ids of the `count` largest logits of each row, largest first.

    They all lie within the `count` groups whose largest members are largest, so that few have to be compared."""
    rows, width = logits.shape
    if width <= 2 * _GROUP * count:
        within = np.argpartition(logits, width - count, axis=1)[:, width - count :]
    else:
        groups = width // _GROUP
        whole = logits[:, : groups * _GROUP]
        best = whole.reshape(rows, groups, _GROUP).max(axis=2)
        picked = np.argpartition(best, groups - count, axis=1)[:, groups - count :]
        within = (picked[:, :, None] * _GROUP + np.arange(_GROUP)).reshape(rows, -1)
        rest = np.broadcast_to(np.arange(groups * _GROUP, width), (rows, width - groups * _GROUP))
        within = np.concatenate([within, rest], axis=1)
    order = np.argsort(-np.take_along_axis(logits, within, axis=1), axis=1, kind="stable")[:, :count]
    return np.take_along_axis(within, order, axis=1)


def _place(
    found: "np.ndarray[tuple[int, int], np.dtype[np.float64]]",
    samplings: Listing[contract.Sampling],
    places: "np.ndarray[tuple[int, int], np.dtype[np.float64]]",
) -> "np.ndarray[tuple[int], np.dtype[np.int64]]":
    """Which of the candidates of each row, sorted by falling logits, is drawn."""
    top_p = np.array([sampling.top_p for sampling in samplings])[:, None]
    min_p = np.array([sampling.min_p for sampling in samplings])[:, None]
    temperature = np.array([sampling.temperature for sampling in samplings])[:, None]
    behind = found - found[:, :1]
    weights = np.exp(behind)
    before = np.cumsum(weights, axis=1) - weights
    allowed = (before < top_p * weights.sum(axis=1, keepdims=True)) & (weights >= min_p)
    allowed[:, 0] = True
    drawn = np.where(allowed, np.exp(behind / temperature), 0.0)
    sums = np.cumsum(drawn, axis=1)
    last = allowed.shape[1] - 1 - np.argmax(allowed[:, ::-1], axis=1)
    chosen: np.ndarray[tuple[int], np.dtype[np.int64]] = np.minimum((sums <= places * sums[:, -1:]).sum(axis=1), last)
    return chosen


def _adjust(row: Row, rules: _Rules, sequence: Sequence) -> None:
    sampling = rules.sampling
    if len(rules.bias_ids):
        row[rules.bias_ids] += rules.biases
    if sampling.has_penalties:
        _penalize(row, sampling, sequence)
    forbidden = rules.never if sequence.may_stop else rules.not_yet
    if len(forbidden):
        row[forbidden] = -np.inf


def _penalize(row: Row, sampling: contract.Sampling, sequence: Sequence) -> None:
    recent = np.array(sequence.token_ids[-sampling.repetition_last_n :], np.int64)
    ids, counts = np.unique(recent[recent < len(row)], return_counts=True)
    known = row[ids]
    rate = np.float32(sampling.repetition_penalty)
    known = np.where(known > 0, known / rate, known * rate)
    row[ids] = known - counts * np.float32(sampling.frequency_penalty) - np.float32(sampling.presence_penalty)


def _known(token_ids: "Listing[int] | set[int] | frozenset[int] | tuple[int, ...]", vocab_size: int) -> Any:
    return np.array(sorted(token_id for token_id in token_ids if 0 <= token_id < vocab_size), np.int64)


class _Report:
    """Log probabilities of a row as the model gave it, taken before anything is changed in it."""

    __slots__ = ("_logits", "_sum", "_top")

    def __init__(self, row: Row, count: int) -> None:
        self._logits = row.copy()
        most = float(row.max())
        self._sum = most + float(np.log(np.exp(row.astype(np.float64) - most).sum()))
        ids = likeliest(row[None], min(count, len(row)))[0].tolist() if count else []
        self._top = [(token_id, float(row[token_id]) - self._sum) for token_id in ids]

    @staticmethod
    def of(row: Row, count: int | None) -> "_Report | None":
        return _Report(row, count) if count is not None and np.isfinite(row.max()) else None

    def of_token(self, token_id: int) -> contract.Logprob:
        return contract.Logprob(token_id, float(self._logits[token_id]) - self._sum, self._top)


def _summary(row: Row) -> dict[str, float]:
    """What a row without a usable maximum is made of, for the log."""
    numbers = row[np.isfinite(row)]
    return {
        "nan": int(np.isnan(row).sum()),
        "infinite": int(np.isinf(row).sum()),
        "finite": len(numbers),
        "least": float(numbers.min()) if len(numbers) else 0.0,
        "most": float(numbers.max()) if len(numbers) else 0.0,
    }
