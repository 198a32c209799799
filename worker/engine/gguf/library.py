"""llama.cpp as a whole: started once, its log lines passed on to ours."""

import ctypes
import threading

import structlog
from llama_cpp import llama_cpp as llama

_ERROR, _WARNING = 4, 3
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


def start() -> None:
    """Safe to call again."""
    llama.llama_log_set(_log_callback, ctypes.c_void_p(0))
    llama.llama_backend_init()


def last_error() -> str:
    """The first of llama.cpp's recent complaints, which is the cause of those that follow; forgets them."""
    with _lock:
        first = _last_errors[0] if _last_errors else "llama.cpp says no more"
        _last_errors.clear()
    return first
