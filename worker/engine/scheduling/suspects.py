"""Finds the sequences for which the model computes numbers that are none.

A key or value that is NaN or infinite makes every row none that attends to it; where the memory is shared, it can do so
even to rows that must not (0 x NaN is NaN). So of several rows that are none in a batch, all but one may be victims.
Nothing of them is kept, what was written is overwritten, and in the next step they are computed in two batches, each of
which is halved again if it fails:

    step 1   A B C D E F      rows of B, C, D and E are none: they are suspects
    step 2   A F | B C | D E  D and E fail
    step 3   A B C F | D | E  E fails alone, twice: it ends

A row that is finite has attended to finite numbers alone, so the shares of such rows are as good as any.
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
    """Hands out numbers of batches in which suspects are computed apart (`Sequence.apart`)."""

    def __init__(self) -> None:
        self._numbers = itertools.count(1)

    def judge(self, shares: Listing[ScheduledTokens]) -> Iterator[tuple[Sequence, Verdict]]:
        """Says what to do with the shares of one batch whose numbers were none.

        One that fails alone is tried once more, since what it was computed beside may have been at fault; then from its
        beginning, since what it has reused may be; so it costs at most twice what it costs to compute."""
        # Those that have got far already are the least likely culprits.
        ordered = sorted(shares, key=lambda one: not one.sequence.num_sampled)
        half = len(ordered) // 2
        for part in (ordered[:half], ordered[half:]):
            number = next(self._numbers)
            for one in part:
                suspect = one.sequence
                suspect.apart = number
                suspect.poisoned_at = max(suspect.poisoned_at, one.start + one.num_tokens)
                yield suspect, self._verdict(suspect) if len(shares) == 1 else Verdict.COMPUTE_AGAIN

    def _verdict(self, culprit: Sequence) -> Verdict:
        """Decides about one that has failed alone."""
        culprit.poisonings += 1
        if culprit.poisonings == 1:
            return Verdict.COMPUTE_AGAIN
        has_reused = culprit.domain is not None and culprit.num_computed > 0
        return Verdict.START_OVER if has_reused else Verdict.END


def acquit(sequence: Sequence) -> None:
    """Has a sequence computed together with others again once it has got beyond where its numbers were none."""
    if sequence.num_computed >= sequence.poisoned_at:
        sequence.apart = sequence.poisonings = sequence.poisoned_at = 0
