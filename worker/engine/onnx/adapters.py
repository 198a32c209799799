"""The LoRA adapters of one replica: read from PEFT folders or GGUF files, checked against the model's projections,
loaded alongside the model, and bound to the inputs of each run."""

import hashlib
import math
import re
from collections import OrderedDict
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np

from tokenbus.protocol.wire.block_hash import Adapter
from tokenbus.worker.contract.engine_errors import ModelError
from tokenbus.worker.convert import safetensors
from tokenbus.worker.convert.architectures import ARCHITECTURES, Architecture
from tokenbus.worker.engine.device.loaded_models import ReplicaModels
from tokenbus.worker.engine.gguf import adapter_file
from tokenbus.worker.engine.onnx import lora
from tokenbus.worker.engine.onnx.graph import Array
from tokenbus.worker.engine.onnx.lora import LLAMA_CPP_NAMES, MAX_RANK, Base, Change, OnnxAdapter, Place
from tokenbus.worker.engine.onnx.model import OnnxModel
from tokenbus.worker.engine.onnx.session import NO_ADAPTERS, AdapterInputs
from tokenbus.worker.files import gguf_metadata
from tokenbus.worker.files.gguf_metadata import TensorInfo
from tokenbus.worker.files.regular import MAX_ADAPTER_BYTES, MAX_CONFIG_BYTES, read_regular

_GGUF = b"GGUF"
_F32, _F16, _Q8_0, _BF16 = 0, 1, 8, 30
_BLOCK = 32
_DTYPES: Mapping[int, np.dtype[Any]] = {
    _F32: np.dtype("<f4"),
    _F16: np.dtype("<f2"),
    _BF16: np.dtype("<u2"),
    _Q8_0: np.dtype([("scale", "<f2"), ("integers", "i1", _BLOCK)]),
}
_ROTATED = ("q_proj", "k_proj")
_SUFFIX = ".safetensors"
_WEIGHTS = f"adapter_model{_SUFFIX}"
_CONFIG = "adapter_config.json"
_MATRIX = re.compile(r"(?:base_model\.)?(?P<module>.+)\.lora_(?P<part>[AB])(?:\.default)?\.weight")
_MODULE = re.compile(r"(?:.+\.)?layers\.(\d+)\.(?:self_attn|attn|attention|mlp|feed_forward)\.(\w+)")
_CHANGES_BASE = ("pissa", "olora", "corda", "loftq")
"""Initializations that change the base's own weights, by the prefixes of their names."""
_MAX_SETS = 8
"""The number of adapter sets whose inputs are kept: clients choose scales, so there could be any number of sets."""


class OnnxAdapterFile(NamedTuple):
    """The contents of a file that is an adapter for the model."""

    digest: str
    """The name by which the adapter is known everywhere."""
    changes: Mapping[Place, Change]


def read(path: Path, base: Base) -> OnnxAdapterFile:
    """Reads each file once, since it may be replaced at any time. Raises ModelError, naming the problem, unless they
    are a LoRA adapter for the model."""
    weights = path / _WEIGHTS if path.is_dir() else path
    data = read_regular(weights, MAX_ADAPTER_BYTES)
    if data[: len(_GGUF)] == _GGUF:
        return OnnxAdapterFile(_digest(data), _checked(path, _gguf_changes(path, data, base)))
    if weights.suffix != _SUFFIX:
        raise ModelError(f"{path}: is not a LoRA adapter; pass a PEFT folder with {_WEIGHTS}, or a GGUF")
    config = read_regular(weights.with_name(_CONFIG), MAX_CONFIG_BYTES)
    changes = _peft_changes(weights, data, config)
    _check(path, changes, base)
    return OnnxAdapterFile(_digest(data, config), _checked(path, changes))


def _checked(path: Path, changes: Mapping[Place, Change]) -> Mapping[Place, Change]:
    """Raises ModelError for matrices whose values are not finite, before or after they are scaled."""
    for place, change in changes.items():
        for name, matrix in zip("AB", change, strict=True):
            if not np.isfinite(matrix).all():
                raise ModelError(
                    f"{path}: lora_{name} of layer {place.layer}'s {place.name} has values that are not finite (NaN or "
                    "infinity): train or convert the adapter again"
                )
    return changes


def _digest(data: bytes, config: bytes = b"") -> str:
    """Returns, for a GGUF, the same digest as the GGUF engine does."""
    digest = hashlib.blake2b(data, digest_size=16)
    digest.update(config)
    return digest.hexdigest()


def _check(path: Path, changes: Mapping[Place, Change], base: Base) -> None:
    """Raises ModelError for matrices that can't be added to the projections."""
    if not changes:
        raise ModelError(f"{path}: the adapter has no matrices")
    for place, (a, b) in changes.items():
        name = f"layer {place.layer}'s {place.name}"
        if place not in base.sizes:
            raise ModelError(f"{path}: {name} is not a projection of the graph: is it an adapter for another base?")
        inputs, outputs = base.sizes[place]
        if not 1 <= len(a) <= MAX_RANK:
            raise ModelError(f"{path}: {name} has the rank {len(a)}; it must be 1 to {MAX_RANK}")
        if a.shape != (len(a), inputs) or b.shape != (outputs, len(a)):
            raise ModelError(
                f"{path}: {name} has matrices of {a.shape} and {b.shape} for {inputs} inputs and {outputs} outputs: "
                "the ranks differ, or it is an adapter for another base"
            )


