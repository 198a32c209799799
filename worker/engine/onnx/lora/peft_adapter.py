"""Reads the matrices of an adapter as PEFT saves it: adapter_model.safetensors, with adapter_config.json."""

import math
import re
from collections.abc import Mapping
from pathlib import Path

import msgspec
import numpy as np

from tokenbus.worker.contract.engine_errors import ModelError
from tokenbus.worker.convert import safetensors
from tokenbus.worker.engine.onnx.graphs.arrays import Array
from tokenbus.worker.engine.onnx.lora.matrices import Change
from tokenbus.worker.engine.onnx.lora.projections import Place

SUFFIX = ".safetensors"
WEIGHTS = f"adapter_model{SUFFIX}"
CONFIG = "adapter_config.json"
_MATRIX = re.compile(r"(?:base_model\.)?(?P<module>.+)\.lora_(?P<part>[AB])(?:\.default)?\.weight")
_MODULE = re.compile(r"(?:.+\.)?layers\.(\d+)\.(?:self_attn|attn|attention|mlp|feed_forward)\.(\w+)")
_CHANGES_BASE = ("pissa", "olora", "corda", "loftq")
"""Initializations that change the base's own weights, by the prefixes of their names."""


class _Config(msgspec.Struct, frozen=True):
    """The fields of adapter_config.json that determine the computation."""

    peft_type: str = ""
    r: int = 8
    lora_alpha: float = 8
    alpha_pattern: dict[str, float] | None = None
    use_rslora: bool = False
    use_dora: bool = False
    lora_bias: bool = False
    bias: str = "none"
    modules_to_save: list[str] | None = None
    layer_replication: list[tuple[int, int]] | None = None
    alora_invocation_tokens: list[int] | None = None
    init_lora_weights: bool | str | None = True

    def problem(self) -> str:
        """Returns why such an adapter is not supported; empty if it is."""
        initialised = str(self.init_lora_weights).lower()
        reasons = {
            f"is of the kind {self.peft_type!r}, not LORA": self.peft_type != "LORA",
            "has magnitudes (use_dora)": self.use_dora,
            "trains biases": self.bias != "none" or self.lora_bias,
            "has modules of its own (modules_to_save)": bool(self.modules_to_save),
            "repeats layers (layer_replication)": bool(self.layer_replication),
            "acts only after its invocation tokens": bool(self.alora_invocation_tokens),
            f"is for a base that {initialised} has changed": initialised.startswith(_CHANGES_BASE),
        }
        return next((text for text, is_so in reasons.items() if is_so), "")

    def scale(self, module: str, rank: int) -> float:
        """Returns the factor by which PEFT multiplies a module's change."""
        patterns = (self.alpha_pattern or {}).items()
        alpha = next((alpha for name, alpha in patterns if _is_named(name, module)), self.lora_alpha)
        return alpha / (math.sqrt(rank) if self.use_rslora else rank)


def changes(path: Path, data: bytes, config: bytes) -> Mapping[Place, Change]:
    """Returns an adapter's matrices from the contents of its files. Raises ModelError, naming the problem, but does not
    compare them with a model."""
    settings = _read_config(path.with_name(CONFIG), config)
    halves: dict[str, dict[str, Array]] = {}
    for name, array in safetensors.parse(path, data).items():
        matrix = _MATRIX.fullmatch(name)
        if matrix is None or array.ndim != 2:
            raise ModelError(f"{path}: {name} is neither lora_A nor lora_B; only these are supported")
        halves.setdefault(matrix["module"], {})[matrix["part"]] = array
    found = dict(_change(path, module, parts, settings) for module, parts in halves.items())
    if len(found) != len(halves):
        raise ModelError(f"{path}: two of the adapter's modules can't be told apart: {', '.join(sorted(halves))[:200]}")
    return found


def _read_config(path: Path, data: bytes) -> _Config:
    try:
        config = msgspec.json.decode(data, type=_Config)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ModelError(f"{path}: can't be read: {error}") from error
    if problem := config.problem():
        raise ModelError(f"{path}: the adapter {problem}, which is not served")
    return config


def _change(path: Path, module: str, parts: Mapping[str, Array], config: _Config) -> tuple[Place, Change]:
    found = _MODULE.fullmatch(module)
    if found is None:
        raise ModelError(f"{path}: {module} is not a projection of a layer; an adapter can change only those")
    for part in "AB":
        if part not in parts:
            raise ModelError(f"{path}: the adapter has no {module}.lora_{part}.weight")
    rank = max(1, len(parts["A"]))
    with np.errstate(over="ignore", invalid="ignore"):  # values out of range become infinite, which is found later
        b = parts["B"] * np.asarray(config.scale(module, rank)).astype(parts["B"].dtype)
    return Place(int(found[1]), found[2]), Change(parts["A"], b)


def _is_named(pattern: str, module: str) -> bool:
    """Whether a pattern, the end of a name or a regular expression for one, matches a module."""
    try:
        return re.fullmatch(rf"(.*\.)?({pattern})", module) is not None
    except re.error:
        return False
