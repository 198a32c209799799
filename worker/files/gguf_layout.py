"""The layout of GGUF models: one file per quantization, or several numbered parts, `NAME-00001-of-00003.gguf`."""

import re
from collections.abc import Iterable
from pathlib import Path

from tokenbus.worker.contract.engine_errors import ModelError
from tokenbus.worker.files.model_files import Layout

_PART = re.compile(r"(.*)-(\d{5})-of-(\d{5})\.gguf", re.IGNORECASE)
_QUANTIZATION = re.compile(r"[-.]((?:UD-)?(?:I?Q\d\w*|BF16|F16|F32|MXFP4\w*|TQ\d_\d))$", re.IGNORECASE)
_NO_MODELS = ("mmproj", "imatrix")
"""Name prefixes of GGUF files that accompany a model: multimodal projectors and importance matrices."""


class GgufLayout(Layout):
    """Variants are quantizations, such as `Q4_K_M`."""

    kind = "GGUF"
    preferred = ("Q4_K_M", "Q4_0", "Q5_K_M", "Q8_0")

    def is_weights(self, name: str) -> bool:
        """Whether a file is a model or the first part of one."""
        part = _PART.fullmatch(name)
        base = Path(name).name.lower()
        return base.endswith(".gguf") and not base.startswith(_NO_MODELS) and (part is None or int(part[2]) == 1)

    def variant_of(self, name: str) -> str:
        """Returns the quantization that a file's name states, in capitals; the bare name if it states none."""
        stem = Path(stem_of(name)).name
        found = _QUANTIZATION.search(stem)
        return found[1].upper() if found else stem

    def parts_of(self, name: str, names: Iterable[str] = ()) -> list[str]:
        part = _PART.fullmatch(name)
        if part is None:
            return [name]
        return [f"{part[1]}-{number:05}-of-{part[3]}.gguf" for number in range(1, int(part[3]) + 1)]

    def complete(self, weights: Path) -> Path:
        """Returns the first part, whichever part was named. A missing single file is reported when it is read."""
        parts = [weights.with_name(name) for name in self.parts_of(weights.name)]
        missing = [part.name for part in parts if not part.is_file()]
        if len(parts) > 1 and missing:
            raise ModelError(
                f"{weights}: is split, but {', '.join(missing)} is not there; fetch all {len(parts)} parts"
            )
        return parts[0]


def stem_of(name: str) -> str:
    """Returns a file's name without its extension and part number."""
    part = _PART.fullmatch(name)
    return part[1] if part else name.removesuffix(".gguf")
