"""An ONNX model in memory: the loaded graph, the vocabulary, and what its files say; any number of caches share it."""

import contextlib
from pathlib import Path
from typing import NamedTuple

import onnx
import structlog
import xxhash

from tokenbus.worker.engine.models import generation_config, model_files
from tokenbus.worker.engine.onnx import model_config
from tokenbus.worker.engine.onnx.graphs import graph, graph_edits
from tokenbus.worker.engine.onnx.graphs.graph_runner import GraphRunner
from tokenbus.worker.engine.onnx.graphs.session import Device, Session
from tokenbus.worker.engine.onnx.tokenizer.onnx_tokenizer import OnnxTokenizer
from tokenbus.worker.engine.process.settings import EngineSettings

_SAMPLES = 64
_SAMPLE_BYTES = 4_096


class ModelKey(NamedTuple):
    """What two replicas must have in common to share a model."""

    weights: Path
    device: Device
    device_memory_mib: int


class OnnxModel:
    """A loaded model. Raises ModelError for what can't be served, saying why and what would work."""

    def __init__(self, found: model_files.ModelFiles, settings: EngineSettings, device: Device) -> None:
        where = str(found.weights)
        self.files = found
        self.model_config = model_config.read(found.sidecars)
        self.generation_config = generation_config.read(found.sidecars, {})
        model = graph.load(found.weights)
        self.graph = graph.read(model, where, self.model_config.head_sizes)
        self.tokenizer = OnnxTokenizer(found.sidecars, self.graph.vocab_size, where)
        self.fingerprint = _fingerprint(found.weights, model)
        last_logits_only = self._change(model)
        self.session = Session(model, found.weights, settings, device)
        self.graph_runner = GraphRunner(
            self.graph, self.session, self.tokenizer.size, last_logits_only=last_logits_only
        )
        structlog.get_logger().info(
            "onnx_loaded", provider=device.kind, gqa=self.graph.uses_gqa, last_logits_only=last_logits_only
        )

    def __repr__(self) -> str:
        return f"<OnnxModel {self.files.weights}>"

    def _change(self, model: onnx.ModelProto) -> bool:
        """Has the graph show its hidden states where it can; says whether it makes logits of the last token only."""
        logits = self.graph.logits
        if logits is None:
            return False
        if self.graph.hidden is None and graph_edits.expose_hidden_states(model, logits):
            self.graph = self.graph._replace(hidden=graph_edits.HIDDEN)
        return self.graph.keep_logits is None and graph_edits.keep_last_logits(model, logits)

    def close(self) -> None:
        """The session gives its memory back when the last reference to it goes."""
        del self.session, self.graph_runner


def model_key(found: model_files.ModelFiles, settings: EngineSettings, device: Device) -> ModelKey:
    return ModelKey(found.weights.resolve(), device, settings.onnx.device_memory_mib)


def _fingerprint(path: Path, model: onnx.ModelProto) -> str:
    """Samples of the graph and of each file with its weights: a few ms whatever their size."""
    digest = xxhash.xxh3_64()
    for file in (path, *sorted(path.parent / name for name in set(graph.external_files(model)))):
        size = file.stat().st_size
        digest.update(size.to_bytes(8, "little"))
        with contextlib.closing(file.open("rb")) as data:
            for sample in range(_SAMPLES):
                data.seek(size * sample // _SAMPLES)
                digest.update(data.read(_SAMPLE_BYTES))
    return digest.hexdigest()
