"""Quantizes a GGUF file with llama.cpp."""

import ctypes
import os
import re
from collections.abc import Callable
from pathlib import Path

from llama_cpp import llama_cpp as llama

from tokenbus.worker.contract.engine_errors import ModelError

_STEP = re.compile(r"\[ *(\d+)/ *(\d+)\]")
"""The beginning of the line that llama.cpp logs for each tensor."""
_ERROR = 4
_BUFFER_BYTES = 64 << 20
"""Size of the quantizer's work buffer; llama.cpp's default is 8 GiB."""

_silence = llama.llama_log_callback(lambda level, text, data: None)


def quantize(plain: Path, quantized: Path, kind: str, threads: int, progress: Callable[[float], None]) -> None:
    """Quantizes the file `plain` into `quantized`. Raises ModelError with llama.cpp's message if it can't."""
    errors: list[str] = []

    def log(level: int, text: bytes, _: ctypes.c_void_p) -> None:
        line = text.decode(errors="replace").strip()
        if level == _ERROR and line:
            errors.append(line)
        if step := _STEP.match(line):
            progress(int(step[1]) / max(1, int(step[2])))

    callback = llama.llama_log_callback(log)
    llama.llama_log_set(callback, ctypes.c_void_p(0))
    llama.llama_backend_init()
    params = llama.llama_model_quantize_default_params()
    params.ftype = getattr(llama, f"LLAMA_FTYPE_MOSTLY_{kind.upper()}")
    params.nthread = threads
    params.max_buf_size = _BUFFER_BYTES
    failed = llama.llama_model_quantize(os.fsencode(plain), os.fsencode(quantized), ctypes.byref(params))
    llama.llama_log_set(_silence, ctypes.c_void_p(0))  # `callback` is about to be freed
    if failed:
        raise ModelError(f"llama.cpp can't write {kind}: {errors[0] if errors else 'no details'}")
