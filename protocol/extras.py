"""The optional parts of Tokenbus: which modules each extra brings, and the one line for a user who lacks some.

Nothing is imported to find out. A law holds this table equal to pyproject.toml's extras and to the code's imports."""

import importlib.util
import sys

_SERVER = ("prometheus_client", "starlette", "uvicorn", "h11", *(() if sys.platform == "win32" else ("uvloop",)))
_GATEWAY = (*_SERVER, *(() if sys.version_info >= (3, 14) else ("backports.zstd",)))
_ROUTER = (*_SERVER, "tokenizers", "jinja2", "numpy")
_WORKER = (*_ROUTER, "llguidance", "huggingface_hub", "httpx2")

MODULES: dict[str, tuple[str, ...]] = {
    "gateway": _GATEWAY,
    "router": _ROUTER,
    "worker-core": _WORKER,
    "worker": (*_WORKER, "llama_cpp", "gguf"),
    "worker-onnx": (*_WORKER, "onnx", "onnxruntime"),
    "bench": ("numpy",),
    "traces": ("opentelemetry.sdk", "opentelemetry.exporter.otlp.proto.http"),
    "oidc": ("jwt", "cryptography"),
    "up": (*_GATEWAY, *_WORKER),
}
"""Top-level modules by extra, except for those that every installation has. Those of `up` are enough for any engine:
which one a worker needs depends on its models."""

_INSTALL = {
    "worker-core": "'tokenbus[worker]' (for ONNX models 'tokenbus[worker-onnx]', on NVIDIA GPUs 'tokenbus[onnx-gpu]')",
    "worker-onnx": "'tokenbus[worker-onnx]' (on NVIDIA GPUs 'tokenbus[onnx-gpu]')",
}
"""Arguments of pip where they are more than the extra itself."""
_MAX_SHOWN = 3


class MissingExtraError(RuntimeError):
    """A part of Tokenbus is not installed. The text is one line, with the command that installs it."""


def is_installed(extra: str) -> bool:
    return not _missing(extra)


def require(extra: str, what: str) -> None:
    """Checks that an extra is installed. Raises MissingExtraError if `what` can't run for lack of it."""
    if missing := _missing(extra):
        raise MissingExtraError(
            f"{what} needs packages that are not installed ({_some(missing)}); run: pip install {install(extra)}"
        )


def install(extra: str) -> str:
    """Returns the arguments of `pip install` for an extra."""
    return _INSTALL.get(extra, f"'tokenbus[{extra}]'")


def _some(modules: list[str]) -> str:
    shown = modules if len(modules) <= _MAX_SHOWN else [*modules[: _MAX_SHOWN - 1], "..."]
    return ", ".join(shown)


def _missing(extra: str) -> list[str]:
    return [module for module in MODULES[extra] if not _is_there(module)]


def _is_there(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # its parent is missing
        return False
