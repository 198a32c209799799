"""The files of a model: how a user names them, where they are found, and how they travel in settings.

A model is named by a file, by a folder, or by a repository on the Hugging Face Hub as `org/repo[:variant]`. Which files
make up a model differs by format, so each format subclasses `Layout` (layouts.py). Weights that are loaded are marked
by a shared lock on the file, which ends with its process, so that they are not removed.
"""

import contextlib
import os
import re
import sys
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import BinaryIO, ClassVar, NamedTuple, TypeVar

import msgspec

from tokenbus.worker.contract.engine_errors import ModelError
from tokenbus.worker.files import transfer
from tokenbus.worker.files.regular import MAX_CONFIG_BYTES, open_regular, read_regular

if sys.platform != "win32":
    import fcntl

_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+(:[\w.-]+)?")
_WEIGHTS_SUFFIXES = (".gguf", ".onnx")
_WEIGHTS_KEY, _FINGERPRINT_KEY = "weights", "fingerprint"
_MAX_NAMED = 40
SIDECARS = ("generation_config.json", "config.json", "metadata.json", "tokenizer.json")
"""Small files next to the weights that say how the model is meant to be used."""


def has_hub_form(model: str) -> bool:
    """Whether the name has the form of that of a repository on the Hub. A path may have it too."""
    return _HUB_NAME.fullmatch(model) is not None and not model.lower().endswith(_WEIGHTS_SUFFIXES)


def is_hub_name(model: str) -> bool:
    """Whether the name can only refer to a repository on the Hub: it has the right form, and no such path exists."""
    return has_hub_form(model) and not os.path.exists(model)


def source_name(model: str) -> str:
    """Returns the origin that a worker's card shows: the name on the Hub, or the name of the file or folder."""
    return model if is_hub_name(model) else Path(model).name


class ModelFiles(NamedTuple):
    """The files of one model on this machine."""

    weights: Path
    """The file to load; the first part of split weights."""
    sidecars: dict[str, Path]
    """The sidecars that exist, by name."""
    fingerprint: str = ""
    """The name of these weights in the fleet, where that is not a digest of this file."""

    def to_paths(self) -> dict[str, str]:
        """Returns the paths by name, and the fingerprint if there is one, as they travel in settings."""
        paths = {_WEIGHTS_KEY: str(self.weights)} | {name: str(path) for name, path in self.sidecars.items()}
        return paths | ({_FINGERPRINT_KEY: self.fingerprint} if self.fingerprint else {})

    @classmethod
    def from_paths(cls, paths: dict[str, str]) -> "ModelFiles | None":
        """Reverses `to_paths`; returns None if there are no paths."""
        if not paths:
            return None
        sidecars = {name: Path(path) for name, path in paths.items() if name not in (_WEIGHTS_KEY, _FINGERPRINT_KEY)}
        return cls(Path(paths[_WEIGHTS_KEY]), sidecars, paths.get(_FINGERPRINT_KEY, ""))


def shortened(names: Sequence[str]) -> str:
    """Returns a list for a message, which names the first ones."""
    more = f" and {len(names) - _MAX_NAMED:,} more" if len(names) > _MAX_NAMED else ""
    return ", ".join(names[:_MAX_NAMED]) + more


