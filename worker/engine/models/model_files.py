"""Finds the files of a model: a file, a directory, or a name on the Hugging Face Hub, `org/repo[:quant]`."""

import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple

from tokenbus.worker.engine.runner import ModelError

_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+(:[\w.-]+)?")
_ENDINGS = (".gguf", ".onnx")
_PART = re.compile(r"(.*)-(\d{5})-of-(\d{5})\.gguf", re.IGNORECASE)
_QUANT = re.compile(r"[-.]((?:UD-)?(?:I?Q\d\w*|BF16|F16|F32|MXFP4\w*|TQ\d_\d))$", re.IGNORECASE)
PREFERRED = ("Q4_K_M", "Q4_0", "Q5_K_M", "Q8_0")
"""Quantizations that are taken, in this order, where there are several and none was asked for."""
SIDECARS = ("generation_config.json", "config.json", "metadata.json", "tokenizer.json")
"""Small files beside the weights that say how the model wants to be used."""


class ModelFiles(NamedTuple):
    """The files of one model."""

    weights: Path
    """The file to load; of one that is split, the first part."""
    sidecars: dict[str, Path]
    """Those of `SIDECARS` that there are, by name."""


def is_hub_name(model: str) -> bool:
    """Whether it can only be meant as a name on the Hub."""
    return not Path(model).exists() and _HUB_NAME.fullmatch(model) is not None and not model.lower().endswith(_ENDINGS)


def source_name(model: str) -> str:
    """What a card says of where a model comes from: its name on the Hub, or that of its file or folder."""
    return model if is_hub_name(model) else Path(model).name


def served_name(model: str) -> str:
    """What to call a model on the wire where nothing else was said."""
    if is_hub_name(model):
        name = model.partition(":")[0].rpartition("/")[2]
        return name.lower().removesuffix("-gguf").removesuffix("-onnx")
    path = Path(model)
    if path.suffix == ".onnx":
        folder = path.parent.parent if path.parent.name == "onnx" else path.parent
        return folder.resolve().name.lower()
    split = _PART.fullmatch(path.name)
    return (split.group(1) if split else path.name.removesuffix(".gguf")).lower()


_WEIGHTS = "weights"


def to_paths(found: ModelFiles) -> dict[str, str]:
    """The paths of a model by name, as they travel in settings."""
    return {_WEIGHTS: str(found.weights)} | {name: str(path) for name, path in found.sidecars.items()}


def from_paths(files: dict[str, str]) -> ModelFiles | None:
    """The reverse; None where nothing is known."""
    if not files:
        return None
    return ModelFiles(Path(files[_WEIGHTS]), {name: Path(path) for name, path in files.items() if name != _WEIGHTS})


def find(model: str, progress: Callable[[float], None]) -> ModelFiles:
    """Raises ModelError, saying what to do, where there is no such model, or more than one."""
    if is_hub_name(model):
        from tokenbus.worker.engine.models import hub

        return hub.fetch(model, progress, GgufLayout())
    path = Path(model)
    if path.is_dir():
        folder = path
        path = folder / choose([file.name for file in folder.iterdir()], "", str(folder))
    else:
        folder = path.parent
    return ModelFiles(_first_part(path), {name: folder / name for name in SIDECARS if (folder / name).is_file()})


class GgufLayout:
    """Which files of a repository on the Hub make up a GGUF model."""

    sidecars: tuple[str, ...] = SIDECARS

    def __repr__(self) -> str:
        return "<Layout of GGUF>"

    def select(self, names: list[str], quant: str, where: str) -> list[str]:
        """All parts of the weights. Raises ModelError as `choose` does."""
        return split_parts(choose(names, quant, where))


def choose(names: Iterable[str], quant: str, where: str) -> str:
    """Of the files of a folder or repository the weights to load; the first part of those that are split.

    Raises ModelError where there are none, none of that quantization, or several between which nothing decides."""
    weights = sorted(name for name in names if _is_weights(name))
    if not weights:
        raise ModelError(f"{where}: there is no GGUF file; pass --model a file or a folder with one")
    by_quant = {quant_of(name): name for name in reversed(weights)}
    if quant:
        for known, name in by_quant.items():
            if known.lower() == quant.lower():
                return name
        raise ModelError(f"{where}: there is no {quant}, only {', '.join(sorted(by_quant))}")
    if len(weights) == 1:
        return weights[0]
    for preferred in PREFERRED:
        if preferred in by_quant:
            return by_quant[preferred]
    raise ModelError(f"{where}: there are several models ({', '.join(weights)}); pass --model one of them")


def quant_of(name: str) -> str:
    """The quantization that a file's name says it has, in capitals; the bare name where it says none."""
    split = _PART.fullmatch(name)
    stem = Path(split.group(1) if split else name.removesuffix(".gguf")).name
    found = _QUANT.search(stem)
    return found.group(1).upper() if found else stem


def split_parts(name: str) -> list[str]:
    """The names of all parts of a split file, or of the one file that it is."""
    split = _PART.fullmatch(name)
    if split is None:
        return [name]
    return [f"{split.group(1)}-{number:05}-of-{split.group(3)}.gguf" for number in range(1, int(split.group(3)) + 1)]


def _is_weights(name: str) -> bool:
    """Not a later part of others, and no projector or importance matrix that lies beside."""
    split = _PART.fullmatch(name)
    stem = Path(name).name.lower()
    helper = stem.startswith(("mmproj", "imatrix"))
    return stem.endswith(".gguf") and not helper and (split is None or int(split.group(2)) == 1)


def _first_part(path: Path) -> Path:
    """Raises ModelError where a part is missing."""
    parts = [path.with_name(name) for name in split_parts(path.name)]
    if len(parts) > 1:
        missing = [part.name for part in parts if not part.is_file()]
        if missing:
            raise ModelError(f"{path}: is split, but {', '.join(missing)} is not there; fetch all {len(parts)} parts")
    return parts[0]
