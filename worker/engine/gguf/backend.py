"""llama.cpp as a whole: started once, its log lines passed on to ours."""

import ctypes
import re
import threading
from collections.abc import Callable

import structlog
from llama_cpp import _ggml
from llama_cpp import llama_cpp as llama

_ERROR, _WARNING = 4, 3
_BUILD_FOLDER = re.compile(r"^/\S*/")
"""Where llama.cpp was built, at the beginning of what its assertions say."""
_lock = threading.Lock()
_last_errors: list[str] = []


def _log(level: int, text: bytes, _: ctypes.c_void_p) -> None:
    line = text.decode(errors="replace").strip()
    if level == _ERROR and line:
        with _lock:
            _last_errors.append(line)
            del _last_errors[:-8]
        structlog.get_logger().warning("llama_cpp", text=line)
    elif level == _WARNING and line:
        structlog.get_logger().debug("llama_cpp", text=line)


_log_callback = llama.llama_log_callback(_log)
"""Kept for the life of the process: llama.cpp calls it whenever it likes."""


_abort_listeners: list[Callable[[str], None]] = []
"""Who is told what llama.cpp says when it is about to end the process."""


def _aborted(text: bytes) -> None:
    """Called where an assertion of ggml has failed, in place of what it would print; the process ends behind it."""
    words = _BUILD_FOLDER.sub("", text.decode(errors="replace"))
    structlog.get_logger().error("llama_cpp", text=words)
    for tell in _abort_listeners:
        tell(words)


_abort_callback = ctypes.CFUNCTYPE(None, ctypes.c_char_p)(_aborted)
"""Kept, as the other."""


def init() -> None:
    """Safe to call again."""
    llama.llama_log_set(_log_callback, ctypes.c_void_p(0))
    _ggml.libggml.ggml_set_abort_callback(_abort_callback)
    llama.llama_backend_init()


def on_abort(tell: Callable[[str], None]) -> None:
    """Has `tell` given what llama.cpp says when it is about to end the process."""
    _abort_listeners.append(tell)


def last_error() -> str:
    """The first of llama.cpp's recent complaints, which is the cause of those that follow; forgets them."""
    with _lock:
        first = _last_errors[0] if _last_errors else "llama.cpp says no more"
        _last_errors.clear()
    return first
