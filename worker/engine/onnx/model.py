"""An ONNX model in memory: the loaded graph, the vocabulary, and what its files say; any number of caches share it."""

import contextlib
from pathlib import Path
from typing import NamedTuple

import onnx
import structlog
import xxhash

from tokenbus.worker.engine.models import advice, weights
from tokenbus.worker.engine.onnx.caller import Caller
from tokenbus.worker.engine.onnx.graphs import facts, graph, surgery
from tokenbus.worker.engine.onnx.graphs.session import Device, Session
from tokenbus.worker.engine.onnx.tokenizer.vocabulary import Vocabulary
from tokenbus.worker.engine.process.settings import EngineSettings

_SAMPLES = 64
_SAMPLE_BYTES = 4_096


class Key(NamedTuple):
    """What two replicas must have in common to share a model."""

    weights: Path
    device: Device
    device_memory_mib: int


class OnnxModel:
    """A loaded model. Raises ModelError for what can't be served, saying why and what would work."""

    def __init__(self, found: weights.Found, settings: EngineSettings, device: Device) -> None:
        where = str(found.weights)
        self.found = found
        self.facts = facts.read(found.sidecars)
        self.advised = advice.read(found.sidecars, {})
        model = graph.load(found.weights)
        self.graph = graph.read(model, where, self.facts.sizes)
        self.vocabulary = Vocabulary(found.sidecars, self.graph.vocab_size, where)
        self.fingerprint = _fingerprint(found.weights, model)
        only_last = self._change(model)
        self.session = Session(model, found.weights, settings, device)
        self.caller = Caller(self.graph, self.session, self.vocabulary.size, only_last=only_last)
        structlog.get_logger().info(
            "onnx_loaded", provider=device.kind, grouped=self.graph.grouped, only_last=only_last
        )

    def __repr__(self) -> str:
        return f"<OnnxModel {self.found.weights}>"

    def _change(self, model: onnx.ModelProto) -> bool:
        """Has the graph show its hidden states where it can; says whether it makes logits of the last token only."""
        logits = self.graph.logits
        if logits is None:
            return False
        if self.graph.hidden is None and surgery.show_hidden(model, logits):
            self.graph = self.graph._replace(hidden=surgery.HIDDEN)
        return self.graph.keep_logits is None and surgery.trim(model, logits)

    def close(self) -> None:
        """The session gives its memory back when the last reference to it goes."""
        del self.session, self.caller


def key_of(found: weights.Found, settings: EngineSettings, device: Device) -> Key:
    return Key(found.weights.resolve(), device, settings.onnx.device_memory_mib)


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
