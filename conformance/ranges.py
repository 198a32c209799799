"""The documented ranges of a request's numbers and texts: values at their limits, and values just beyond."""

from typing import NamedTuple


class Limits(NamedTuple):
    """Values of one field: `taken` are the outermost ones that are allowed, `refused` the next ones."""

    field: str
    taken: tuple[object, ...]
    refused: tuple[object, ...]


_STOP = "s" * 1_024

LIMITS = (
    Limits("max_tokens", (1,), (0, -1)),
    Limits("min_tokens", (0,), (-1,)),
    Limits("temperature", (0, 100), (-0.001, 100.1)),
    Limits("top_p", (0.000001, 1), (0, -0.1, 1.001)),
    Limits("top_k", (0,), (-1,)),
    Limits("min_p", (0, 1), (-0.001, 1.001)),
    Limits("repetition_penalty", (0.01, 10), (0.009, 10.01)),
    Limits("presence_penalty", (-2, 2), (-2.01, 2.01)),
    Limits("frequency_penalty", (-2, 2), (-2.01, 2.01)),
    Limits("seed", (0, 2**32 - 1), (-1, 2**32)),
    Limits("logprobs", (0, 20), (-1, 21)),
    Limits("priority", (-1_000, 1_000), (-1_001, 1_001)),
    Limits("timeout_ms", (600_000,), (0, -1)),
    Limits("stop", ("s", _STOP, [_STOP] * 16), ("", _STOP + "s", ["a"] * 17, ["a", ""])),
    Limits("id", ("i", "A-Za-z0-9_" + "x" * 118), ("", "x" * 129, "a.b", "a b", "ü", "a*", ">")),
)
