"""Shows how a model writes reasoning and tool calls, according to its chat template, and whether its weights are of a
type that this processor is slow with."""

import sys

import msgspec

from tokenbus.protocol.prompt import tokenizer_bundle
from tokenbus.protocol.wire import errors
from tokenbus.worker.contract.chat_format import ChatFormat
from tokenbus.worker.contract.engine_errors import ModelError
from tokenbus.worker.engine.device import features
from tokenbus.worker.models import registry


def show(model: str) -> int:
    """Prints what is known of a model's format and type; returns 1 if the model can't be read."""
    try:
        rules, slow_weights = _read(model)
    except ModelError as error:
        print(f"tokenbus: {error}", file=sys.stderr)
        return 1
    found = features.infer_chat_format(rules)
    print("\n\n".join([*_report(rules, found), *filter(None, [slow_weights])]))
    return 0


def _read(model: str) -> tuple[tokenizer_bundle.PromptRules, str]:
    """Returns the rules for a model's prompts, and what it says of slow weights. Raises ModelError."""
    registry.check(model)
    files = registry.find(model, lambda _: None)
    # Imported here, because each of these loads a large library.
    if files.weights.suffix == ".gguf":
        from tokenbus.worker.engine.gguf.model import read_rules, slow_weights

        return read_rules(files.weights), slow_weights(files.weights)
    from tokenbus.worker.tokenizers.onnx_tokenizer import OnnxTokenizer

    return OnnxTokenizer(files.sidecars, None, str(files.weights)).rules, ""


def _report(rules: tokenizer_bundle.PromptRules, found: ChatFormat | None) -> list[str]:
    if not rules.chat_template:
        return ["The model has no chat template: it takes prompts and token ids only."]
    if found is None:
        return ["The chat template shows neither reasoning nor tool calls: answers are served as plain text."]
    parts = [
        f"features: {', '.join(features.of_format(found))}",
        f"format:\n{msgspec.json.format(msgspec.json.encode(found), indent=2).decode()}",
    ]
    if found.calls is not None:
        try:
            parts.append(f"a call as the model writes it:\n{features.example_call(rules)}")
        except errors.RequestError as error:
            parts.append(f"the template refuses the example: {error.error.message}")
    return parts
