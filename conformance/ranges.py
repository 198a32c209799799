"""The documented ranges of a request's numbers and texts: values at their limits, and values just beyond."""

from typing import NamedTuple


class FieldLimits(NamedTuple):
    """Values of one field: `accepted` are the outermost ones that are allowed, `rejected` the next ones."""

    field: str
    accepted: tuple[object, ...]
    rejected: tuple[object, ...]


_STOP = "s" * 1_024

LIMITS = (
    FieldLimits("max_tokens", (1,), (0, -1)),
    FieldLimits("min_tokens", (0,), (-1,)),
    FieldLimits("temperature", (0, 100), (-0.001, 100.1)),
    FieldLimits("top_p", (0.000001, 1), (0, -0.1, 1.001)),
    FieldLimits("top_k", (0,), (-1,)),
    FieldLimits("min_p", (0, 1), (-0.001, 1.001)),
    FieldLimits("repetition_penalty", (0.01, 10), (0.009, 10.01)),
    FieldLimits("presence_penalty", (-2, 2), (-2.01, 2.01)),
    FieldLimits("frequency_penalty", (-2, 2), (-2.01, 2.01)),
    FieldLimits("seed", (0, 2**32 - 1), (-1, 2**32)),
    FieldLimits("logprobs", (0, 20), (-1, 21)),
    FieldLimits("priority", (-1_000, 1_000), (-1_001, 1_001)),
    FieldLimits("timeout_ms", (600_000,), (0, -1)),
    FieldLimits("stop", ("s", _STOP, [_STOP] * 16), ("", _STOP + "s", ["a"] * 17, ["a", ""])),
    FieldLimits("id", ("i", "A-Za-z0-9_" + "x" * 118), ("", "x" * 129, "a.b", "a b", "ü", "a*", ">")),
)
