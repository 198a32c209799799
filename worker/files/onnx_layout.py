"""The layouts of ONNX models, of which there are three:

model.onnx                      Optimum
onnx/model_q4f16.onnx           onnx-community, next to onnx/model.onnx and other precisions
genai_config.json + its file    the model builder of onnxruntime-genai
"""

from collections.abc import Iterable
from pathlib import Path

from tokenbus.worker.contract.engine_errors import ModelError
from tokenbus.worker.files import onnx_model_config
from tokenbus.worker.files.model_files import SIDECARS, Layout

_CPU_PREFERENCE = ("q4", "int4", "q8", "", "bnb4", "fp16", "q4f16", "int8", "uint8", "quantized")
_GPU_PREFERENCE = ("q4f16", "fp16", "q4", "int4", "", "bnb4", "q8", "int8", "uint8", "quantized")
"""Dynamically quantized precisions (int8, uint8) come last: they scale a batch as a whole, so that requests in it
affect each other, and the engine refuses them for that."""
_AUXILIARY = ("encoder_model", "decoder_with_past", "vision_", "embed_tokens", "audio_")
"""Name prefixes of graphs that are not models of their own: halves of encoder-decoders, parts of multimodal models."""


class OnnxLayout(Layout):
    """Variants are precisions, such as `q4f16`; full precision has no name."""

    kind = "ONNX"
    sidecars = (
        *SIDECARS,
        "tokenizer_config.json",
        "special_tokens_map.json",
        "chat_template.jinja",
        onnx_model_config.GENAI_CONFIG,
        onnx_model_config.POOLING_CONFIG,
    )

    def __init__(self, *, on_gpu: bool = False) -> None:
        self.preferred = _GPU_PREFERENCE if on_gpu else _CPU_PREFERENCE

    def is_weights(self, name: str) -> bool:
        base = Path(name).name.lower()
        return name.endswith(".onnx") and not base.startswith(_AUXILIARY) and base != "decoder_model.onnx"

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
        if not weights.is_file():
            raise ModelError(f"{weights}: there is no such file; pass --model an ONNX file or a folder with one")
        return weights


def is_onnx_model(model: str) -> bool:
    """Whether a path leads to an ONNX model: an ONNX file, or a folder that holds one and no GGUF."""
    path = Path(model)
    if path.suffix == ".onnx":
        return True
    if not path.is_dir() or any(path.glob("*.gguf")):
        return False
    return any(path.glob("*.onnx")) or any(path.glob("onnx/*.onnx"))


def model_folder(graph: Path) -> Path:
    """Returns the folder of the model that a graph belongs to: the one above, if the graph lies in `onnx/`."""
    return graph.parent.parent if graph.parent.name == "onnx" else graph.parent


def _named_by_genai(folder: Path) -> str | None:
    """Returns the file that a genai_config.json names. Raises ModelError if it lies outside the folder."""
    path = folder / onnx_model_config.GENAI_CONFIG
    if not path.is_file():
        return None
    named = onnx_model_config.read_genai({path.name: path}).decoder.filename
    if named is not None and (Path(named).is_absolute() or ".." in Path(named).parts):
        raise ModelError(f"{path}: its file {named} is not in its folder; correct or remove it")
    return named
