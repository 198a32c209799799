"""The LoRA adapters of one replica: loaded alongside the model, and bound to the inputs of each run."""

from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path

import numpy as np

from tokenbus.protocol.wire.block_hash import Adapter
from tokenbus.worker.contract.engine_errors import ModelError
from tokenbus.worker.engine.device.loaded_models import ReplicaModels
from tokenbus.worker.engine.onnx import adapter_file, lora
from tokenbus.worker.engine.onnx.lora import OnnxAdapter
from tokenbus.worker.engine.onnx.model import OnnxModel
from tokenbus.worker.engine.onnx.session import NO_ADAPTERS, AdapterInputs

_MAX_SETS = 8
"""The number of adapter sets whose inputs are kept: clients choose scales, so there could be any number of sets."""


class ReplicaAdapters:
    """The adapters of one replica by digest, with the number of times that each was loaded.

    `load` may be called from any thread; everything else belongs to the thread that steps. `drop_bindings` drops
    everything that could keep an adapter's matrices in memory."""

    def __init__(self, model: OnnxModel, drop_bindings: Callable[[], None]) -> None:
        self._model = model
        self._base = lora.make_base(model.projections, model.model_config.architecture, model.graph.kv[0].width)
        self._drop_bindings = drop_bindings
        self._loaded = ReplicaModels(model.adapters)
        self._sets: OrderedDict[tuple[Adapter, ...], AdapterInputs] = OrderedDict()
        """The most recently used sets, the latest at the end."""

    def __repr__(self) -> str:
        return f"<ReplicaAdapters {self._loaded!r}>"

    def __contains__(self, digest: str) -> bool:
        return digest in self._loaded

    def load(self, path: Path) -> str:
        """Loads an adapter in addition to the existing ones, and returns its digest. Affects no request if it raises
        ModelError."""
        digest, changes = adapter_file.read(path, self._base)
        projections = self._model.projections
        self._model.take_adapters()

        def arrange() -> OnnxAdapter:
            arrays = lora.arrange(changes, projections)
            for name, array in arrays.items():
                if not np.isfinite(array).all():
                    raise ModelError(
                        f"{path}: {name} has values out of range for {array.dtype}, in which the graph computes"
                    )
            return OnnxAdapter(arrays)

        self._loaded.load(digest, arrange)
        return digest

    def unload(self, digest: str) -> None:
        """Reverses one `load`. If that was the last one, no sequence may use the adapter."""
        if self._loaded.is_last(digest):
            for used in [used for used in self._sets if any(one.digest == digest for one in used)]:
                del self._sets[used]
            self._drop_bindings()
        self._loaded.unload(digest)

    def inputs_of(self, used: tuple[Adapter, ...]) -> AdapterInputs:
        """Returns the inputs of the graph for a set of adapters, the same object as long as it is used often."""
        if not used:
            return NO_ADAPTERS
        if used not in self._sets:
            arrays = lora.combine([(self._loaded[one.digest], one.scale) for one in used])
            session = self._model.graph_runner.session
            self._sets[used] = {name: session.tensor(array) for name, array in arrays.items()}
            if len(self._sets) > _MAX_SETS:
                self._sets.popitem(last=False)
        self._sets.move_to_end(used)
        return self._sets[used]

    def close(self) -> None:
        """Frees every adapter that no other replica has. Nothing may still be computing."""
        self._sets.clear()
        self._drop_bindings()
        self._loaded.close()
