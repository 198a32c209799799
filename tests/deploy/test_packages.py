"""An installed Tokenbus has one top-level name, whichever way the wheel was made."""

import tarfile
import zipfile
from pathlib import Path

from hatchling.builders.sdist import SdistBuilder
from hatchling.builders.wheel import WheelBuilder

ROOT = Path(__file__).parents[2]


def wheel_of(root: Path, folder: Path) -> set[str]:
    """The files of the wheel that is built of a source tree."""
    (path,) = WheelBuilder(str(root)).build(directory=str(folder))
    return set(zipfile.ZipFile(path).namelist())


def test_a_wheel_has_one_top_level_name_and_is_the_same_when_it_is_built_through_the_source_distribution(
    tmp_path: Path,
) -> None:
    direct = wheel_of(ROOT, tmp_path / "direct")
    assert {name.partition("/")[0] for name in direct if ".dist-info/" not in name} == {"tokenbus"}
    assert {"tokenbus/py.typed", "tokenbus/worker/engine/process/main.py", "tokenbus/demo/demo.gguf"} <= direct
    (sdist,) = SdistBuilder(str(ROOT)).build(directory=str(tmp_path / "sdist"))
    with tarfile.open(sdist) as archive:
        archive.extractall(tmp_path / "unpacked", filter="data")
    (unpacked,) = (tmp_path / "unpacked").iterdir()
    assert wheel_of(unpacked, tmp_path / "through") == direct
