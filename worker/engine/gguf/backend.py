"""Initialises llama.cpp once per process and passes its log lines on to ours."""

import ctypes
import re
import threading
from collections.abc import Callable

import structlog
from llama_cpp import _ggml
from llama_cpp import llama_cpp as llama

_ERROR, _WARNING = 4, 3
_MAX_ERRORS = 8
_BUILD_FOLDER = re.compile(r"^/\S*/")
"""The folder in which llama.cpp was built; the text of a failed assertion begins with it."""
_lock = threading.Lock()
_last_errors: list[str] = []
_abort_listeners: list[Callable[[str], None]] = []


def _log(level: int, text: bytes, _: ctypes.c_void_p) -> None:
    line = text.decode(errors="replace").strip()
    if level == _ERROR and line:
        with _lock:
            _last_errors.append(line)
            del _last_errors[:-_MAX_ERRORS]
        structlog.get_logger().warning("llama_cpp", text=line)
    elif level == _WARNING and line:
        structlog.get_logger().debug("llama_cpp", text=line)


def _aborted(text: bytes) -> None:
    """Runs when one of ggml's assertions has failed; the process ends when it returns."""
    words = _BUILD_FOLDER.sub("", text.decode(errors="replace"))
    structlog.get_logger().error("llama_cpp", text=words)
    for listener in _abort_listeners:
        listener(words)


# llama.cpp may call these as long as the process lives, so they must never be garbage-collected.
_log_callback = llama.llama_log_callback(_log)
_abort_callback = ctypes.CFUNCTYPE(None, ctypes.c_char_p)(_aborted)


def init() -> None:
    """Initialises llama.cpp; safe to call again."""
    llama.llama_log_set(_log_callback, ctypes.c_void_p(0))
    _ggml.libggml.ggml_set_abort_callback(_abort_callback)
    llama.llama_backend_init()


def on_abort(listener: Callable[[str], None]) -> None:
    """Registers a function that gets llama.cpp's message when the library is about to abort the process."""
    _abort_listeners.append(listener)


def last_error() -> str:
    """Returns the first of llama.cpp's recent errors, which is the cause of the later ones, and forgets them all."""
    with _lock:
        first = _last_errors[0] if _last_errors else "llama.cpp says no more"
        _last_errors.clear()
    return first
