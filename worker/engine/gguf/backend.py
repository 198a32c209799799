"""Initialises llama.cpp once per process, passes its log lines on to ours, and finds the devices that it can use.

`python -m tokenbus.worker.engine.gguf.backend` prints the GPUs, with the descriptions of their drivers, as JSON."""

import ctypes
import json
import re
import threading
from collections.abc import Callable, Mapping, Sequence

import structlog
from llama_cpp import llama_cpp as llama

from tokenbus.worker.contract.contract import EngineDevice
from tokenbus.worker.contract.engine_errors import ModelError
from tokenbus.worker.contract.engine_settings import EngineSettings
from tokenbus.worker.files.device_memory import HOST, DeviceMemory

_ERROR, _WARNING = 4, 3
_MAX_ERRORS = 8
_BUILD_FOLDER = re.compile(r"^/\S*/")
"""The folder in which llama.cpp was built; the text of a failed assertion begins with it."""
_lib: ctypes.CDLL = llama._lib
"""llama.cpp with the ggml that it uses itself; `llama_cpp._ggml` may load a second copy, with devices of its own."""
_lock = threading.Lock()
_last_errors: list[str] = []
_abort_listeners: list[Callable[[str], None]] = []
NO_DEVICE = "none"
"""Stands for no device: everything is computed on the CPU."""
_CPU = 0
"""GGML_BACKEND_DEVICE_TYPE_CPU in ggml-backend.h, and the next two."""
_GPU = 1
_INTEGRATED_GPU = 2


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


def _load_backends() -> None:
    """Loads the best of the package's libraries for this processor, where it is built with several. llama.cpp's own
    functions would look for them in the current folder, and so run any that lie there."""
    llama.llama_log_set(_log_callback, ctypes.c_void_p(0))
    if not _lib.ggml_backend_reg_count():
        _lib.ggml_backend_load_all_from_path(bytes(llama._base_path))


_lib.ggml_backend_reg_count.restype = ctypes.c_size_t
_lib.ggml_backend_load_all_from_path.argtypes = [ctypes.c_char_p]
_lib.ggml_backend_load_all_from_path.restype = None
_load_backends()


def init() -> None:
    """Initialises llama.cpp; safe to call again."""
    llama.llama_log_set(_log_callback, ctypes.c_void_p(0))
    _lib.ggml_set_abort_callback(_abort_callback)
    llama.llama_backend_init()


def processor_features() -> frozenset[str]:
    """Returns the features of the processor that llama.cpp's code for it uses, such as AVX2."""
    return parse_features(llama.llama_print_system_info().decode())


def parse_features(text: str) -> frozenset[str]:
    """Returns the features of the processor in llama.cpp's line about all kinds of devices,
    `CUDA : ARCHS = 900 | CPU : AVX2 = 1 | REPACK = 1 | `."""
    found, device = set(), ""
    for part in text.split(" | "):
        named, colon, rest = part.partition(" : ")
        device = named if colon else device
        feature, _, value = (rest if colon else part).partition(" = ")
        if device == "CPU" and value not in ("", "0"):
            found.add(feature)
    return frozenset(found)


def on_abort(listener: Callable[[str], None]) -> None:
    """Registers a function that gets llama.cpp's message when the library is about to abort the process."""
    _abort_listeners.append(listener)


def forget_errors() -> None:
    """Forgets earlier errors, so that what is about to be tried is not explained by them."""
    with _lock:
        _last_errors.clear()


def last_error() -> str:
    """Returns the first of llama.cpp's recent errors, which is the cause of the later ones, and forgets them all."""
    with _lock:
        first = _last_errors[0] if _last_errors else "llama.cpp says no more"
        _last_errors.clear()
    return first


