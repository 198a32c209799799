"""Finds the files of an ONNX model in the ways in which they are laid out.

model.onnx                      Optimum
onnx/model_q4f16.onnx           onnx-community, beside onnx/model.onnx and other precisions
genai_config.json + its file    the builder of onnxruntime-genai
"""

from collections.abc import Callable, Iterable
from pathlib import Path

from tokenbus.worker.engine.models import model_files
from tokenbus.worker.engine.onnx import genai_config, pooling
from tokenbus.worker.engine.runner import ModelError

SIDECARS = (
    *model_files.SIDECARS,
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    genai_config.NAME,
    pooling.SIDECAR,
)
"""Small files that say how the model wants to be used."""
_CPU_PREFERENCE = ("q4", "int4", "q8", "", "bnb4", "fp16", "q4f16", "int8", "uint8", "quantized")
_GPU_PREFERENCE = ("q4f16", "fp16", "q4", "int4", "", "bnb4", "q8", "int8", "uint8", "quantized")
"""Precisions that are taken, in this order, where there are several and none was asked for. Last are those that scale a
batch as a whole, so that requests in it disturb each other, for which they are refused."""


def is_onnx_model(model: str) -> bool:
    """Whether a path leads to an ONNX model: to such a file, or to a folder that holds one and no GGUF."""
    path = Path(model)
    if path.suffix == ".onnx":
        return True
    if not path.is_dir() or any(path.glob("*.gguf")):
        return False
    return any(path.glob("*.onnx")) or any(path.glob("onnx/*.onnx"))


def find(model: str, on_gpu: bool, progress: Callable[[float], None]) -> model_files.ModelFiles:
    """Raises ModelError, saying what to do, where there is no such model, or more than one."""
    if model_files.is_hub_name(model):
        from tokenbus.worker.engine.models import hub

        return hub.fetch(model, progress, OnnxLayout(on_gpu))
    path = Path(model)
    if path.is_dir():
        folder = path
        names = [file.relative_to(folder).as_posix() for file in (*folder.glob("*.onnx"), *folder.glob("onnx/*.onnx"))]
        path = folder / (_named_by_genai(folder) or choose(names, "", str(folder), on_gpu))
    else:
        folder = path.parent.parent if path.parent.name == "onnx" else path.parent
    if not path.is_file():
        raise ModelError(f"{path}: there is no such file; pass --model an ONNX file or a folder with one")
    return model_files.ModelFiles(path, {name: folder / name for name in SIDECARS if (folder / name).is_file()})


class OnnxLayout:
    """Which files of a repository on the Hub make up a model."""

    sidecars: tuple[str, ...] = SIDECARS

    def __init__(self, on_gpu: bool) -> None:
        self._on_gpu = on_gpu

    def __repr__(self) -> str:
        return f"<Layout of ONNX, {'GPU' if self._on_gpu else 'CPU'} first>"

    def select(self, names: list[str], quant: str, where: str) -> list[str]:
        """The graph, and the files with its weights behind it. Raises ModelError as `choose` does."""
        graph = choose([name for name in names if name.endswith(".onnx")], quant, where, self._on_gpu)
        return [graph, *(name for name in names if name.startswith((f"{graph}_data", f"{graph}.data")))]


def choose(names: Iterable[str], quant: str, where: str, on_gpu: bool) -> str:
    """Of the graphs of a folder or repository the one to load.

    Raises ModelError where there is none, none of that precision, or several between which nothing decides."""
    graphs = sorted(name for name in names if not _is_auxiliary(name))
    if not graphs:
        raise ModelError(f"{where}: there is no ONNX file; pass --model a file or a folder with one")
    by_precision = {precision_of(name): name for name in reversed(graphs)}
    if quant:
        if quant.lower() in by_precision:
            return by_precision[quant.lower()]
        raise ModelError(f"{where}: there is no {quant}, only {', '.join(map(_shown, sorted(by_precision)))}")
    if len(graphs) == 1:
        return graphs[0]
    for preferred in _GPU_PREFERENCE if on_gpu else _CPU_PREFERENCE:
        if preferred in by_precision:
            return by_precision[preferred]
    raise ModelError(f"{where}: there are several models ({', '.join(graphs)}); pass --model one of them")


def precision_of(name: str) -> str:
    """What a file's name says of its precision, in small letters; nothing where it says nothing."""
    stem = Path(name).name.removesuffix(".onnx").lower()
    return stem.rpartition("model")[2].removeprefix("_merged").removeprefix("_")


def _shown(precision: str) -> str:
    return precision or "full precision"


def _is_auxiliary(name: str) -> bool:
    """A graph that isn't served by itself: an encoder's half, embeddings for a multimodal model."""
    stem = Path(name).name.lower()
    other = ("encoder_model", "decoder_with_past", "vision_", "embed_tokens", "audio_")
    return stem.startswith(other) or stem == "decoder_model.onnx"


def _named_by_genai(folder: Path) -> str | None:
    """The file that a genai_config.json names."""
    path = folder / genai_config.NAME
    if not path.is_file():
        return None
    named = genai_config.read(path).decoder.filename
    if named is not None and (Path(named).is_absolute() or ".." in Path(named).parts):
        raise ModelError(f"{path}: its file {named} is not in its folder; correct it or take it away")
    return named
