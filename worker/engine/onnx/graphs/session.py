"""Loads a graph into onnxruntime and binds the tensors of its runs."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import structlog

from tokenbus.worker.contract.engine_errors import DeviceError, InsufficientMemoryError, ModelError
from tokenbus.worker.contract.engine_settings import EngineSettings
from tokenbus.worker.engine.onnx.graphs.arrays import Array
from tokenbus.worker.engine.onnx.graphs.device import EXECUTION_PROVIDERS, Device
from tokenbus.worker.engine.onnx.graphs.external_data import resolve_external_data

_ERRORS_ONLY = 3
_OUT_OF_MEMORY = ("allocate memory", "out of memory", "bad_alloc", "bad allocation")
"""Words that identify a failure for lack of memory: onnxruntime has no error class for it."""

AdapterInputs = Mapping[str, Any]
"""The matrices of a set of adapters in the device's memory, by input of the graph. It never changes, so a binding can
recognise it by identity."""
NO_ADAPTERS: AdapterInputs = {}


class Session:
    """A loaded graph. Raises ModelError, with onnxruntime's reason, if it can't be loaded."""

    def __init__(self, model: onnx.ModelProto, path: Path, settings: EngineSettings, device: Device) -> None:
        self.device = device
        try:
            self._session = _open(model, path, settings, device)
        except Exception as error:  # onnxruntime raises a separate class for each kind of failure
            raise ModelError(f"{path}: {_load_error(_reason(error), device)}") from error
        if EXECUTION_PROVIDERS[device.kind] not in self._session.get_providers():
            raise ModelError(
                f"{path}: onnxruntime could not start its CUDA provider, which needs the CUDA and cuDNN libraries that "
                f"onnxruntime-gpu {onnxruntime.__version__} names; install them, or pass --provider cpu"
            )

    def __repr__(self) -> str:
        return f"<Session on {self.device.kind}>"

    def bind(self, adapter_inputs: AdapterInputs = NO_ADAPTERS) -> "Binding":
        """Returns a binding in which all of the graph's adapter inputs are bound to these."""
        return Binding(self._session, self.device, adapter_inputs)

    def tensor(self, array: Array) -> Any:
        """Returns an array in the device's memory. On a CPU that is the array itself, which must not change."""
        return onnxruntime.OrtValue.ortvalue_from_numpy(array, self.device.kind, self.device.number)


class Binding:
    """The inputs and outputs of a run, by name. It keeps the arrays alive as long as they are bound."""

    def __init__(self, session: Any, device: Device, adapter_inputs: AdapterInputs) -> None:
        self._session = session
        self._io_binding = session.io_binding()
        self._device = device
        self._kept: dict[str, Array] = {}
        self._no_adapters = adapter_inputs
        self._adapters = NO_ADAPTERS
        for name, tensor in adapter_inputs.items():
            self._io_binding.bind_ortvalue_input(name, tensor)

    def __repr__(self) -> str:
        return f"<Binding of {', '.join(self._kept)}>"

    def run(self) -> None:
        """Raises InsufficientMemoryError if memory ran out, and DeviceError for any other failure."""
        try:
            self._session.run_with_iobinding(self._io_binding)
        except Exception as error:  # onnxruntime raises a separate class for each kind of failure
            reason = _reason(error)
            if any(sign in str(error) for sign in _OUT_OF_MEMORY):
                raise InsufficientMemoryError(reason) from error
            raise DeviceError(f"onnxruntime failed: {reason}") from error

    def fetch(self, name: str) -> Array:
        """Runs, and returns an output of any shape. Raises as `run` does."""
        self._io_binding.bind_output(name, "cpu")
        self.run()
        found: Array = self._io_binding.get_outputs()[0].numpy()
        return found

    def bind_adapters(self, inputs: AdapterInputs) -> None:
        """Binds the matrices of a set of adapters; inputs without a matrix get ones that change nothing."""
        if inputs is self._adapters:
            return
        for name in {**self._adapters, **inputs}:
            self._io_binding.bind_ortvalue_input(name, inputs.get(name, self._no_adapters[name]))
        self._adapters = inputs

    def bind_input(self, name: str, array: Array) -> None:
        """Binds an input in host memory."""
        self._kept[name] = array
        self._io_binding.bind_cpu_input(name, array)

    def bind_output(self, name: str, array: Array) -> None:
        """Binds an output to host memory."""
        assert array.flags.c_contiguous, name
        self._kept[name] = array
        self._io_binding.bind_output(name, "cpu", 0, array.dtype.type, array.shape, array.ctypes.data)

    def bind_device_input(self, name: str, address: int, shape: tuple[int, ...], dtype: "np.dtype[Any]") -> None:
        """Binds an input in the device's memory."""
        self._io_binding.bind_input(name, self._device.kind, self._device.number, dtype.type, shape, address)

    def bind_device_output(self, name: str, address: int, shape: tuple[int, ...], dtype: "np.dtype[Any]") -> None:
        """Binds an output to the device's memory."""
        self._io_binding.bind_output(name, self._device.kind, self._device.number, dtype.type, shape, address)


def _open(model: onnx.ModelProto, path: Path, settings: EngineSettings, device: Device) -> Any:
    if device.kind == "cuda":
        onnxruntime.preload_dlls()
    options = onnxruntime.SessionOptions()
    options.log_severity_level = _ERRORS_ONLY
    options.intra_op_num_threads = settings.threads
    options.inter_op_num_threads = 1
    options.execution_mode = onnxruntime.ExecutionMode.ORT_SEQUENTIAL
    # The graph is loaded from memory, where it was changed, so onnxruntime must be told where its weights are.
    folder = resolve_external_data(model, path.parent)
    options.add_session_config_entry("session.model_external_initializers_file_folder_path", str(folder))
    if not settings.onnx.spin:
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    providers = [(EXECUTION_PROVIDERS[device.kind], _provider_options(settings, device))]
    return onnxruntime.InferenceSession(model.SerializeToString(), options, providers=providers)


def _provider_options(settings: EngineSettings, device: Device) -> dict[str, str]:
    if device.kind == "cpu":
        return {}
    # By default the arena doubles, which would take far more of the GPU than is needed.
    options = {"device_id": str(device.number), "arena_extend_strategy": "kSameAsRequested"}
    if settings.onnx.device_memory_mib:
        options["gpu_mem_limit"] = str(settings.onnx.device_memory_mib << 20)
    return options


def _reason(error: Exception) -> str:
    """Returns the first line of onnxruntime's message, without its prefix."""
    line = (str(error).splitlines() or [type(error).__name__])[0]
    structlog.get_logger().debug("onnxruntime", text=str(error))
    return line.removeprefix("[ONNXRuntimeError] : ")[:400]


def _load_error(reason: str, device: Device) -> str:
    if "NOT_IMPLEMENTED" in reason:
        return (
            f"the {device.kind} provider can't run one of its nodes ({reason}); take another export, in fp32 or q4, or "
            "another --provider"
        )
    if any(sign in reason for sign in _OUT_OF_MEMORY):
        return f"there is not enough memory for it ({reason})"
    return f"onnxruntime {onnxruntime.__version__} can't load it: {reason}"
