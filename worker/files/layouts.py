"""The layouts in which models are published:

NAME.gguf, or numbered parts    GGUF: one file per quantization, or NAME-00001-of-00003.gguf and so on
NAME.safetensors, or shards     safetensors: one file or numbered shards, next to a configuration and a tokenizer
model.onnx                      Optimum
onnx/model_q4f16.onnx           onnx-community, next to onnx/model.onnx and other precisions
genai_config.json + its file    the model builder of onnxruntime-genai
"""

import os.path
import re
from collections.abc import Iterable
from pathlib import Path

from tokenbus.worker.contract.engine_errors import ModelError
from tokenbus.worker.files import model_config
from tokenbus.worker.files.model_files import SIDECARS, Layout, shortened

_PART = re.compile(r"(.*)-(\d{5})-of-(\d{5})\.gguf", re.IGNORECASE)
_QUANTIZATION = re.compile(r"[-.]((?:UD-)?(?:I?Q\d\w*|BF16|F16|F32|MXFP4\w*|TQ\d_\d))$", re.IGNORECASE)
_BESIDE_GGUF = ("mmproj", "imatrix")
"""Name prefixes of GGUF files that accompany a model: multimodal projectors and importance matrices."""


class GgufLayout(Layout):
    """Variants are quantizations, such as `Q4_K_M`."""

    kind = "GGUF"
    preferred = ("Q4_K_M", "Q4_0", "Q5_K_M", "Q8_0")

    def is_weights(self, name: str) -> bool:
        """Whether a file is a model or the first part of one."""
        part = _PART.fullmatch(name)
        base = Path(name).name.lower()
        return base.endswith(".gguf") and not base.startswith(_BESIDE_GGUF) and (part is None or int(part[2]) == 1)

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
        missing = [part.name for part in parts if not os.path.isfile(part)]
        if len(parts) > 1 and missing:
            raise ModelError(
                f"{weights}: is split, but {shortened(missing)} is not there; fetch all {len(parts)} parts"
            )
        return parts[0]


def stem_of(name: str) -> str:
    """Returns a file's name without its extension and part number."""
    part = _PART.fullmatch(name)
    return part[1] if part else name.removesuffix(".gguf")


SAFETENSORS_SUFFIX = ".safetensors"
_SHARD = re.compile(r"(.*)-(\d{5})-of-(\d{5})\.safetensors")
_BESIDE_SAFETENSORS = ("consolidated", "adapter_", "training_", "optimizer")
"""Name prefixes of files that hold the same weights in another layout, or only part of a model."""


class SafetensorsLayout(Layout):
    """The only variant; `--quantize` makes others from it."""

    kind = "safetensors"
    preferred = ("",)
    sidecars = (
        *SIDECARS,
        "tokenizer_config.json",
        "special_tokens_map.json",
        "chat_template.jinja",
        model_config.POOLING_CONFIG,
    )

    def is_weights(self, name: str) -> bool:
        """Whether a file is a model or the first of its shards."""
        shard = _SHARD.fullmatch(name)
        is_first = shard is None or int(shard[2]) == 1
        return (
            name.endswith(SAFETENSORS_SUFFIX)
            and "/" not in name
            and not name.startswith(_BESIDE_SAFETENSORS)
            and is_first
        )

    def variant_of(self, name: str) -> str:
        return ""

    def parts_of(self, name: str, names: Iterable[str] = ()) -> list[str]:
        shard = _SHARD.fullmatch(name)
        if shard is None:
            return [name]
        return [f"{shard[1]}-{number:05}-of-{shard[3]}{SAFETENSORS_SUFFIX}" for number in range(1, int(shard[3]) + 1)]

    def complete(self, weights: Path) -> Path:
        parts = [weights.with_name(name) for name in self.parts_of(weights.name)]
        missing = [part.name for part in parts if not os.path.isfile(part)]
        if missing:
            raise ModelError(f"{weights.parent}: {shortened(missing)} is not there; fetch all {len(parts)} files")
        return parts[0]


_CPU_PREFERENCE = ("q4", "int4", "q8", "", "bnb4", "fp16", "q4f16", "int8", "uint8", "quantized")
_GPU_PREFERENCE = ("q4f16", "fp16", "q4", "int4", "", "bnb4", "q8", "int8", "uint8", "quantized")
"""Dynamically quantized precisions (int8, uint8) come last: they scale a batch as a whole, so that requests in it
affect each other, and the engine refuses them for that."""
_BESIDE_ONNX = ("encoder_model", "decoder_with_past", "vision_", "embed_tokens", "audio_")
"""Name prefixes of graphs that are not models of their own: halves of encoder-decoders, parts of multimodal models."""


class OnnxLayout(Layout):
    """Variants are precisions, such as `q4f16`; full precision has no name."""

    kind = "ONNX"
    sidecars = (
        *SIDECARS,
        "tokenizer_config.json",
        "special_tokens_map.json",
        "chat_template.jinja",
        model_config.GENAI_CONFIG,
        model_config.POOLING_CONFIG,
    )

    def __init__(self, *, on_gpu: bool = False) -> None:
        self.preferred = _GPU_PREFERENCE if on_gpu else _CPU_PREFERENCE

    def is_weights(self, name: str) -> bool:
        base = Path(name).name.lower()
        return name.endswith(".onnx") and not base.startswith(_BESIDE_ONNX) and base != "decoder_model.onnx"

    def variant_of(self, name: str) -> str:
        """Returns the precision that a file's name states, in lower case."""
        stem = Path(name).name.removesuffix(".onnx").lower()
        return stem.rpartition("model")[2].removeprefix("_merged").removeprefix("_")

    def parts_of(self, name: str, names: Iterable[str]) -> list[str]:
        """Returns the graph and the external data files next to it."""
        return [name, *(other for other in names if other.startswith((f"{name}_data", f"{name}.data")))]

    def in_folder(self, folder: Path) -> str:
        graphs = [file.relative_to(folder).as_posix() for file in (*folder.glob("*.onnx"), *folder.glob("onnx/*.onnx"))]
        return _named_by_genai(folder) or self.choose(graphs, "", str(folder))

    def folder_of(self, weights: Path) -> Path:
        return model_folder(weights)

    def complete(self, weights: Path) -> Path:
        if not os.path.isfile(weights):
            raise ModelError(f"{weights}: there is no such file; name an ONNX file or a folder with one")
        return weights


def is_onnx_model(model: str) -> bool:
    """Whether a path leads to an ONNX model: an ONNX file, or a folder that holds one and no GGUF."""
    path = Path(model)
    if path.suffix == ".onnx":
        return True
    if not os.path.isdir(path) or any(path.glob("*.gguf")):
        return False
    return any(path.glob("*.onnx")) or any(path.glob("onnx/*.onnx"))


def model_folder(graph: Path) -> Path:
    """Returns the folder of the model that a graph belongs to: the one above, if the graph lies in `onnx/`."""
    return graph.parent.parent if graph.parent.name == "onnx" else graph.parent


def _named_by_genai(folder: Path) -> str | None:
    """Returns the file that a genai_config.json names. Raises ModelError if it lies outside the folder."""
    path = folder / model_config.GENAI_CONFIG
    if not os.path.isfile(path):
        return None
    named = model_config.read_genai({path.name: path}).decoder.filename
    if named is not None and (Path(named).is_absolute() or ".." in Path(named).parts):
        raise ModelError(f"{path}: its file {named} is not in its folder; correct or remove it")
    return named
