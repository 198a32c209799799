"""The layout of models in safetensors: one file or numbered shards, next to a configuration and a tokenizer."""

import re
from collections.abc import Iterable
from pathlib import Path

from tokenbus.worker.contract.engine_errors import ModelError
from tokenbus.worker.files.model_files import SIDECARS, Layout

SUFFIX = ".safetensors"
_SHARD = re.compile(r"(.*)-(\d{5})-of-(\d{5})\.safetensors")
_NO_MODELS = ("consolidated", "adapter_", "training_", "optimizer")
"""Name prefixes of files that hold the same weights in another layout, or only part of a model."""


class SafetensorsLayout(Layout):
    """The only variant; `--quantize` makes others from it."""

    kind = "safetensors"
    preferred = ("",)
    sidecars = (*SIDECARS, "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja")

    def is_weights(self, name: str) -> bool:
        """Whether a file is a model or the first of its shards."""
        shard = _SHARD.fullmatch(name)
        is_first = shard is None or int(shard[2]) == 1
        return name.endswith(SUFFIX) and "/" not in name and not name.startswith(_NO_MODELS) and is_first

    def variant_of(self, name: str) -> str:
        return ""

    def parts_of(self, name: str, names: Iterable[str] = ()) -> list[str]:
        shard = _SHARD.fullmatch(name)
        if shard is None:
            return [name]
        return [f"{shard[1]}-{number:05}-of-{shard[3]}{SUFFIX}" for number in range(1, int(shard[3]) + 1)]

    def complete(self, weights: Path) -> Path:
        parts = [weights.with_name(name) for name in self.parts_of(weights.name)]
        missing = [part.name for part in parts if not part.is_file()]
        if missing:
            raise ModelError(f"{weights.parent}: {', '.join(missing)} is not there; fetch all {len(parts)} files")
        return parts[0]
