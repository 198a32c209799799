"""Loads a graph into onnxruntime, binds the tensors of its runs, and runs it."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import onnx
import onnxruntime
import structlog

from tokenbus.worker.contract.engine_errors import DeviceError, InsufficientMemoryError, ModelError
from tokenbus.worker.contract.engine_settings import EngineSettings
from tokenbus.worker.engine.onnx.device import EXECUTION_PROVIDERS, Device
from tokenbus.worker.engine.onnx.graph import FIRST_LOGITS, Array, Graph, resolve_external_data

_ERRORS_ONLY = 3
_OUT_OF_MEMORY = ("allocate memory", "out of memory", "bad_alloc", "bad allocation")
"""Words that identify a failure for lack of memory: onnxruntime has no error class for it."""

AdapterInputs = Mapping[str, Any]
"""The matrices of a set of adapters in the device's memory, by input of the graph. It never changes, so a binding can
recognise it by identity."""
NO_ADAPTERS: AdapterInputs = {}
_MAX_LOGITS = 64 << 20
"""The most logits that one run may compute, 256 MiB, if a graph computes those of every token."""


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
        self._num_logits = 0
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

    def has_bound(self, name: str) -> bool:
        """Whether an input or output in host memory was bound before."""
        return name in self._kept

    def bind_device_input(self, name: str, address: int, shape: tuple[int, ...], dtype: "np.dtype[Any]") -> None:
        """Binds an input in the device's memory."""
        self._io_binding.bind_input(name, self._device.kind, self._device.number, dtype.type, shape, address)

    def bind_device_output(self, name: str, address: int, shape: tuple[int, ...], dtype: "np.dtype[Any]") -> None:
        """Binds an output to the device's memory."""
        self._io_binding.bind_output(name, self._device.kind, self._device.number, dtype.type, shape, address)

    def keep_logits(self, name: str, count: int) -> None:
        """Makes a run compute the logits of its last `count` tokens; `name` is the input that says so."""
        if count != self._num_logits:
            self.bind_input(name, np.array([-count], np.int64))
            self._num_logits = count


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


class _Loaded(NamedTuple):
    """A session, and the arrays to which its adapter inputs are bound without adapters."""

    session: Session
    no_adapters: AdapterInputs


class GraphRunner:
    """A loaded graph. `last_logits_only` says whether it was changed to compute only the last tokens' logits."""

    def __init__(self, graph: Graph, session: Session, vocab_size: int, *, last_logits_only: bool) -> None:
        self.graph = graph
        self._loaded = _Loaded(session, NO_ADAPTERS)
        self._vocab_size = vocab_size
        self._takes_first_logits = last_logits_only
        self._last_logits_only = last_logits_only or graph.keep_logits is not None

    def __repr__(self) -> str:
        return f"<GraphRunner of {self._loaded.session!r}>"

    @property
    def max_row_tokens(self) -> int:
        """The most tokens of one row that a run may compute."""
        return 1 << 30 if self._last_logits_only else max(1, _MAX_LOGITS // self._vocab_size)

    @property
    def session(self) -> Session:
        """The session of new bindings."""
        return self._loaded.session

    def replace(self, session: Session, no_adapters: Mapping[str, Array]) -> None:
        """Switches to a session of the same graph with inputs for adapters. Earlier bindings stay valid, and keep their
        session alive. May be called from any thread."""
        self._loaded = _Loaded(session, {name: session.tensor(array) for name, array in no_adapters.items()})

    def bind(self) -> Binding:
        """Returns a binding to which the caller binds the cache."""
        session, no_adapters = self._loaded
        return session.bind(no_adapters)

    def bind_inputs(
        self, binding: Binding, ids: Array, mask: Array, positions: Array, *, has_past: bool, num_logits: int = 1
    ) -> None:
        """Binds the inputs that the graph has. `ids` and `positions` are of (rows, tokens), `mask` of (rows, columns of
        past and tokens), and `num_logits` says of how many tokens the logits are computed at least."""
        graph = self.graph
        for name, array in (("input_ids", ids), (graph.mask, mask), (graph.positions, positions)):
            if name is not None:
                binding.bind_input(name, np.ascontiguousarray(array, graph.ids_dtype))
        if graph.token_types is not None:
            binding.bind_input(graph.token_types, np.zeros(ids.shape, graph.ids_dtype))
        if graph.keep_logits is not None:
            binding.bind_input(graph.keep_logits, np.array(max(1, num_logits), np.int64))
        elif self._takes_first_logits:
            binding.keep_logits(FIRST_LOGITS, max(1, num_logits))
        if graph.cache_branch is not None:
            binding.bind_input(graph.cache_branch, np.array([has_past]))

    def run(
        self,
        binding: Binding,
        ids: Array,
        mask: Array,
        positions: Array,
        *,
        has_past: bool,
        num_logits: int = 1,
        adapters: AdapterInputs = NO_ADAPTERS,
    ) -> Array:
        """Returns the logits after the last `num_logits` tokens of each row, of (rows * num_logits, vocabulary).

        The inputs are those of `bind_inputs`, and the adapters of all rows. Raises InsufficientMemoryError and
        DeviceError."""
        graph = self.graph
        assert graph.logits is not None
        self.bind_inputs(binding, ids, mask, positions, has_past=has_past, num_logits=num_logits)
        binding.bind_adapters(adapters)
        rows, count = ids.shape
        shape = (rows, max(1, num_logits) if self._last_logits_only else count, self._vocab_size)
        logits: Array = np.empty(shape, graph.logits_dtype)
        # An output stays bound, with its shape; one that was never bound is not computed.
        if num_logits or binding.has_bound(graph.logits):
            binding.bind_output(graph.logits, logits)
        binding.run()
        last: Array = logits[:, shape[1] - num_logits :].reshape(rows * num_logits, self._vocab_size)
        return last if last.dtype == np.float32 else last.astype(np.float32)
