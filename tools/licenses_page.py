"""Writes docs/licenses.md, the licences of all packages that an installation may have: `python -m tools.licenses_page`.

They are read from the metadata of the installed packages, with the versions of constraints.txt."""

import importlib.metadata
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

TARGET = Path(__file__).parents[1] / "docs" / "licenses.md"
EXTRAS = ("all", "onnx-gpu")
_HEAD = """# Licences

<!-- Made by `python -m tools.licenses_page` from the metadata of the installed packages. -->

Tokenbus is under the [Apache License 2.0](../LICENSE), and so is the demo model, which was trained from text that this
repository generates. It contains no code of others. An installation downloads the packages below: this is all of
`tokenbus[all]` with what these need in turn, in the versions of `constraints.txt`. None of them is under a licence
that would require another one for Tokenbus. Those under the MPL 2.0 (`certifi`, `tqdm`) are used unchanged, which is
all that it asks. Packages of the tests and benchmarks are never distributed.

Images contain the packages of their extra and the base image's, with the licences of Debian's packages in
`/usr/share/doc/*/copyright`; `libgomp1` is under the GPL 3 with the GCC Runtime Library Exception. The wheel of
llama.cpp (`llama-cpp-python`) has llama.cpp and ggml, both under the MIT licence. CUDA and cuDNN in the image for
NVIDIA GPUs are under NVIDIA's terms.

| package | version | licence |
|---|---|---|
"""
_KNOWN = {
    "BSD License": "BSD",
    "MIT License": "MIT",
    "Apache Software License": "Apache-2.0",
    "Apache 2.0": "Apache-2.0",
    "Apache 2 License": "Apache-2.0",
    "3-Clause BSD License": "BSD-3-Clause",
}
"""Other names of licences in metadata, with their identifiers."""


class Package(NamedTuple):
    """One installed package."""

    name: str
    version: str
    licence: str


def packages() -> Iterator[Package]:
    """Yields the installed packages that the extras need, by name."""
    for name in sorted(_needed()):
        distribution = importlib.metadata.distribution(name)
        yield Package(name, distribution.version, licence_of(distribution.metadata))


def _needed() -> set[str]:
    """Returns the names of the installed packages that the extras need, directly or not."""
    todo = [("tokenbus", extra) for extra in ("", *EXTRAS)]
    seen = set(todo)
    while todo:
        name, extra = todo.pop()
        try:
            requirements = importlib.metadata.requires(name) or []
        except importlib.metadata.PackageNotFoundError:  # one of onnxruntime's two distributions is
            seen.discard((name, extra))
            continue
        for requirement in map(Requirement, requirements):
            if requirement.marker is None or requirement.marker.evaluate({"extra": extra}):
                found = {(canonicalize_name(requirement.name), one) for one in ("", *requirement.extras)}
                todo += found - seen
                seen |= found
    return {name for name, _ in seen} - {"tokenbus"}


def licence_of(metadata: importlib.metadata.PackageMetadata) -> str:
    """Returns a licence as an SPDX expression where the package has one, or else in its own words."""
    fields = metadata.json
    named = str(fields.get("license_expression") or fields.get("license") or "").strip()
    if not named or "\n" in named:
        classifiers = metadata.get_all("Classifier") or []
        named = " OR ".join(one.split(" :: ")[-1] for one in classifiers if one.startswith("License :: "))
    if not named:
        raise ValueError(f"{metadata['Name']} does not say what its licence is")
    named = re.sub(r"^Mozilla Public License 2\.0.*", "MPL-2.0", named)
    return _KNOWN.get(named, named)


def render() -> str:
    return _HEAD + "".join(f"| `{one.name}` | {one.version} | {one.licence} |\n" for one in packages())


if __name__ == "__main__":
    TARGET.write_text(render())
