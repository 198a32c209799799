"""Finds the sequences for which the model computes non-finite numbers (decision 0066).

A key or value that is NaN or infinite makes every row that attends to it non-finite; in shared memory it even affects
rows that do not attend to it (0 x NaN is NaN). So of several non-finite rows in a batch, all but one may be victims.
None of their results are kept, what was written is overwritten, and in the next step they are computed in two batches,
each of which is halved again if it fails:

    step 1   A B C D E F      rows of B, C, D and E are not finite: they are suspects
    step 2   A F | B C | D E  D and E fail
    step 3   A B C F | D | E  E fails alone, twice: it ends

A finite row has attended only to finite numbers, so the shares of such rows are valid.
"""

import enum
import itertools
from collections.abc import Iterator
from collections.abc import Sequence as Listing

from tokenbus.worker.engine.scheduling.plan import ScheduledTokens
from tokenbus.worker.engine.scheduling.sequence import Sequence


class Verdict(enum.Enum):
    """The next thing to do with a suspect."""

    COMPUTE_AGAIN = "compute the same share in the next step, apart from others"
    START_OVER = "drop all that it has reused and computed, and compute it from its beginning, sharing nothing"
    END = "it is the culprit"


class Suspects:
    """Assigns numbers to the batches in which suspects are computed apart (`Sequence.apart`)."""

    def __init__(self) -> None:
        self._numbers = itertools.count(1)

    def judge(self, batches: Listing[Listing[ScheduledTokens]]) -> Iterator[tuple[Sequence, Verdict]]:
        """Says what to do with the shares of a step whose numbers were not finite, given by batch.

        One that fails alone is retried once, since previously free memory may have been at fault; then from its
        beginning, since what it has reused may be; so it costs at most twice its normal computation. As long as a bad
        lane exists, it can make others' rows non-finite: so of several that fail, the likeliest culprits are dealt with
        first, and the others merely retried."""
        first = min((_rank(one.sequence) for shares in batches for one in shares), default=0)
        for shares in batches:
            yield from self._judge(shares, first)

    def _judge(self, shares: Listing[ScheduledTokens], first: int) -> Iterator[tuple[Sequence, Verdict]]:
        # Those that have already got far are the least likely culprits.
        ordered = sorted(shares, key=lambda one: not one.sequence.num_sampled)
        half = len(ordered) // 2
        for part in (ordered[:half], ordered[half:]):
            number = next(self._numbers)
            for one in part:
                suspect = one.sequence
                suspect.apart = number
                suspect.poisoned_at = max(suspect.poisoned_at, one.start + one.num_tokens)
                is_culprit = len(shares) == 1 and _rank(suspect) == first
                yield suspect, _verdict(suspect) if is_culprit else Verdict.COMPUTE_AGAIN


def _rank(suspect: Sequence) -> int:
    """Returns a number that is smaller for likelier culprits: what a new sequence has reused from the cache is still
    unproven."""
    return 2 if suspect.is_proven else int(not suspect.num_computed)


def _verdict(culprit: Sequence) -> Verdict:
    """Decides what to do with one that has failed alone."""
    culprit.poisonings += 1
    if culprit.poisonings == 1:
        return Verdict.COMPUTE_AGAIN
    has_reused = culprit.domain is not None and culprit.num_computed > 0
    return Verdict.START_OVER if has_reused else Verdict.END


def acquit(sequence: Sequence) -> None:
    """Lets a sequence be computed together with others again once it has got past where its numbers were not finite."""
    sequence.is_proven = True
    if sequence.num_computed >= sequence.poisoned_at:
        sequence.apart = sequence.poisonings = sequence.poisoned_at = 0