def _gguf_changes(path: Path, data: bytes, base: Base) -> Mapping[Place, Change]:
    """Raises ModelError, naming the problem, unless it is an adapter for the model."""
    architecture = _architecture(path, base)
    places = {f"blk.{layer}.{ours}.weight": Place(layer, name) for ours, layer, name in _named(base)}
    shapes = {name: TensorInfo(base.sizes[place], _F32) for name, place in places.items()}
    adapter_file.check(path, data, architecture.name, shapes)
    tensors = gguf_metadata.parse_tensors(path, data)
    alpha = gguf_metadata.parse(path, data).values.get("adapter.lora.alpha")
    found = {}
    for name, place in places.items():
        if f"{name}.lora_a" in tensors:
            a, b = (_values(path, data, tensors[f"{name}.{part}"]) for part in ("lora_a", "lora_b"))
            if architecture.rotates_neighbours and place.name in _ROTATED:
                b = _halves(b, base.head_width)
            scale = alpha / len(a) if isinstance(alpha, int | float) and alpha else 1.0
            found[place] = Change(a, b * np.float32(scale))
    return found


def _architecture(path: Path, base: Base) -> Architecture:
    for name, architecture in ARCHITECTURES.items():
        if name.lower().removesuffix("forcausallm") == base.architecture:
            return architecture
    known = ", ".join(ARCHITECTURES)
    raise ModelError(
        f"{path}: GGUF adapters can be used for {known} only, and by its config.json this is {base.architecture!r}: "
        "pass the PEFT folder that the adapter was converted from"
    )


def _named(base: Base) -> list[tuple[str, int, str]]:
    """Returns the projections with llama.cpp's names for them."""
    ours = {theirs: ours for ours, theirs in LLAMA_CPP_NAMES.items()}
    return [(ours[name], layer, name) for layer, name in base.sizes if name in ours]


def _values(path: Path, data: bytes, tensor: TensorInfo) -> Array:
    """Returns a matrix, of (rank, inputs) or (outputs, rank), in float32."""
    count = math.prod(tensor.shape)
    block, dtype = _BLOCK if tensor.type == _Q8_0 else 1, _DTYPES[tensor.type]
    if count % block or tensor.start + count // block * dtype.itemsize > len(data):
        raise ModelError(f"{path}: is corrupt or cut short; fetch the file again")
    raw = np.frombuffer(data, dtype, count // block, tensor.start)
    if tensor.type == _Q8_0:
        values = raw["integers"] * raw["scale"].astype(np.float32)[:, None]
    else:
        values = safetensors.to_float32(raw, "BF16" if tensor.type == _BF16 else "")
    rows: Array = values.reshape(tensor.shape[1], tensor.shape[0])
    return rows


def _halves(b: Array, head_width: int) -> Array:
    """Reorders the outputs of heads: llama.cpp rotates neighbours together, a graph the two halves."""
    split = b.reshape(-1, head_width // 2, 2, b.shape[1])
    reordered: Array = split.swapaxes(1, 2).reshape(b.shape)
    return reordered


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


def _peft_changes(path: Path, data: bytes, config: bytes) -> Mapping[Place, Change]:
    """Returns an adapter's matrices from the contents of its files. Raises ModelError, naming the problem, but does not
    compare them with a model."""
    settings = _read_config(path.with_name(_CONFIG), config)
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


class ReplicaAdapters:
    """The adapters of one replica by digest, with the number of times that each was loaded.

    `load` may be called from any thread; everything else belongs to the thread that steps. `drop_bindings` drops
    everything that could keep an adapter's matrices in memory."""

    def __init__(self, model: OnnxModel, drop_bindings: Callable[[], None]) -> None:
        self._model = model
        self._base = lora.make_base(model.projections, model.model_config.architecture, model.graph.kv[0].width)
        self._drop_bindings = drop_bindings
        self._loaded = ReplicaModels(model.adapters)
        self._sets: OrderedDict[tuple[Adapter, ...], AdapterInputs] = OrderedDict()
        """The most recently used sets, the latest at the end."""

    def __repr__(self) -> str:
        return f"<ReplicaAdapters {self._loaded!r}>"

    def __contains__(self, digest: str) -> bool:
        return digest in self._loaded

    def load(self, path: Path) -> str:
        """Loads an adapter in addition to the existing ones, and returns its digest. Affects no request if it raises
        ModelError."""
        digest, changes = read(path, self._base)
        projections = self._model.projections
        self._model.take_adapters()

        def arrange() -> OnnxAdapter:
            arrays = lora.arrange(changes, projections)
            for name, array in arrays.items():
                if not np.isfinite(array).all():
                    raise ModelError(
                        f"{path}: {name} has values out of range for {array.dtype}, in which the graph computes"
                    )
            return OnnxAdapter(arrays)

        self._loaded.load(digest, arrange)
        return digest

    def unload(self, digest: str) -> None:
        """Reverses one `load`. If that was the last one, no sequence may use the adapter."""
        if self._loaded.is_last(digest):
            for used in [used for used in self._sets if any(one.digest == digest for one in used)]:
                del self._sets[used]
            self._drop_bindings()
        self._loaded.unload(digest)

    def inputs_of(self, used: tuple[Adapter, ...]) -> AdapterInputs:
        """Returns the inputs of the graph for a set of adapters, the same object as long as it is used often."""
        if not used:
            return NO_ADAPTERS
        if used not in self._sets:
            arrays = lora.combine([(self._loaded[one.digest], one.scale) for one in used])
            session = self._model.graph_runner.session
            self._sets[used] = {name: session.tensor(array) for name, array in arrays.items()}
            if len(self._sets) > _MAX_SETS:
                self._sets.popitem(last=False)
        self._sets.move_to_end(used)
        return self._sets[used]

    def close(self) -> None:
        """Frees every adapter that no other replica has. Nothing may still be computing."""
        self._sets.clear()
        self._drop_bindings()
        self._loaded.close()
