"""The numbers of a row of logits in short. Needs no numpy, since frontends read it."""

from typing import NamedTuple

import msgspec


class LogitsSummary(msgspec.Struct, frozen=True, array_like=True):
    """Counts the logits of a row that are no numbers, and sums up the others."""

    nan: int
    pos_inf: int
    neg_inf: int
    """Tokens that the model rules out, or one of those that are no numbers."""
    finite: int
    mean: float
    """The mean of the finite ones; it and the next two are 0 if there is none."""
    smallest: float
    largest: float

    def to_log(self) -> dict[str, float]:
        """Returns it for a log line."""
        return {
            name: round(value, 4) if isinstance(value, float) else value
            for name, value in msgspec.structs.asdict(self).items()
        }


class SeenLogits(NamedTuple):
    """The rows that were summed up since the last step."""

    sampled: LogitsSummary | None = None
    """A row that was looked at because it was time to."""
    poisoned: dict[int, LogitsSummary] = {}
    """Rows that are not finite, by the numbers of their sequences."""

    @property
    def non_finite(self) -> tuple[int, int, int]:
        """The logits of all these rows that are NaN, infinity and minus infinity. In a healthy row, the latter only
        rule tokens out, and do not count."""
        rows = [*self.poisoned.values()]
        nan, pos_inf, neg_inf = (sum(getattr(one, kind) for one in rows) for kind in ("nan", "pos_inf", "neg_inf"))
        if self.sampled is not None:
            nan, pos_inf = nan + self.sampled.nan, pos_inf + self.sampled.pos_inf
        return nan, pos_inf, neg_inf
