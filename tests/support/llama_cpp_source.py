"""Files from the source of llama-cpp-python, which are cached beside its wheel."""

from pathlib import Path

import llama_cpp
import pytest

from deploy import llama_cpp_wheel, progress

_NO_NETWORK = ("NewConnectionError", "NameResolutionError", "name resolution", "Network is unreachable")


def folder(kind: str) -> Path:
    """Returns the folder of one kind of files. Skips the test if they can't be fetched offline."""
    try:
        return llama_cpp_wheel.kept(llama_cpp.__version__, kind)
    except progress.CommandFailedError as error:
        if any(sign in error.output for sign in _NO_NETWORK):
            pytest.skip(f"offline, and {llama_cpp_wheel.kept_folder(llama_cpp.__version__, kind)} is not there")
        pytest.fail(f"the source of llama-cpp-python, which has the {kind}, can't be fetched: {error.output}")
