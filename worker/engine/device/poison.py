"""Separates the non-finite shares of a batch from the others, and samples from the latter (decision 0066)."""

from collections.abc import Sequence as Listing

import numpy as np

from tokenbus.worker.engine.device.draws import Matrix
from tokenbus.worker.engine.device.logits_health import LogitsHealth
from tokenbus.worker.engine.device.sampler import Sampler
from tokenbus.worker.engine.scheduling.plan import Outcome, ScheduledTokens, Undone

_STRIDE = 1_024
"""One logit in this many is checked. Each is a product with the whole last state, which is non-finite throughout if any
of its numbers is, since normalization divides by its length. All logits of 64 rows would take a few milliseconds."""


def sort_out(
    batch: Listing[ScheduledTokens], rows: Matrix, sampler: Sampler, health: LogitsHealth
) -> dict[int, Outcome]:
    """Returns the outcome of each share, by its lane. `rows` are the logits after the last token of each share; they
    are overwritten."""
    poisoned = are_poisoned(rows)
    health.look(batch, rows, poisoned)
    outcomes: dict[int, Outcome] = {
        part.lane: Undone.POISONED if bad else None for part, bad in zip(batch, poisoned, strict=True)
    }
    sampled = [n for n, part in enumerate(batch) if part.samples and not poisoned[n]]
    if sampled:
        # As long as all is well, the shares that sample come first; then nothing is copied.
        wanted = rows[: len(sampled)] if sampled[-1] == len(sampled) - 1 else rows[sampled]
        results = sampler.sample(wanted, [batch[n].sequence for n in sampled])
        outcomes |= {batch[n].lane: one for n, one in zip(sampled, results, strict=True)}
    return outcomes


def are_poisoned(rows: Matrix) -> list[bool]:
    """Returns for each row whether it has non-finite logits. Minus infinity is allowed: it rules tokens out."""
    seen = rows[:, ::_STRIDE]
    return [not bool((row < np.inf).all()) for row in seen]
