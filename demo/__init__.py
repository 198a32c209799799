"""The demo model: a small llama trained on generated text, shipped so that the first answer needs no download."""

from pathlib import Path

MODEL_PATH = Path(__file__).with_name("demo.gguf")
ONNX_PATH = Path(__file__).with_name("demo-onnx")
ADAPTER_PATHS = {name: Path(__file__).with_name("adapters") / f"{name}.gguf" for name in ("letter", "pirate")}
"""LoRA adapters of the demo model, by name: one answers as a letter, the other as a pirate."""
CORRECT_SUMS_UP_TO = 50
"""Both addends of every sum in the training data are below this."""

if __name__ != "tokenbus.demo":
    raise ImportError("import tokenbus.demo: it is not a package of its own")