class Layout(ABC):
    """The rules by which one engine recognises its model in a folder or repository.

    A model may come in several variants (quantizations, precisions), each in its own files."""

    kind: ClassVar[str]
    """The file format, for messages."""
    sidecars: ClassVar[tuple[str, ...]] = SIDECARS
    """The sidecars that this engine reads."""
    preferred: tuple[str, ...]
    """The preferred variants, in order, if there are several and none was requested."""

    @abstractmethod
    def is_weights(self, name: str) -> bool:
        """Whether a file can be loaded as a model."""

    @abstractmethod
    def variant_of(self, name: str) -> str:
        """Returns the variant that a file's name states."""

    @abstractmethod
    def parts_of(self, name: str, names: Iterable[str]) -> list[str]:
        """Returns all files, out of `names`, that these weights consist of; the one to load comes first."""

    def in_folder(self, folder: Path) -> str:
        """Returns the weights to load from a folder, relative to it. Raises ModelError."""
        return self.choose([file.name for file in folder.iterdir()], "", str(folder))

    def folder_of(self, weights: Path) -> Path:
        """Returns the folder in which the sidecars of these weights lie."""
        return weights.parent

    @abstractmethod
    def complete(self, weights: Path) -> Path:
        """Returns the file to load. Raises ModelError if a file of the weights is missing."""

    def choose(self, names: Iterable[str], variant: str, where: str, sizes: Mapping[str, int] | None = None) -> str:
        """Returns the weights to load out of the files of a folder or repository. `sizes` are for the messages.

        Raises ModelError if there are none, none of the requested variant, or several with no rule to decide between
        them."""
        weights = sorted(filter(self.is_weights, names))
        if not weights:
            raise ModelError(f"{where}: there is no {self.kind} file; name a file or a folder with one")
        # Reversed, so that of two files of one variant the first by name is taken.
        by_variant = {self.variant_of(name): name for name in reversed(weights)}
        if variant:
            # People write quantizations in any case.
            for known, name in by_variant.items():
                if known.lower() == variant.lower():
                    return name
            raise ModelError(f"{where}: there is no {variant}, only {self._listed(by_variant, sizes)}")
        if len(weights) == 1:
            return weights[0]
        for preferred in self.preferred:
            if preferred in by_variant:
                return by_variant[preferred]
        if sizes is not None:
            first = sorted(by_variant)[0]
            problem = f"there are several models: {self._listed(by_variant, sizes)}"
            raise ModelError(f"{where}: {problem}; choose one, such as {where}:{first}")
        raise ModelError(f"{where}: there are several models ({shortened(weights)}); name one of them")

    def _listed(self, by_variant: Mapping[str, str], sizes: Mapping[str, int] | None) -> str:
        """Returns the variants, with the sizes of all their files if these are known."""
        known = {variant or "full precision": name for variant, name in sorted(by_variant.items())}
        if sizes is None:
            return shortened(list(known))
        size_of = {name: sum(sizes.get(part, 0) for part in self.parts_of(name, sizes)) for name in known.values()}
        return shortened([f"{variant} ({transfer.size(size_of[name])})" for variant, name in known.items()])

    def select(self, sizes: Mapping[str, int], variant: str, where: str) -> list[str]:
        """Returns the files of a repository to download, the one to load first, given their sizes by name.

        Raises ModelError as `choose` does."""
        return self.parts_of(self.choose(sizes, variant, where, sizes), sizes)

    def recognises(self, path: Path) -> bool:
        """Whether a file is of this layout, or a folder has weights of it."""
        names = os.listdir(path) if os.path.isdir(path) else [path.name]
        return any(map(self.is_weights, names))

    def find(self, path: Path, *, follow_links: bool = True) -> ModelFiles:
        """Finds a model on this machine. Raises ModelError, saying what to do, if it can't, or if it is not to follow
        links and a sidecar is one out of the folder."""
        is_folder = os.path.isdir(path)
        folder = path if is_folder else self.folder_of(path)
        weights = self.complete(folder / self.in_folder(folder) if is_folder else path)
        sidecars = {name: folder / name for name in self.sidecars if os.path.isfile(folder / name)}
        for file in () if follow_links else sidecars.values():
            check_link(file, folder, weights)
        return ModelFiles(weights, sidecars)


def check_link(file: Path, folder: Path, weights: Path) -> None:
    """Raises ModelError unless a file is in a model's folder, or a link to one where its weights are: the Hub's cache
    consists of links. Any other file of this machine could be what a link leads to."""
    real = os.path.realpath(file)
    within = os.path.join(os.path.realpath(folder), "")
    if not real.startswith(within) and os.path.dirname(real) != os.path.dirname(os.path.realpath(weights)):
        raise ModelError(
            f"{file}: is a link out of the model's folder; put the file itself there, or name the model when the "
            "worker starts"
        )


StructT = TypeVar("StructT", bound=msgspec.Struct)


def read_json(path: Path | None, kind: type[StructT]) -> StructT:
    """Reads a JSON sidecar; returns the struct's defaults if there is no file. Raises ModelError naming a bad file."""
    if path is None:
        return kind()
    try:
        return msgspec.json.decode(read_regular(path, MAX_CONFIG_BYTES), type=kind, strict=False)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ModelError(f"{path}: {error}; correct or remove it") from error


def hold_weights(weights: Path) -> BinaryIO:
    """Returns an open file; the weights are in use until it is closed. Raises ModelError if they can't be read."""
    file = os.fdopen(open_regular(weights), "rb")
    if sys.platform == "win32":  # where no worker runs
        return file
    with contextlib.suppress(OSError):  # a file system without locks: use can't be detected
        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    return file


def is_held(weights: Path) -> bool:
    """Whether a worker is using the weights; False if that can't be detected."""
    if sys.platform == "win32":
        return False
    with os.fdopen(open_regular(weights), "rb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        except OSError:
            return False
    return False