_lib.ggml_backend_dev_count.restype = ctypes.c_size_t
_lib.ggml_backend_dev_get.argtypes = [ctypes.c_size_t]
_lib.ggml_backend_dev_get.restype = ctypes.c_void_p
_lib.ggml_backend_dev_name.argtypes = [ctypes.c_void_p]
_lib.ggml_backend_dev_name.restype = ctypes.c_char_p
_lib.ggml_backend_dev_type.argtypes = [ctypes.c_void_p]
_lib.ggml_backend_dev_description.argtypes = [ctypes.c_void_p]
_lib.ggml_backend_dev_description.restype = ctypes.c_char_p
_lib.ggml_backend_dev_memory.argtypes = [
    ctypes.c_void_p,
    ctypes.POINTER(ctypes.c_size_t),
    ctypes.POINTER(ctypes.c_size_t),
]
_lib.ggml_backend_dev_memory.restype = None


def select_devices(names: Sequence[str], there: dict[str, int]) -> list[int]:
    """Returns the addresses of devices, given those of all available ones. Raises ModelError naming the allowed
    values."""
    if list(names) == [NO_DEVICE]:
        return []
    for name in names:
        if name not in there:
            known = f"{', '.join(there)}, or {NO_DEVICE}" if there else f"{NO_DEVICE}, since llama.cpp finds no GPU"
            raise ModelError(f"--devices must be {known}, got {name}")
    if len(set(names)) < len(names):
        raise ModelError(f"--devices must name each device once, got {','.join(names)}")
    return [there[name] for name in names]


def all_devices() -> dict[str, int]:
    """Returns the addresses of all devices besides the CPU, by name. llama.cpp must be initialised."""
    found = [_lib.ggml_backend_dev_get(number) for number in range(_lib.ggml_backend_dev_count())]
    return {_lib.ggml_backend_dev_name(one).decode(): one for one in found if _lib.ggml_backend_dev_type(one) != _CPU}


def gpus() -> dict[str, int]:
    """Returns the addresses of the GPUs by name: llama.cpp uses integrated ones only if there are no others."""
    there = all_devices()
    discrete, integrated = (
        {name: address for name, address in there.items() if _lib.ggml_backend_dev_type(address) == kind}
        for kind in (_GPU, _INTEGRATED_GPU)
    )
    return discrete or integrated


def computing_gpus(there: dict[str, int], settings: EngineSettings, gpu_layers: int) -> dict[str, int]:
    """Returns the GPUs that compute `gpu_layers` of a model's layers."""
    chosen = {name: there[name] for name in (settings.devices or there) if name in there}
    if not gpu_layers or not chosen:
        return {}
    if settings.split_mode == "none":
        main = [*chosen][min(settings.main_gpu, len(chosen) - 1)]
        return {main: chosen[main]}
    return chosen


def device_description(address: int) -> str:
    """Returns the driver's description of a device."""
    words: bytes = _lib.ggml_backend_dev_description(address)
    return words.decode(errors="replace")


def describe_devices(computing: Mapping[str, str], num_layers: int, gpu_layers: int) -> tuple[EngineDevice, ...]:
    """Returns all devices that compute a model, given the descriptions of its GPUs by name. The output is the first of
    the `gpu_layers`; how several GPUs divide the others is unknown."""
    on_gpus = min(max(0, gpu_layers - 1), num_layers) if computing else 0
    host = EngineDevice(name=HOST, kind="cpu", layers=num_layers - on_gpus)
    layers = on_gpus if len(computing) == 1 else None
    return (
        *([host] if on_gpus < num_layers else []),
        *(EngineDevice(name=name, kind="gpu", description=words, layers=layers) for name, words in computing.items()),
    )


def device_memory(there: dict[str, int]) -> list[DeviceMemory]:
    """Returns the memory of devices, given their addresses by name. A device without its own memory reports 0."""
    found = []
    for name, address in there.items():
        free, total = ctypes.c_size_t(0), ctypes.c_size_t(0)
        _lib.ggml_backend_dev_memory(address, ctypes.byref(free), ctypes.byref(total))
        found.append(DeviceMemory(name, total.value, free.value))
    return found


def as_device_array(addresses: Sequence[int]) -> ctypes.Array[ctypes.c_void_p]:
    """Returns addresses as llama.cpp takes them, with a null after the last."""
    return (ctypes.c_void_p * (len(addresses) + 1))(*addresses)


if __name__ == "__main__":
    init()
    print(json.dumps({name: device_description(address) for name, address in gpus().items()}))
