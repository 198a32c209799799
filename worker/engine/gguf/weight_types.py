"""Knows which types of weights llama.cpp multiplies fast on a processor, by the features that it reports.

It multiplies a matrix by all tokens of a prompt in tiles, several rows by several tokens, if it has code for the
matrix's type on the processor (`llamafile/sgemm.cpp`, `repack.cpp` and `tiled/tiled.cpp`, which has K and IQ types for
every processor). Else it multiplies row by row, which takes 1.5 to 2 times as long (decision 0060)."""

from collections.abc import Mapping, Set

from tokenbus.worker.convert import converted
from tokenbus.worker.files import number_types
from tokenbus.worker.files.number_types import BF16, F16, Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, NumberType

_TILED: dict[NumberType, tuple[frozenset[str], ...]] = {
    F16: (frozenset({"LLAMAFILE", "AVX", "F16C"}), frozenset({"LLAMAFILE", "NEON"})),
    BF16: (frozenset({"LLAMAFILE", "AVX2"}),),
    Q8_0: (frozenset({"LLAMAFILE", "AVX"}), frozenset({"DOTPROD"})),
    Q5_0: (frozenset({"LLAMAFILE", "AVX"}),),
    Q4_0: (frozenset({"LLAMAFILE", "AVX"}), frozenset({"DOTPROD"})),
    Q4_1: (frozenset({"MATMUL_INT8"}), frozenset({"AMX_INT8"})),
    Q5_1: (),
}
"""The sets of features of which a processor needs one, with all of its features, for tiles of a type."""
_INSTEAD = {BF16: (F16,), Q5_1: (Q5_0, Q8_0), Q5_0: (Q4_0, Q8_0), Q4_1: (Q4_0, Q8_0)}
"""Types of about the same size, of rows of any length: those of K types must be a multiple of 256."""
_HAS_PRODUCTS = "AVX512_BF16"
"""Instructions that multiply BF16. ARM has some too, and llama.cpp no code for them."""


def best_conversion(published: str, features: Set[str]) -> str:
    """Returns the type to which a checkpoint is converted if nobody names one. It holds what was published, so only
    BF16 becomes BF16."""
    return "bf16" if published == "bf16" and _HAS_PRODUCTS in features else converted.DEFAULT_TYPE


def slow_weights(sizes: Mapping[int, int], features: Set[str]) -> str:
    """Says what to use instead, in one line, if a processor multiplies most of a model's weights row by row and others
    of their size in tiles; else it is empty. `sizes` are the numbers of all matrices by ggml's type."""
    slow = {number_types.BY_GGML[kind]: size for kind, size in sizes.items() if _instead(kind, features)}
    if 2 * sum(slow.values()) <= sum(sizes.values()):
        return ""
    kind = max(slow, key=lambda one: slow[one])
    others = " or ".join(one.name.upper() for one in _instead(kind.ggml, features))
    return f"{kind.name.upper()}: {others} would compute prompts 1.5 to 2 times as fast on this processor"


def _instead(ggml: int, features: Set[str]) -> list[NumberType]:
    """Returns types that are fast, for one that is slow."""
    kind = number_types.BY_GGML.get(ggml)
    if kind is None or kind not in _INSTEAD or _is_tiled(kind, features):
        return []
    return [one for one in _INSTEAD[kind] if _is_tiled(one, features)]


def _is_tiled(kind: NumberType, features: Set[str]) -> bool:
    return any(needed <= features for needed in _TILED[kind])
